"""What steps on a device are made of, in pure torch: the specification, and for devices without other kernels."""

from dlion.ops.reference import ballot as ballot  # takes t as a tensor too
from dlion.resident.applying import apply_there as apply_there
from dlion.resident.applying import knows as knows
from dlion.resident.applying import numbers as numbers
from dlion.resident.counting import tally_count as tally_count
from dlion.resident.counting import tally_count_ternary as tally_count_ternary
from dlion.resident.counting import tally_majority as tally_majority
from dlion.resident.counting import tally_majority_ternary as tally_majority_ternary
from dlion.resident.entries import close as close
from dlion.resident.entries import enter as enter
from dlion.resident.headers import ballot_header as ballot_header
from dlion.resident.headers import judge as judge
