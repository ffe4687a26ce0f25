"""Files that appear whole or not at all, and documents with parts that are made from results."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write the file so that it is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def fill(document: Path, kind: str, part: str, section: str) -> None:
    """Replace what stands between `<!-- KIND:begin PART -->` and `<!-- KIND:end PART -->`.

    Raises: ValueError when the marks are not there once each, or there is no such document.
    """
    begin, end = f"<!-- {kind}:begin {part} -->", f"<!-- {kind}:end {part} -->"
    if not document.is_file():
        raise ValueError(f"there is no {document}: name a document with the marks {begin} and {end}.")
    text = document.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ValueError(f"{document} must hold the marks {begin} and {end} once each, in this order.")
    before = text[: text.index(begin) + len(begin)]
    write_whole(document, f"{before}\n{section}\n{text[text.index(end) :]}")
