"""Ways to spoil an input: bytes of any kind, and JSON with its structure known. All choices come from one generator."""

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

# Sizes that headers like to lie about, and the ends of the usual integers.
LIES = (0, 1, 2, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS = ("0", "-1", "1", "1e309", "-1e309", "nan", "inf", "1e-400", "9" * 25, "9" * 5000, str(2**60), "1.5", "0x10")
WORDS = (
    *(b"null", b"true", b"false", b"[]", b"{}", b'""', b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\r\n", b"\n", b'"', b"="),
    *("\u2028".encode(), "é".encode(), b"[" * 40, b"[" * 100_000, b"{" * 40, b'{"a":' * 20_000, b"../", b"/", b"%s"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 2**1100, 1.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "a", "\0", "é" * 50, "../..", "1", "nan", "\ud800", "x" * 5000),
    *([], [[]], [None], [1], {}, {"": None}, {"a": {"b": []}}, list(range(200))),
)
_NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?")


def spoiled(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """The content after one to four of the edits below. others: inputs of the same kind, of which parts may come."""
    for _ in range(random.choice((1, 1, 1, 2, 2, 4))):
        edit = random.choice(EDITS)
        content = edit(content, random) if edit is not _spliced else _spliced(content, random, random.choice(others))
    return content


def _place(content: bytes, random: Random) -> int:
    """Anywhere, at the beginning more often than elsewhere: headers are there."""
    end = len(content)
    return random.randrange(min(end, 64) + 1) if random.random() < 0.5 else random.randrange(end + 1)


def _flipped(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        if changed:
            changed[min(_place(content, random), len(changed) - 1)] ^= 1 << random.randrange(8)
    return bytes(changed)


def _cut(content: bytes, random: Random) -> bytes:
    return content[: _place(content, random)] if random.random() < 0.8 else content[_place(content, random) :]


def _inserted(content: bytes, random: Random) -> bytes:
    at = _place(content, random)
    return content[:at] + random.choice((random.randbytes(random.choice((1, 3, 40))), b"\0" * 200)) + content[at:]


def _removed(content: bytes, random: Random) -> bytes:
    at = _place(content, random)
    return content[:at] + content[at + random.choice((1, 2, 8, 100)) :]


def _repeated(content: bytes, random: Random) -> bytes:
    at = _place(content, random)
    end = at + random.choice((1, 4, 16, 200))
    return content[:end] + content[at:end] * random.choice((1, 2, 30)) + content[end:]


def _overwritten(content: bytes, random: Random) -> bytes:
    """An integer of 1 to 8 bytes, in either order of bytes, with a lie."""
    width = random.choice((1, 2, 4, 4, 8))
    at = _place(content, random)
    lie = (random.choice(LIES) % 256**width).to_bytes(width, random.choice(("little", "big")))
    return content[:at] + lie + content[at + width :]


def _renumbered(content: bytes, random: Random) -> bytes:
    found = list(_NUMBER.finditer(content[:20_000]))
    if not found:
        return _overwritten(content, random)
    one = random.choice(found)
    return content[: one.start()] + random.choice(NUMBERS).encode() + content[one.end() :]


def _worded(content: bytes, random: Random) -> bytes:
    at = _place(content, random)
    return content[:at] + random.choice(WORDS) + content[at + random.choice((0, 0, 1, 5)) :]


def _emptied(content: bytes, random: Random) -> bytes:
    return random.choice((b"", b"\0", b"\n", content + content, content[::-1]))


def _spliced(content: bytes, random: Random, other: bytes = b"") -> bytes:
    return content[: _place(content, random)] + other[_place(other, random) :]


EDITS: tuple[Callable[..., bytes], ...] = (
    *(_flipped, _flipped, _cut, _inserted, _removed, _repeated, _overwritten, _overwritten, _renumbered, _worded),
    *(_emptied, _spliced),
)


def restructured(value: Any, random: Random) -> Any:
    """JSON with one part of it replaced by another kind of thing, taken out, doubled or renamed."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        changed = dict(value)
        how = random.random()
        if how < 0.6:
            changed[key] = restructured(value[key], random)
        elif how < 0.75:
            del changed[key]
        elif how < 0.9:
            changed[random.choice(("", "x", key + " ", key.upper(), *value))] = changed.pop(key)
        else:
            changed[random.choice(("x", "", "step"))] = random.choice(VALUES)
        return changed
    if isinstance(value, list) and value and random.random() < 0.85:
        at = random.randrange(len(value))
        replaced = [restructured(value[at], random)]
        return value[:at] + random.choice((replaced, replaced, [], [value[at]] * 2)) + value[at + 1 :]
    return random.choice(VALUES)


def spoiled_json(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """A document of JSON with its structure changed, or any other edit of its bytes."""
    if random.random() < 0.4:
        return spoiled(content, others, random)
    return json.dumps(restructured(json.loads(content), random)).encode()


def spoiled_lines(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """Lines of JSON, one of them with its structure changed, or any other edit of the bytes."""
    if random.random() < 0.4:
        return spoiled(content, others, random)
    lines = content.splitlines()
    at = random.randrange(len(lines))
    lines[at] = json.dumps(restructured(json.loads(lines[at]), random)).encode()
    return b"\n".join(lines) + b"\n"
