"""N workers in one process, bitwise equal to N processes: `Simulation`; and what can go wrong with them: `Fault`."""

from dlion.simulate.faults import ACTS, Fault
from dlion.simulate.simulation import Simulation

__all__ = ["ACTS", "Fault", "Simulation"]
