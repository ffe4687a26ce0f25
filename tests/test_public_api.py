"""Guards the names that dlion offers, and that naming them does not import torch before it is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

import dlion

ROOT = Path(__file__).resolve().parent.parent


def imports_torch(code: str, *arguments: str) -> bool:
    """Run `code` in a new interpreter and say whether torch was imported when it ended."""
    watch = "import atexit, sys\natexit.register(lambda: print('\\n', 'torch' in sys.modules))\n"
    command = [sys.executable, "-c", watch + code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1] == "True"


HELP = "import sys\nfrom dlion.cli import main\nsys.exit(main())"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "arguments"),
    [("import dlion", ()), (HELP, ("--help",)), (HELP, ("train", "--help")), (HELP, ("--version",))],
)
def test_torch_is_not_imported(code: str, arguments: tuple[str, ...]) -> None:
    assert not imports_torch(code, *arguments)


@pytest.mark.processes
def test_an_import_of_torch_is_noticed() -> None:
    assert imports_torch("import dlion\ndlion.DistributedLion")


def test_the_public_names_are_those_that_resolve() -> None:
    assert sorted(dlion.__all__) == dir(dlion) == sorted([*dlion._HOME, "__version__"])
    assert len(set(dlion.__all__)) == len(dlion.__all__)
    for name in dlion.__all__:
        assert getattr(dlion, name) is not None
    with pytest.raises(AttributeError, match=r"it offers .*DistributedLion"):
        dlion.DistributedLoin  # noqa: B018
