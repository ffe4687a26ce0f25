"""What the tests of the compiled CPU kernels share: the instruction sets here, and comparisons with the reference."""

from collections.abc import Iterator
from functools import partial

import kernel_cases
import pytest

from dlion.ops import library, native

if not library.available():
    pytest.skip("this installation has no compiled kernels", allow_module_level=True)

assert_ballots_agree = partial(kernel_cases.assert_ballots_agree, native)
assert_verdicts_agree = partial(kernel_cases.assert_verdicts_agree, native)


def paths() -> list[str]:
    found = []
    for path in library.PATHS[1:]:
        try:
            library.use_path(path)
        except ValueError:
            continue
        found.append(path)
    library.use_path("auto")
    return found


def forced(path: str) -> Iterator[str]:
    """Run on one instruction set: the body of a fixture."""
    library.use_path(path)
    assert library.path() == path
    yield path
    library.use_path("auto")
