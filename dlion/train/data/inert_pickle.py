"""Read arrays from a pickle without running anything that is in it.

CIFAR-10 is published as pickles made by Python 2 and NumPy 1, and a pickle can name any function to call.
Here the few names that a pickled array needs stand for inert records of their arguments, not even for NumPy's
own classes (a forged dtype state could make NumPy read foreign memory); every other name is refused.
"""

import io
import math
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from dlion.train.legal import shown


class _Dtype:
    """Stands for `numpy.dtype`: remembers its arguments; the state is of no use."""

    def __init__(self, *arguments: Any) -> None:
        self.code = arguments[0] if arguments else None

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stands for `numpy.ndarray`: remembers shape, dtype and bytes."""

    shape: Any = None
    dtype: Any = None
    content: Any = None

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, _, self.content = state


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _from_buffer(content: Any, dtype: Any, shape: Any, _order: Any) -> _Array:
    array = _Array()
    array.shape, array.dtype, array.content = shape, dtype, content
    return array


def _encode(text: str, _encoding: str) -> bytes:
    # Python 3 writes bytes into old protocols as latin-1 text; no other codec is needed or looked up.
    return text.encode("latin-1")


_STAND_INS = {"dtype": _Dtype, "ndarray": _Array, "_reconstruct": _reconstruct, "_frombuffer": _from_buffer}
_ALLOWED: dict[tuple[str, str], Any] = {("_codecs", "encode"): _encode} | {
    (module, name): stand_in
    for name, stand_in in _STAND_INS.items()
    for module in (
        "numpy",
        "numpy.core.multiarray",
        "numpy._core.multiarray",
        "numpy.core.numeric",
        "numpy._core.numeric",
    )
}


class _Unpickler(pickle._Unpickler):
    """In Python, slow and safe: that in C makes room for as many objects as a damaged number says, 64 GB of them."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no file of plain arrays needs")
        return _ALLOWED[module, name]


def load(content: bytes) -> Any:
    """The pickled object, with arrays as records for `as_bytes`; strings of Python 2 become bytes.

    Raises: ValueError: not a pickle, or one that asks for anything but arrays and builtin containers.
    """
    try:
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # Damaged pickles raise nearly anything: KeyError, IndexError, MemoryError, ...
        raise ValueError(shown(str(error) or type(error).__name__)) from None


def as_bytes(array: Any) -> npt.NDArray[np.uint8]:
    """The u8 array of a record that `load` returned.

    Raises: ValueError: not a whole array of unsigned bytes.
    """
    code = getattr(getattr(array, "dtype", None), "code", None)
    content = getattr(array, "content", None)
    shape = getattr(array, "shape", None)
    if code not in ("u1", b"u1") or not isinstance(content, bytes | bytearray):
        raise ValueError("an array of unsigned bytes was expected")
    if not isinstance(shape, tuple) or not all(isinstance(size, int) and 0 <= size < 2**63 for size in shape):
        raise ValueError("an array with a shape was expected")
    if math.prod(shape) != len(content):
        raise ValueError(f"an array of shape {shape} holds {len(content):,} bytes")
    return np.frombuffer(bytearray(content), np.uint8).reshape(shape)
