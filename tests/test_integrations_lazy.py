"""Integrations cost nothing to those who do not ask for them, and say in one sentence what they need."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# file of dlion/integrations: (package that is missing, extra that brings it)
NEEDS = {
    "accelerate": ("accelerate", "accelerate"),
    "lightning": ("lightning", "lightning"),
    "torchtitan": ("torchtitan", "torchtitan"),
    "transformers": ("transformers", "transformers"),
}


@pytest.mark.processes
def test_the_core_imports_no_framework() -> None:
    frameworks = sorted({package for package, _ in NEEDS.values()})
    code = "import sys, dlion, dlion.integrations, dlion.optim, dlion.checkpoint, dlion.integrations.ddp\n"
    code += f"print([name for name in {frameworks} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_package_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, extra = NEEDS[name]
    for module in [module for module in sys.modules if module.startswith("dlion.integrations.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'needs {package}: pip install "dlion\[{extra}\]"$') as caught:
        importlib.import_module(f"dlion.integrations.{name}")
    assert "\n" not in str(caught.value)
