"""The three verbs of a step: ballot, (tally), apply. Two implementations that agree to the bit.

`Pipeline` puts a rule and codecs one after another: the specification, and what every method runs on. `FusedLion`
does the same for Lion's votes with one kernel call a bucket for each verb, on tensors where they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from dlion.codecs import Encoder, Levels, Moment
from dlion.layout import Bucket
from dlion.replica import Replica
from dlion.rules import ROUNDING_SEED, Rule
from dlion.survey import Questions
from dlion.tallies import Count
from dlion.topology import Replicate, when_small


class Decoder(Protocol):
    """Bytes -> numbers."""

    def decode(self, verdict: Tensor, voters: int) -> Any:
        """T[planes, n] and the number of voters -> what the rule's `apply` takes."""


@dataclass(frozen=True)
class Wire:
    """How messages travel: encoding of ballots, counting, decoding of verdicts; and when "auto" replicates ballots."""

    up: Encoder
    count: Count
    down: Decoder
    replicate: Replicate = when_small

    def bucket_elements(self, bucket_bytes: int) -> int:
        """How many elements travel together: a byte is eight votes, or a part of a full-precision number."""
        return bucket_bytes * 8 // (self.up.bits if self.up.align == 1 else 1)


class Steps(Protocol):
    """What the optimizer asks of an implementation."""

    @property
    def wire(self) -> Wire:
        """How its messages travel."""

    def survey(self, replica: Replica, moment: Moment) -> Questions:
        """What must be known of all workers before the step's first ballot; most methods ask nothing."""

    def ballot(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, Any]:
        """The bucket's ballot T[planes, n], and whether the gradients were finite, which only the exchange asks.

        Moves local state.
        """

    def apply(self, replica: Replica, bucket: Bucket, verdict: Tensor, voters: Any, moment: Moment) -> None:
        """Do with the parameters what `voters` workers decided: T[planes, n]; they are as the exchange says them."""

    def finish(self, replica: Replica) -> None:
        """Called once when every bucket of the step has been applied."""


@dataclass(frozen=True)
class Pipeline:
    """rule.message -> up.encode, and down.decode -> rule.apply."""

    rule: Rule
    wire: Wire

    def survey(self, replica: Replica, moment: Moment) -> Questions:
        return self.rule.survey(replica, moment)

    def ballot(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, bool]:
        message, finite = self.rule.message(replica, bucket, moment)
        return self.wire.up.encode(message, bucket, moment), finite

    def apply(self, replica: Replica, bucket: Bucket, verdict: Tensor, voters: int, moment: Moment) -> None:
        self.rule.apply(replica, bucket, self.wire.down.decode(verdict, voters), moment)

    def finish(self, replica: Replica) -> None:
        self.rule.finish(replica)


@dataclass(frozen=True)
class FusedLion:
    """Lion's votes by kernels that read gradients and write momenta, words and parameters in one pass each.

    Args:
        kernels: with `ballot` and `apply` over lists of tensors.
        wire: of votes; its encoder is what `ballot` does.
        zeros: "balanced" or "exact", as that encoder has it.
        rounding: of bf16 and fp16 parameters, "stochastic" or "nearest".
        betas: of the message and of the momentum, among a group's hyper-parameters.
    """

    kernels: ModuleType
    wire: Wire
    zeros: str
    rounding: str
    betas: Callable[[dict[str, Any]], tuple[float, float]] = itemgetter("betas")

    def survey(self, replica: Replica, moment: Moment) -> Questions:
        yield from ()

    def ballot(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, bool]:
        groups = replica.hypers
        words, finite = self.kernels.ballot(
            replica.gradients(bucket),
            replica.momenta(bucket),
            bucket.offsets,
            bucket.groups,
            bucket.size,
            [self.betas(group)[0] for group in groups],
            [self.betas(group)[1] for group in groups],
            [group["maximize"] for group in groups],
            bucket.first_word,
            moment.t,
            moment.rank,
            self.zeros,
        )
        return words, bool(finite)

    def apply(self, replica: Replica, bucket: Bucket, verdict: Tensor, voters: int, moment: Moment) -> None:
        levels: Levels = self.wire.down.decode(verdict, voters)
        tables: list[float] = []
        decays: list[float] = []
        for hyper in replica.hypers:
            tables += levels.table(hyper["lr"])
            decays.append(1 - hyper["lr"] * hyper["weight_decay"])
        params = replica.parameters(bucket)
        where = (bucket.first_word, moment.t, ROUNDING_SEED)
        self.kernels.apply(params, levels.planes, bucket.offsets, bucket.groups, tables, decays, self.rounding, *where)
        for k in bucket.cut:  # a copy where the tensor is not contiguous
            replica.write(bucket.pieces[k], params[k].detach())

    def finish(self, replica: Replica) -> None:
        pass
