"""How a value that is out of range is answered."""


def require(legal: bool, flag: str, value: object, allowed: str) -> None:
    """Raise a ValueError about the value of a flag (batch_size: --batch-size) unless it is legal."""
    if not legal:
        raise ValueError(f"--{flag.replace('_', '-')} must be {allowed}, and {value} was given.")
