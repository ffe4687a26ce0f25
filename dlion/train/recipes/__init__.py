"""The paper's experiments as files of flags, and how such a file is read. Nothing here imports torch.

A file holds flags of `dlion train` as keys. Tables in it:

    [with.NAME]     flags that replace those above when the method is NAME
    [needs]         flags that must be given, each with what they are for
    [assumed]       what `--dry-run` takes for true while there are no data
    [study]         the study that `dlion compare` makes of it, without its [train]
    [few-shot]      flags of `dlion few-shot`
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlion.train.config import TrainConfig, read_toml, unknown_name

FOLDER = Path(__file__).parent
Flags = dict[str, Any]
_TABLES = ("with", "needs", "assumed", "study", "few-shot")


@dataclass(frozen=True)
class Recipe:
    """What a file says; see this module for its tables."""

    path: Path
    flags: Flags
    with_method: dict[str, Flags] = field(default_factory=dict)
    needs: dict[str, str] = field(default_factory=dict)
    assumed: dict[str, int] = field(default_factory=dict)
    study: Flags = field(default_factory=dict)
    few_shot: Flags = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its first line."""
        return self.path.read_text("utf-8").partition("\n")[0].lstrip("# ")

    def flags_of(self, method: str | None) -> Flags:
        """The flags for a method; None: the file's own."""
        named = method or self.flags.get("method", TrainConfig().method)
        return self.flags | (self.with_method.get(named, {}) if isinstance(named, str) else {})

    def missing(self, given: Collection[str]) -> None:
        """Raise a ValueError for the first flag that is needed and neither given nor in the file."""
        for flag, purpose in self.needs.items():
            if flag not in given and flag not in self.flags:
                raise ValueError(
                    f"{self.path.stem} needs --{flag}: {purpose} (without it, --dry-run says what it would be)."
                )


def built_in() -> list[str]:
    """The names of the recipes that come with dlion."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def locate(told: str) -> Path:
    """The file that is meant by a path, or by the name of a built-in recipe.

    Raises:
        ValueError: it is neither; something that looks like a path is taken for one.
    """
    path = Path(told)
    if path.is_file() or path.suffix == ".toml" or len(path.parts) != 1:
        return path
    if told not in built_in():
        raise unknown_name("recipe", told, built_in())
    return FOLDER / f"{told}.toml"


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file; a plain file of flags is one without tables.

    Raises:
        ValueError: there is no such file, or it is not TOML, or a table is none.
    """
    told = read_toml(path)
    tables = {name: told.pop(name, {}) for name in _TABLES}
    deeper = tables["with"].values() if isinstance(tables["with"], dict) else ()
    if not all(isinstance(table, dict) for table in (*tables.values(), *deeper)):
        raise ValueError(f"{path}: {', '.join(_TABLES)} must be tables, and those of with tables of flags.")
    return Recipe(path, told, *tables.values())
