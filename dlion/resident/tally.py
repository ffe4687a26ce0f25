"""The counting of one bucket where only the device knows who votes."""

from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from dlion.resident.counting import voting_of
from dlion.tallies import Count, Majority, Observer, TernaryMajority, TernaryVotes, Votes


@dataclass(frozen=True)
class ResidentTally:
    """`dlion.tallies.Tally` with this worker's header `own`, i64[2], and `t`, i64[], on the device.

    Args:
        kernels: as `choice.kernels_for` gives them.
    """

    kernels: ModuleType
    counting: Count
    own: Tensor
    t: Tensor
    first_word: int
    shard_words: int
    observer: Observer | None = None

    @property
    def verdict_planes(self) -> int:
        return self.counting.verdict_planes

    def judge(self, said: Tensor) -> tuple[Tensor, Tensor]:
        verdict, roster = self.kernels.judge(said, self.own)
        if self.observer is not None:
            self.observer.voters = voting_of(roster)
        return verdict, roster

    def count(self, ballots: Tensor, roster: Tensor, shard: int) -> Tensor:
        rows, width = ballots.shape
        planes = ballots.view(rows, self.counting.ballot_planes, width // self.counting.ballot_planes)
        verdict = self._counted(planes, roster, self.first_word + shard * self.shard_words)
        if self.observer is not None:
            self.observer.take(planes, verdict, shard * self.shard_words)
        return verdict.reshape(-1)

    def width(self, ballot_width: int) -> int:
        return ballot_width // self.counting.ballot_planes * self.counting.verdict_planes

    def _counted(self, planes: Tensor, roster: Tensor, first_word: int) -> Tensor:
        how, kernels = self.counting, self.kernels
        verdict: Tensor
        if isinstance(how, Majority):
            verdict = kernels.tally_majority(planes[:, 0], roster, first_word, self.t, how.ties)[None]
        elif isinstance(how, TernaryMajority):
            verdict = kernels.tally_majority_ternary(planes, roster, first_word, self.t, how.ties)
        elif isinstance(how, Votes):
            verdict = kernels.tally_count(planes[:, 0], roster, how.verdict_planes)
        else:
            assert isinstance(how, TernaryVotes)
            verdict = kernels.tally_count_ternary(planes, roster, how.verdict_planes)
        return verdict
