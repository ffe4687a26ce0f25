"""The flags of `dlion train` that say what is recorded of a run, how often, and where besides its folder."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from dlion.train.legal import require, require_count


@dataclass(frozen=True, kw_only=True)
class RecordFlags:
    """`metrics.jsonl` in the folder of the run has every record, whatever else has them too."""

    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    eval_every: int = 50
    """Steps between two evaluations on the validation set."""
    track: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...], Parameter(negative="", consume_multiple=True)
    ] = ()
    """Give each record to these too; where they keep it is said by their own environment variables."""

    def check_records(self) -> None:
        """Raise a ValueError for numbers out of range, and for a tracker that is named twice."""
        require_count("log_every", self.log_every)
        require_count("eval_every", self.eval_every)
        require(len(set(self.track)) == len(self.track), "track", " ".join(self.track), "each tracker once")
