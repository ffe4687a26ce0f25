"""What the terminal shows of a finished measurement."""

from typing import Any

from dlion.train.bench.sentence import duration
from dlion.train.progress import Display


def show(result: dict[str, Any], screen: Display) -> None:
    """One line for each contender, and the sentence."""
    for name, found in result["contenders"].items():
        screen.say(f"{name:18}{duration(found['seconds']):>10}")
    screen.say(result["sentence"])
