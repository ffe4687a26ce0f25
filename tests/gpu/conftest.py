"""Without a GPU the Triton kernels run in Triton's interpreter, which must be asked for before Triton is imported."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="the tests of GPU kernels need Triton: pip install -r requirements/triton.txt")
