"""The compiled CPU kernels' library: which file it is, its C functions, and the instruction set that it uses."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

PATHS = ("auto", "portable", "avx2", "avx512")

FILE = "dlion_kernels.so"
INTERFACE = 3  # of the C functions; a library left over from another version is not called

_int, _long, _word, _address = ctypes.c_int, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
_moment = [_word] * 3  # first word, t, rank or seed
SIGNATURES = {
    "dlion_ballot": [_address] * 6 + [_long, _address, _address, _long, _address, _long, _long] + _moment + [_int],
    "dlion_apply": [_address] * 5 + [_long, _address] + [_long] * 3 + [_address] * 2 + [_long, _int] + _moment + [_int],
    "dlion_tally": [_address] + [_long] * 4 + [_int] * 3 + [_address, _word, _word, _int],
    "dlion_hash": [_address, _long, _word, _int],
    "dlion_use_path": [ctypes.c_char_p],
}

_loaded: list[ctypes.CDLL] = []


def load(folders: Sequence[str]) -> bool:
    """Load the library of this version from the first of `folders` that has one; False where none was compiled."""
    for folder in folders:
        path = Path(folder) / FILE
        if path.is_file():
            library = ctypes.CDLL(str(path))
            if library.dlion_interface() == INTERFACE:
                for name, arguments in SIGNATURES.items():
                    getattr(library, name).argtypes = arguments
                library.dlion_path.restype = ctypes.c_char_p
                library.dlion_hash.restype = _long
                _loaded.append(library)
                return True
    return False


def available() -> bool:
    """Whether `load` found the library."""
    return bool(_loaded)


def path() -> str:
    """The instruction set in use: "portable", "avx2" or "avx512". All give the same bits."""
    return str(loaded().dlion_path().decode())


def use_path(name: str) -> None:
    """Use another instruction set, for tests and measurements; "auto" is the fastest.

    Raises:
        ValueError: this processor does not have it.
    """
    if not loaded().dlion_use_path(name.encode()):
        raise ValueError(f"this processor has no path {name!r} for the native kernels: choose auto or portable")


def loaded() -> ctypes.CDLL:
    """The library; only where it is `available`."""
    return _loaded[0]
