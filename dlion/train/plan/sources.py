"""Where the shapes of a model come from: a count, a model of the application, or the headers of its files."""

from dataclasses import replace
from pathlib import Path

from dlion.train.config import unknown_name
from dlion.train.json_text import from_json
from dlion.train.plan.settings import DEFAULT_WORKERS, PlanConfig
from dlion.train.plan.sizes import Shape, Sizes
from dlion.train.recipes import Recipe, locate, read_recipe

HEADER_LIMIT = 100_000_000  # bytes, as safetensors itself has it


def sizes_of(config: PlanConfig) -> Sizes:
    """The model that a plan is about.

    Raises:
        ValueError: a file is not there or holds no tensors.
    """
    if config.recipe is not None:
        return recipe_sizes(read_recipe(locate(config.recipe)))
    if config.parameters is not None:
        return Sizes.assumed(int(config.parameters), config.tensors)
    if not config.safetensors:
        name = config.model or "bench"
        return Sizes.of(f"model {name}", model_shapes(name))
    shapes = [shape for path in config.safetensors for shape in header_shapes(path)]
    return Sizes.of(f"the tensors of {', '.join(path.name for path in config.safetensors)}", shapes)


def settled(config: PlanConfig) -> PlanConfig:
    """With the number of workers: as given, the recipe's, or the default.

    Raises:
        ValueError: there is no such recipe.
    """
    told = read_recipe(locate(config.recipe)).flags.get("workers") if config.recipe is not None else None
    return replace(config, workers=config.workers or told or DEFAULT_WORKERS)


def header_shapes(path: Path) -> list[Shape]:
    """Every tensor's shape, from the header of a safetensors file: no tensor is read.

    Raises:
        ValueError: there is no such file, or it is none of these.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= HEADER_LIMIT:
                raise ValueError("its header has no possible length")
            header = from_json(file.read(length))
        return [tuple(map(int, entry["shape"])) for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        raise ValueError(f"--safetensors {path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--safetensors {path} is not a safetensors file: {error}.") from None


def model_shapes(name: str) -> list[Shape]:
    """Of a model on the inputs of its usual task; no parameter is made.

    Raises:
        ValueError: no model has this name, or its size is that of a file.
    """
    import torch

    from dlion.train.bench.model import build_gpt
    from dlion.train.bench.settings import BenchConfig
    from dlion.train.models import MODELS, build_model
    from dlion.train.pretrained import CAUSAL_LM

    names = [one for one in MODELS if one != CAUSAL_LM]
    if name != "bench" and name not in names:
        raise unknown_name("model", name, ["bench", *names])
    with torch.device("meta"):
        bench = name == "bench"
        made = build_gpt(BenchConfig(), torch.device("meta")) if bench else build_model(name, MODELS[name].usual)
    return [tuple(param.shape) for param in made.parameters()]


def recipe_sizes(recipe: Recipe) -> Sizes:
    """The model of a recipe, on its inputs; or the size that it assumes of a model in a file.

    Raises:
        ValueError: it names no model.
    """
    name, title = recipe.flags.get("model"), f"recipe {recipe.path.stem}"
    if "parameters" in recipe.assumed:
        return replace(Sizes.assumed(recipe.assumed["parameters"], None), name=title)
    if name is None:
        raise ValueError(f"{title} names no model: give --model, --parameters or --safetensors.")
    return Sizes.of(title, model_shapes(name))
