"""What a thread executes of a kernel that goes through its chunk in whole parts, by its machine code."""

import re
from collections import Counter
from typing import NamedTuple

LABEL = re.compile(r"^(\.L_x_\w+):")
LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)(.*?);")
# Nsight Compute's guide names the units. Half as wide as what is issued is the ALU: all integers but products, all
# comparisons and choices. The products and sums of numbers, and products of integers, are done beside it.
BESIDE = ("FADD", "FMUL", "IMAD")
MEMORY = ("LD", "ST", "SHFL", "BAR", "S2", "EXIT", "BRA", "BSSY", "BSYNC", "NOP")


class Instruction(NamedTuple):
    """Its name, and the numbers of those that may come after it; none where the program ends."""

    name: str
    following: tuple[int, ...]


def instructions(text: str) -> list[Instruction]:
    """Of what `nvdisasm -c` prints of one kernel."""
    labels: dict[str, int] = {}
    lines: list[re.Match[str]] = []
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(lines)
        if found := LINE.match(line):
            lines.append(found)
    made = []
    for number, (predicate, name, rest) in enumerate(line.groups() for line in lines):
        following = (number + 1,) if predicate or "UP" in rest or name not in ("EXIT", "BRA") else ()
        if name.startswith("BRA"):
            following += (labels[re.findall(r"\.L_x_\w+", rest)[0]],)
        made.append(Instruction(name, following))
    return made


def ways(code: list[Instruction]) -> list[tuple[list[str], list[str]]]:
    """Every way through the code that takes one loop once and no other: all its instructions, and those of the loop."""
    found = []
    todo: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,), ())]
    while todo:
        way, loop = todo.pop()
        name, following = code[way[-1]]
        forward = [place for place in following if place not in way]
        if len(forward) < len(following):
            if loop:
                continue
            loop = way[way.index(next(place for place in following if place in way)) :]
        if loop and (name == "EXIT" or not forward):
            found.append(([code[place].name for place in way], [code[place].name for place in loop]))
        todo += [((*way, place), loop) for place in forward]
    return found


def executed(text: str, turns: int) -> Counter[str]:
    """How often each instruction in the usual case: whole parts alone, all of them written, and nothing odd in them.

    That is the shortest of the ways with the most loads and stores of 16 bytes.

    Args:
        text: of `nvdisasm -c`. turns: how often the loop over whole parts is taken.
    """
    all_ways = [Counter(names) for names in ([*way, *loop * (turns - 1)] for way, loop in ways(instructions(text)))]
    return max(all_ways, key=lambda names: (names["LDG.E.128"], names["STG.E.128"], -names.total()))


def at_half_rate(names: Counter[str]) -> int:
    """Of what is executed the instructions of the ALU."""
    beside = (*BESIDE, *MEMORY, "U", "R2UR")
    return sum(count for name, count in names.items() if not name.startswith(beside))
