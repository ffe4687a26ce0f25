"""Guards the documentation: links, navigation, names of code and of the API lead to what is there."""

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pages
import pytest
import screenshots

import dlion
import dlion.errors
from dlion.cli import app

ROOT = Path(__file__).resolve().parent.parent
API = (ROOT / "docs/api.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^::: (\S+)$", API, re.MULTILINE)


def faults(page: Path, text: str) -> Iterator[str]:
    """What is wrong with the links of a page that lead to files, headings and names of this repository."""
    for link in pages.links(text):
        target = pages.resolved(page, link)
        if not link.is_local:
            continue
        if link.path and not (target.exists() and target.is_relative_to(ROOT)):
            yield f"{link.target}: no such file"
            continue
        name = pages.named(link)
        there = target.read_text(encoding="utf-8") if link.path and (link.anchor or name) else text
        if link.anchor and link.anchor not in pages.anchors(there):
            yield f"{link.target}: no such heading, or one whose anchor differs between code hosts and the site"
        if name and name not in pages.definitions(there):
            yield f"{link.target} does not define {name}"


def test_no_link_is_dead() -> None:
    read = pages.documents()
    assert len(read) > 30
    found = [
        f"{page.relative_to(ROOT)}: {fault}"
        for page in read
        for fault in faults(page, page.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "link",
    [
        "[a](no-such-page.md)",
        "[a](wire.md#no-such-heading)",
        "[a](#no-such-heading)",
        "![a](pictures/none.svg)",
        "[`Distributed.stop`](../dlion/optim.py)",
        "[a](../../elsewhere)",
        "[when not to\nuse it](when-never.md)",
    ],
)
def test_a_dead_link_is_found(link: str) -> None:
    assert list(faults(ROOT / "docs/page.md", f"# Page\n\n```python\nx = 1\n```\nsee {link}.\n"))


@pytest.mark.parametrize(
    "text",
    [
        "[a](wire.md#who-talks-to-whom), [b](#page)",
        "[`Distributed.step`](../dlion/optim.py) and [`optim.py`](../dlion/optim.py)",
        "[`METHODS`](../dlion/methods.py), [`Stats.steps`](../dlion/stats.py)",
        "`[a](none.md)`, `x[0](y)`\n\n````text\n```\n[a](none.md)\n```\n````\n",
        "[a](https://example.org/none.md)",
    ],
)
def test_what_is_no_dead_link_is_left_alone(text: str) -> None:
    assert not list(faults(ROOT / "docs/page.md", f"# Page\n\n{text}\n"))


def test_every_page_has_its_place_in_the_navigation() -> None:
    def targets(entries: list[dict[str, Any]]) -> Iterator[str]:
        for entry in entries:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else targets(value)

    listed = list(targets(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    results = ROOT / "docs/results"
    there = [page for page in (ROOT / "docs").rglob("*.md") if page.parent == results or results not in page.parents]
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in there)


def public() -> dict[str, Any]:
    """Every name that users are told of, and what it is, but for those of integrations."""
    found: dict[str, Any] = {}
    for name in dlion.__all__:
        value = getattr(dlion, name)
        inner = getattr(value, "__all__", None)
        found |= {f"dlion.{name}.{part}": getattr(value, part) for part in inner} if inner else {f"dlion.{name}": value}
    errors = [value for value in vars(dlion.errors).values() if isinstance(value, type)]
    return found | {f"dlion.errors.{e.__name__}": e for e in errors if issubclass(e, dlion.errors.DlionError)}


def of_integrations() -> dict[str, str | None]:
    """The public functions and classes of dlion.integrations, which may lack what they import, and their docstrings."""
    found = {}
    for file in sorted((ROOT / "dlion/integrations").glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                home = "dlion" if file.stem == "ddp" else f"dlion.integrations.{file.stem}"
                found[f"{home}.{node.name}"] = ast.get_docstring(node)
    return found


def test_the_api_page_has_every_public_name() -> None:
    offered = {*public(), *of_integrations()}
    shown = set(NAMES)
    assert len(NAMES) == len(shown)
    twice = {"dlion.simulate.Simulation", "dlion.Simulation"}  # one class by two names
    assert offered - twice - {"dlion.__version__"} <= shown and shown & twice
    for name in shown - offered:  # what these take or return
        module, _, last = name.rpartition(".")
        assert getattr(import_module(module), last)
    assert "`__version__`" in API


def test_every_public_name_has_a_docstring() -> None:
    texts = of_integrations()
    for name, value in public().items():
        if callable(value):
            texts[name] = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
    assert {"dlion.Distributed", "dlion.checkpoint.save", "dlion.integrations.transformers.optimizer_for"} <= set(texts)
    assert not [name for name, text in texts.items() if not text]


def test_every_command_is_named_on_its_page_and_in_the_api() -> None:
    commands = {name for name in app if not name.startswith("-")}
    assert {"train", "bench"} <= commands
    for page in pages.documents():
        assert set(re.findall(r"`dlion ([a-z-]+)`", page.read_text(encoding="utf-8"))) <= commands, page.name
    table = (ROOT / "docs/command.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `dlion ([a-z-]+)` \|", table, re.MULTILINE)) == commands
    assert commands <= set(re.findall(r"`dlion ([a-z-]+)`", API))
    assert all(app[name].help for name in commands)


def test_every_script_that_is_named_is_there() -> None:
    named = {
        script
        for page in pages.documents()
        for script in re.findall(r"python ((?:bench|scripts|examples)/\S+\.py)", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 8
    # tables of results name what made them, which may be gone
    assert not [script for script in named if not (ROOT / script).is_file()]


def test_every_picture_is_small_and_shown() -> None:
    shown = {pages.resolved(page, link) for page in pages.documents() for link in pages.links(page.read_text("utf-8"))}
    taken = {screenshots.PICTURES / f"{name}.png" for name in screenshots.PICTURED}
    assert set(screenshots.PICTURES.glob("*.png")) == taken
    for picture in screenshots.PICTURES.iterdir():
        assert picture in shown, f"{picture.name} is on no page"
        assert picture.stat().st_size <= screenshots.LARGEST, picture.name


def test_every_report_is_listed() -> None:
    results = ROOT / "docs/results"
    listed = {link.target for link in pages.links((results / "README.md").read_text(encoding="utf-8"))}
    assert {path.relative_to(results).as_posix() for path in results.glob("*/report.html")} <= listed
