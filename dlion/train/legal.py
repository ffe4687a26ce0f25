"""How a value that is out of range is answered."""

SHOWN = 160  # letters of what was given


def require(legal: bool, flag: str, value: object, allowed: str) -> None:
    """Raise a ValueError about the value of a flag (batch_size: --batch-size) unless it is legal."""
    if not legal:
        raise ValueError(f"--{flag.replace('_', '-')} must be {allowed}, and {shown(value)} was given.")


def shown(value: object) -> str:
    """What was given, fit for a message: on one line, and not all of it where it is long."""
    text = str(value) if _is_small(value) else f"a number of {value.bit_length()} bits"  # type: ignore[attr-defined]
    plain = text if text.isprintable() else ascii(text)[1:-1]
    return plain if len(plain) <= SHOWN else f"{plain[:SHOWN]}..."


def _is_small(value: object) -> bool:
    """Python refuses to write larger integers."""
    return not isinstance(value, int) or value.bit_length() < 4096
