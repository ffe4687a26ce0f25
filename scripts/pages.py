"""Reads Markdown as far as the documentation needs it: links, headings, code blocks; and names in Python files."""

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2`*[ \t]*$\n?", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`+[^`\n]*`+")
_LINK = re.compile(r"\[((?:[^\[\]`]|`[^`\n]*`)*)\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_MARK = re.compile(r"<!-- ([a-z]+) -->\n\Z")


@dataclass(frozen=True)
class Link:
    """`[label](target)`, from `start` to `end` of the text."""

    label: str
    target: str
    start: int
    end: int

    @property
    def is_local(self) -> bool:
        """Whether it leads to a file or heading of this repository."""
        return re.match(r"[a-z]+:", self.target) is None

    @property
    def path(self) -> str:
        return self.target.partition("#")[0]

    @property
    def anchor(self) -> str:
        return self.target.partition("#")[2]


@dataclass(frozen=True)
class Block:
    """A fenced code block; `mark` is the word of a comment `<!-- mark -->` on the line before it."""

    language: str
    code: str
    mark: str | None


def documents() -> list[Path]:
    """Every Markdown file that readers meet: those of the repository's root, and all in docs/."""
    return sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def blocks(text: str) -> list[Block]:
    """The fenced code blocks of a page, in order."""
    found = []
    for fence in _FENCE.finditer(text):
        mark = _MARK.search(text[: fence.start()])
        found.append(Block(fence[3].strip(), fence[4], mark[1] if mark else None))
    return found


def links(text: str) -> Iterator[Link]:
    """The links and pictures of a page; what stands in code is none."""
    hidden = _FENCE.sub(lambda fence: re.sub(r"[^\n]", " ", fence[0]), text)
    for match in _LINK.finditer(hidden):
        if not any(code.start() < match.start() < code.end() for code in _CODE.finditer(*_line(hidden, match.start()))):
            yield Link(match[1], match[2], match.start(), match.end())


def _line(text: str, place: int) -> tuple[str, int, int]:
    """The line around a place, as `finditer` takes it."""
    end = text.find("\n", place)
    return text, text.rfind("\n", 0, place) + 1, len(text) if end < 0 else end


def anchors(text: str) -> set[str]:
    """The anchors of headings that are the same on code hosts and in the built site, and there once."""
    found = []
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "").lower()
        kept = re.sub(r"[^\w\s-]", "", words).strip()
        found.append((kept.replace(" ", "-"), re.sub(r"[-\s]+", "-", kept)))
    return {hosted for hosted, built in found if hosted == built and found.count((hosted, built)) == 1}


def resolved(page: Path, link: Link) -> Path:
    """The file or folder that a local link of `page` leads to."""
    return Path(os.path.normpath(page.parent / link.path)) if link.path else page


def definitions(source: str) -> dict[str, int]:
    """The names that a Python file defines, methods and fields as `Class.name`, and the line of each."""
    found: dict[str, int] = {}
    for node in ast.parse(source).body:
        found |= _defined(node, "")
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                found |= _defined(inner, f"{node.name}.")
    return found


def _defined(node: ast.stmt, before: str) -> dict[str, int]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {before + node.name: node.lineno}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {before + target.id: node.lineno for target in targets if isinstance(target, ast.Name)}


def named(link: Link) -> str | None:
    """The name that a link to a Python file shows, None where it shows the file itself: [`step`](../dlion/optim.py)."""
    label = link.label.strip("`")
    if not link.path.endswith(".py") or not link.label.startswith("`") or label.endswith(".py"):
        return None
    return label
