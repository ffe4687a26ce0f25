"""What the exchange cost: bytes handed to the network, calls, steps, abstentions."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

KEPT = 0.9  # of the votes counted before, when more are: the rates look back over some 10 samples, 100 steps


@dataclass
class Stats:
    """Counters of one optimizer on one worker. Bytes are what is handed to the network, headers and padding included.

    Attributes:
        steps: steps that exchanged something (of one worker alone: steps taken).
        bytes_sent, bytes_received: ballots and verdicts.
        check_bytes_sent, check_bytes_received: start-up agreement, diagnoses, the first steps' gradient hash,
            comparisons and repairs of replicas, agreement rates.
        calls: collective calls for ballots and verdicts.
        abstentions: ballots that did not count, over all workers and buckets.
        checks: comparisons of all workers' replicas.
        repairs: workers whose replica was mended.
        skipped: steps whose verdicts were not applied (nonfinite="skip", or nobody voted).
        fp32_ring_bytes: what a ring all-reduce of float32 gradients would have sent: `8 (N-1)/N` bytes per parameter.
        parameters_exchanged: trainable parameters times steps.
        votes_agreed, votes_looked: of each worker, votes that were the verdict's and votes that were looked at; earlier
            ones count less and less. coins_agreed, coins_looked: the same, expected of coins in the workers' places.
        vote_samples: how often some were looked at.
    """

    steps: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    check_bytes_sent: int = 0
    check_bytes_received: int = 0
    calls: int = 0
    abstentions: int = 0
    checks: int = 0
    repairs: int = 0
    skipped: int = 0
    fp32_ring_bytes: float = 0.0
    parameters_exchanged: int = 0
    votes_agreed: list[float] = field(default_factory=list)
    votes_looked: list[float] = field(default_factory=list)
    coins_agreed: list[float] = field(default_factory=list)
    coins_looked: list[float] = field(default_factory=list)
    vote_samples: int = 0

    @property
    def agreement(self) -> list[float | None]:
        """The share of each worker's votes that were the verdict's, among a few thousand of every tenth step, over some
        100 steps back; None for a worker that has not voted. Empty before step 10, for one worker alone, and with
        methods whose ballots have no signs.
        """
        return _shares(self.votes_agreed, self.votes_looked)

    @property
    def agreement_by_chance(self) -> list[float | None]:
        """What a coin in each worker's place among the others would have reached, of the same votes."""
        return _shares(self.coins_agreed, self.coins_looked)

    @property
    def ratio(self) -> float:
        """fp32 ring bytes over bytes sent; 1.0 where nothing is sent."""
        return self.fp32_ring_bytes / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def bits_per_param_sent(self) -> float:
        """Mean bits sent per parameter and step."""
        return 8 * self.bytes_sent / self.parameters_exchanged if self.parameters_exchanged else 0.0

    @property
    def bits_per_param_received(self) -> float:
        """Mean bits received per parameter and step."""
        return 8 * self.bytes_received / self.parameters_exchanged if self.parameters_exchanged else 0.0

    def moved(self, sent: int, received: int) -> None:
        """Count one collective call for ballots or verdicts."""
        self.calls += 1
        self.bytes_sent += sent
        self.bytes_received += received

    def traffic(self) -> tuple[int, int, int]:
        """What `moved` has counted: calls, bytes sent, bytes received."""
        return self.calls, self.bytes_sent, self.bytes_received

    def add_traffic(self, times: int, traffic: Sequence[int]) -> None:
        """Count this traffic so many times more."""
        calls, sent, received = traffic
        self.calls += times * calls
        self.bytes_sent += times * sent
        self.bytes_received += times * received

    def checked(self, sent: int, received: int) -> None:
        """Count one collective call that is not for ballots or verdicts."""
        self.check_bytes_sent += sent
        self.check_bytes_received += received

    def stepped(self, parameters: int, workers: int) -> None:
        """Count one step over `parameters` trainable parameters."""
        self.steps += 1
        self.parameters_exchanged += parameters
        self.fp32_ring_bytes += 8 * (workers - 1) / workers * parameters

    def voted(self, *counts: Sequence[int]) -> None:
        """Count a sample of votes: of each worker, what the four lists have."""
        names = ("votes_agreed", "votes_looked", "coins_agreed", "coins_looked")
        if len(self.votes_agreed) != len(counts[0]):  # other workers than those that were counted before
            self.vote_samples = 0
            for name in names:
                setattr(self, name, [0.0] * len(counts[0]))
        for name, new in zip(names, counts, strict=True):
            setattr(self, name, [KEPT * old + number for old, number in zip(getattr(self, name), new, strict=True)])
        self.vote_samples += 1

    def state_dict(self) -> dict[str, Any]:
        """The counters as plain numbers, and lists of them."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from `state`.

        Raises:
            ValueError: for keys that are not counters.
        """
        unknown = set(state) - {field.name for field in fields(self)}
        if unknown:
            raise ValueError(
                f"statistics hold unknown counters {sorted(unknown)}: allowed are the fields of dlion.Stats"
            )
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)


def _shares(parts: Sequence[float], wholes: Sequence[float]) -> list[float | None]:
    return [part / whole if whole else None for part, whole in zip(parts, wholes, strict=True)]
