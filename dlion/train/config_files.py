"""What files tell the command: the flags of a run or a recipe, and the study of one. Nothing here imports torch."""

import os
from pathlib import Path
from typing import Any

from cyclopts import App
from cyclopts.config import Dict

from dlion.train.compare.study import Study, read_study, study_from
from dlion.train.config import INSTEAD, read_toml, unknown_name
from dlion.train.elastic_flags import KEPT, OF_ONE_COMMAND
from dlion.train.recipes import locate, read_recipe


def from_files(app: App, commands: tuple[str, ...], arguments: Any) -> None:
    """Fill in the flags that were not given from the file of --config, or from the run of --resume."""
    if commands != ("train",):
        return
    given = {argument.name: argument.tokens for argument in arguments if argument.tokens}
    if "--config" in given and "--resume" in given:
        raise ValueError("--config and --resume contradict each other: a resumed run has its own configuration.")
    if "--config" in given:
        recipe = read_recipe(locate(given["--config"][0].value))
        path, values = recipe.path, recipe.flags_of(given["--method"][0].value if "--method" in given else None)
        if "--dry-run" not in given:
            recipe.missing({flag.removeprefix("--") for flag in given})
    elif "--resume" in given:
        path = _config_of(Path(given["--resume"][0].value))
        values = _of_this_group(read_toml(path))
    else:
        return
    flags = {argument.name.removeprefix("--") for argument in arguments} - {
        "*",
        "config",
        "resume",
        "dry-run",
        *OF_ONE_COMMAND,
    }
    for key in values:
        if key.replace("_", "-") not in flags:
            raise unknown_name("configuration key", key, sorted(flags))
    for one, other in INSTEAD.items():
        for mine, theirs in ((one, other), (other, one)):
            if f"--{mine}" in given:
                values = {key: value for key, value in values.items() if key.replace("_", "-") != theirs}
    if any(token.keyword == "--no-elastic" for token in given.get("--elastic", ())):
        values = {key: value for key, value in values.items() if key not in KEPT}
    if "--steps" in given:
        values.pop("shared-epochs", None)
    Dict(values, source=str(path), use_commands_as_keys=False)(app, commands, arguments)


def _of_this_group(values: dict[str, Any]) -> dict[str, Any]:
    """The flags of a run that goes on; under a launcher, as many workers as that has started."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return {key: value for key, value in values.items() if key not in ("workers", "simulate")}
    return values


def _config_of(run: Path) -> Path:
    path = run / "config.toml"
    if not path.is_file():
        raise ValueError(f"{run} holds no run (it has no config.toml): give the folder that `dlion train` reported.")
    return path


def study_named(config: Path) -> Study:
    """The study in a file, or of a recipe that has one."""
    if config.is_file() or config.suffix == ".toml":
        return read_study(config)
    recipe = read_recipe(locate(str(config)))
    if not recipe.study:
        raise ValueError(f"recipe {config} has no study: give it to `dlion train`.")
    varied = {*recipe.study.get("vary", {}), *recipe.study.get("grid", {})}
    kept = {flag: value for flag, value in recipe.flags.items() if flag not in varied}
    return study_from({"train": kept, **recipe.study})
