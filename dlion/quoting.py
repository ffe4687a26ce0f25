"""Text of others in our sentences: on one line, and without what would drive a terminal."""

import re

LONG_INTEGER = 4096  # bits: Python refuses to write larger ones
STYLES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # of a terminal: torch prints parts of its errors in bold


def visible(text: str) -> str:
    """`text` without a terminal's styles; every other letter that cannot be printed as its escape: '\\x07', '\\n'."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in STYLES.sub("", text))


def shortened(text: str, most: int) -> str:
    """`text`, visible, and not all of it where it has more than `most` letters."""
    plain = visible(text)
    return plain if len(plain) <= most else f"{plain[:most]}..."


def one_line(text: str, most: int) -> str:
    """The same, with its lines one after another."""
    return shortened(" ".join(STYLES.sub("", text).split()), most)


def shown(value: object, most: int = 100) -> str:
    """A value as Python writes it, not all of it where it is long; what it is, where Python refuses to write it."""
    if isinstance(value, int) and value.bit_length() >= LONG_INTEGER:
        return f"a number of {value.bit_length()} bits"
    try:
        return shortened(repr(value), most)
    except ValueError:  # of long integers inside
        return f"a {type(value).__name__}"
