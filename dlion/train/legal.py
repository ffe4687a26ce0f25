"""How a value that is out of range is answered."""

from dlion import quoting
from dlion.settings import LARGEST

SHOWN = 160  # letters of what was given


def require(legal: bool, flag: str, value: object, allowed: str) -> None:
    """Raise a ValueError about the value of a flag (batch_size: --batch-size) unless it is legal."""
    if not legal:
        raise ValueError(f"--{flag.replace('_', '-')} must be {allowed}, and {shown(value)} was given.")


def require_count(flag: str, value: int | None, least: int = 1) -> None:
    """Raise a ValueError unless something can be counted so; None is what was left open."""
    if value is not None:
        require(value >= least, flag, value, f"at least {least}")
        require(value <= LARGEST, flag, value, f"at most {LARGEST:,}")


def shown(value: object) -> str:
    """What was given, fit for a message: on one line, and not all of it where it is long."""
    return quoting.shown(value, SHOWN) if isinstance(value, int) else quoting.shortened(str(value), SHOWN)


def said_by(error: BaseException) -> str:
    """What a foreign package says of its error, fit for a message; the kind of error where it says nothing."""
    return shown(" ".join(str(error).split()) or type(error).__name__)
