"""Take the pictures of docs/pictures: the report of a run, that of a comparison, and the page of a measurement.

    python bench/screenshots.py                        make a run, and take all pictures
    python bench/screenshots.py --only compare-report  one of them
    python bench/screenshots.py --run runs/NAME        of a run that was made before

The comparison is the one on CIFAR-10 in docs/results, the measurement the one on a link of 1 Gbit/s in bench/results.

It needs Chromium (Debian: apt-get install chromium), which runs without a window, a profile or a network. Pictures have
150 kB at most.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from dlion.train.bench.page import page_of

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
LARGEST = 150_000  # bytes
COLOURS = 64
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync "
    "--no-first-run --hide-scrollbars"
).split()


@dataclass(frozen=True)
class Picture:
    """A page, found in the folder of what made it, and how much of it is shown: pixels, from `top` on."""

    page: str
    width: int
    top: int
    height: int
    make: Callable[[Path], Path]


def a_run(folder: Path) -> Path:
    """`dlion train` of its default task, shortened."""
    command = [sys.executable, "-m", "dlion", "train", "--steps", "300", "--name", "pictured", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder / "pictured"


def the_study(folder: Path) -> Path:
    """The comparison that belongs to this repository."""
    return ROOT / "docs" / "results" / "cifar10"


def the_measurement(folder: Path) -> Path:
    """The page of a measurement that belongs to this repository."""
    results = json.loads((ROOT / "bench/results/network/1gbit.json").read_text(encoding="utf-8"))
    (folder / "index.html").write_bytes(page_of(results["figures"]["runs"][0]))
    return folder


PICTURED = {
    "train-report": Picture("report.html", 1040, 0, 925, a_run),
    "compare-report": Picture("report.html", 1040, 1500, 1340, the_study),
    "bench-page": Picture("index.html", 1040, 0, 868, the_measurement),
}


def take(picture: Picture, folder: Path, target: Path) -> None:
    """Show the page to a browser and write what it draws. Raises: ValueError when the result is too large."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise ValueError(f"none of {', '.join(BROWSERS)} is installed: apt-get install chromium.")
    with tempfile.TemporaryDirectory() as scratch:
        shot = Path(scratch) / "shot.png"
        size = f"--window-size={picture.width},{picture.top + picture.height}"
        page = (folder / picture.page).resolve().as_uri()
        command = [browser, *FLAGS, f"--user-data-dir={scratch}/profile", size, f"--screenshot={shot}", page]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        with Image.open(shot) as image:
            shown = image.crop((0, picture.top, picture.width, picture.top + picture.height))
            shown.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)
    if target.stat().st_size > LARGEST:
        raise ValueError(f"{target.name} has {target.stat().st_size:,} bytes, and {LARGEST:,} are allowed.")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PICTURED, default=list(PICTURED))
    parser.add_argument("--run", type=Path, help="folder of a run, in place of a new one")
    asked = parser.parse_args(arguments)
    PICTURES.mkdir(exist_ok=True)
    try:
        for name in asked.only:
            with tempfile.TemporaryDirectory() as scratch:
                folder = asked.run if name == "train-report" and asked.run else PICTURED[name].make(Path(scratch))
                take(PICTURED[name], folder, PICTURES / f"{name}.png")
            print(f"{PICTURES / name}.png: {(PICTURES / f'{name}.png').stat().st_size:,} bytes")
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        print(f"screenshots.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
