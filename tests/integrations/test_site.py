"""The documentation site: it is built without a warning, and nothing in it is dead or loaded from elsewhere."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pages
import pytest

pytest.importorskip("zensical", reason="the site needs its generator: pip install -r requirements/docs.txt")

pytestmark = pytest.mark.timeout(300)  # a minute alone, and other work on the machine
ROOT = Path(__file__).resolve().parents[2]


class Page(HTMLParser):
    """What a built page refers to, loads, and can be referred to by."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: set[str] = set()
        self.loaded: set[str] = set()
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "modulepreload", "preconnect"):
            self.loaded.add(given["href"])
        elif "src" in given:
            self.loaded.add(given["src"])
        elif tag == "a" and "href" in given:
            self.references.add(given["href"])


@pytest.fixture(scope="module")
def site() -> dict[Path, Page]:
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(ROOT / "scripts/build_site.py")]
    done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr and "griffe" not in done.stdout + done.stderr
    folder = ROOT / "build/site"
    return {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}


def test_every_page_is_there(site: dict[Path, Page]) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix().replace("README", "index")
        assert ROOT / "build/site" / name in site


def test_nothing_is_dead(site: dict[Path, Page]) -> None:
    dead = []
    for path, page in site.items():
        if path.name == "404.html":  # whose links are those of the root of a server
            continue
        for reference in page.references | page.loaded:
            parts = urlsplit(reference)
            if parts.scheme or reference.startswith("//"):
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            if not target.exists():
                dead.append(f"{path.name}: {reference}")
            elif parts.fragment and target in site and unquote(parts.fragment) not in site[target].names:
                dead.append(f"{path.name}: {reference}")
    assert not dead, "\n".join(sorted(set(dead))[:20])


def test_nothing_is_loaded_from_a_network(site: dict[Path, Page]) -> None:
    assert any(page.loaded for page in site.values())
    assert not {each for page in site.values() for each in page.loaded if urlsplit(each).netloc}


def test_a_link_to_a_name_leads_to_its_line(site: dict[Path, Page]) -> None:
    line = pages.definitions((ROOT / "dlion/optim.py").read_text())["Distributed.step"]
    page = site[ROOT / "build/site/how-it-works.html"]
    assert f"source/dlion/optim.py.html#__codelineno-0-{line}" in {each.removeprefix("./") for each in page.references}


def test_the_api_page_shows_what_docstrings_say(site: dict[Path, Page]) -> None:
    text = (ROOT / "build/site/api.html").read_text(encoding="utf-8")
    for words in ("dlion.DistributedLion", "this worker's votes in the bucket do not count", "NonFiniteGradientError"):
        assert words in text.replace("&#39;", "'")
