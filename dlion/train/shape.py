"""The flags that change a model's size, or take a trained one: how a recipe's model is shrunk for a trial."""

from dataclasses import asdict, dataclass, fields
from typing import Annotated

from cyclopts import Group, Parameter

from dlion.train.legal import require_count

SHAPE = Parameter(group=Group("Model", sort_key=1))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What differs from the named model's own sizes (`dlion.train.models`); None leaves it as it is.

    Raises:
        ValueError: a size that cannot be.
    """

    layers: Annotated[int | None, SHAPE] = None
    """Layers of a transformer."""
    heads: Annotated[int | None, SHAPE] = None
    """Attention heads; they must divide --width."""
    width: Annotated[int | None, SHAPE] = None
    """Width of a transformer."""
    hidden: Annotated[int | None, SHAPE] = None
    """Width inside its MLPs."""
    patch: Annotated[int | None, SHAPE] = None
    """Side of a vision transformer's patches, in pixels."""
    pretrained: Annotated[str | None, SHAPE] = None
    """Folder of a causal language model of `transformers` to start from (--model causal-lm)."""

    def check_shape(self) -> None:
        """Raise unless every size is possible."""
        for flag, value in self.sizes().items():
            require_count(flag, value)

    def sizes(self) -> dict[str, int]:
        """The sizes that were given, by flag."""
        return {name: value for name, value in self._given().items() if name != "pretrained"}

    def _given(self) -> dict[str, int]:
        values = asdict(self)
        return {field.name: values[field.name] for field in fields(ModelShape) if values[field.name] is not None}


AS_NAMED = ModelShape()
