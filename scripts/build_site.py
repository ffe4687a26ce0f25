"""Build the documentation site: python scripts/build_site.py, and then open build/site/index.html.

Needs requirements/docs.txt. The pages are those of docs/. Where one links to another file of the repository, or to a
name in a Python file, the site has a page with that file's text, so that it is whole wherever it lies. Nothing in it is
loaded from the network when it is read. Warnings are errors.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from pages import DOCS, ROOT, Link, definitions, documents, links, named, resolved

import dlion

STAGED = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"
LANGUAGES = {".py": "python", ".md": "markdown", ".toml": "toml", ".yaml": "yaml", ".sbatch": "bash"}
FROM_ELSEWHERE = re.compile(r"""<(?:script|img|link rel="?stylesheet"?)\b[^>]*\b(?:src|href)=["']?https?:[^"' >]*""")


def main() -> int:
    for folder in (STAGED, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    stage(STAGED)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", "zensical.toml"]
    status = subprocess.run(command, cwd=ROOT).returncode
    if status:
        return status
    loaded = sorted({found for page in SITE.rglob("*.html") for found in FROM_ELSEWHERE.findall(page.read_text())})
    if loaded:
        print(f"build_site.py: pages load from the network: {', '.join(loaded)}", file=sys.stderr)
        return 1
    print(f"{len(list(SITE.rglob('*.html')))} pages: {SITE / 'index.html'}")
    return 0


def stage(folder: Path) -> None:
    """Write the pages of docs/ as the generator takes them, with the files that they link to."""
    shutil.copytree(DOCS, folder)
    for page in documents():
        if page.is_relative_to(DOCS):
            text = page.read_text(encoding="utf-8")
            for link in reversed(list(links(text))):
                if link.is_local and link.path:
                    text = f"{text[: link.start]}[{link.label}]({_within(page, link, folder)}){text[link.end :]}"
            (folder / page.relative_to(DOCS)).write_text(_resolving_names(text), encoding="utf-8")


def _within(page: Path, link: Link, folder: Path) -> str:
    """The target of a link as it is in the site: inside docs as it was, and else the page of that file."""
    target = resolved(page, link)
    if target.is_relative_to(DOCS):
        return link.target if target.is_file() else f"{link.path}/README.md"
    up = "../" * len(page.relative_to(DOCS).parent.parts)
    name = target.relative_to(ROOT).as_posix()
    source = folder / "source" / f"{name}.md"
    text = target.read_text(encoding="utf-8")
    if not source.exists():
        source.parent.mkdir(parents=True, exist_ok=True)
        language = LANGUAGES.get(target.suffix, "text")
        front = f"---\ntitle: {name}\nsearch:\n  exclude: true\n---\n"
        source.write_text(f'{front}# `{name}`\n\n`````{language} linenums="1"\n{text}`````\n', encoding="utf-8")
    line = definitions(text)[named(link)] if named(link) else None
    return f"{up}source/{name}.md" + (f"#__codelineno-0-{line}" if line else "")


def _resolving_names(text: str) -> str:
    """`::: dlion.NAME` as the generator, which imports nothing, finds it: names of dlion live in its modules."""

    def home(match: re.Match[str]) -> str:
        return f"::: {dlion._HOME[match[1]]}.{match[1]}\n    options:\n      heading: dlion.{match[1]}\n"

    return re.sub(r"^::: dlion\.(\w+)\n", home, text, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
