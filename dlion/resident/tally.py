"""The counting of one bucket where only the device knows who votes."""

from dataclasses import dataclass

from torch import Tensor

from dlion.resident import counting, headers
from dlion.tallies import Count, Majority, Observer, TernaryMajority, TernaryVotes, Votes


@dataclass(frozen=True)
class ResidentTally:
    """`dlion.tallies.Tally` with this worker's header `own`, i64[2], and `t`, i64[], on the device."""

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
        verdict, voting = headers.judge(said, self.own)
        if self.observer is not None:
            self.observer.voters = voting
        return verdict, voting

    def count(self, ballots: Tensor, voting: Tensor, shard: int) -> Tensor:
        rows, width = ballots.shape
        planes = ballots.view(rows, self.counting.ballot_planes, width // self.counting.ballot_planes)
        verdict = self._counted(planes, voting, self.first_word + shard * self.shard_words)
        if self.observer is not None:
            self.observer.take(planes, verdict, shard * self.shard_words)
        return verdict.reshape(-1)

    def width(self, ballot_width: int) -> int:
        return ballot_width // self.counting.ballot_planes * self.counting.verdict_planes

    def _counted(self, planes: Tensor, voting: Tensor, first_word: int) -> Tensor:
        how = self.counting
        if isinstance(how, Majority):
            return counting.tally_majority(planes[:, 0], voting, first_word, self.t, how.ties)[None]
        if isinstance(how, TernaryMajority):
            return counting.tally_majority_ternary(planes, voting, first_word, self.t, how.ties)
        if isinstance(how, Votes):
            return counting.tally_count(planes[:, 0], voting, how.verdict_planes)
        assert isinstance(how, TernaryVotes)
        return counting.tally_count_ternary(planes, voting, how.verdict_planes)
