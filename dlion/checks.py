"""What workers compare now and then, beside the headers of every step."""

from collections.abc import Callable

from torch import Tensor

from dlion.agreement_rates import AgreementRates, Sample
from dlion.asking import Ask
from dlion.channel import Channel
from dlion.comparison import Guard
from dlion.layout import Bucket
from dlion.options import Options
from dlion.pipeline import Wire
from dlion.replica import Replica
from dlion.stats import Stats
from dlion.verification import Verification


class Checks:
    """Were gradients averaged before, who agrees with whom, are all replicas equal?

    Args:
        channel: to the other workers; None for one worker alone.
        siblings: to the other ranks of this worker; None where there are none.
        owners: whether shards are counted by their owners, who must tell the others what they saw.
        workers: how many there are.
        ask: how they hear each other.
    """

    def __init__(
        self,
        channel: Channel | None,
        siblings: Channel | None,
        owners: bool,
        options: Options,
        wire: Wire,
        stats: Stats,
        shared_state: Callable[[Replica], list[Tensor]],
        workers: int,
        ask: Ask,
    ) -> None:
        self._owners = channel if owners else None
        self._stats, self._ask = stats, ask
        self._guard = Guard(channel, siblings, stats, ask)
        self._rates = AgreementRates(wire, workers)
        self.verification = Verification(channel, options, stats, shared_state)

    def sample(self, bucket: Bucket, t: int, buckets: int) -> Sample | None:
        """Of whose ballots somebody takes note in the step after `t` applied verdicts."""
        return self._rates.sample(bucket, t, buckets)

    def gradients(self, replica: Replica, t: int) -> None:
        """Compare the gradients of a step, while they are there.

        Args:
            t: a number that all workers share and that counts steps.
        """
        self._guard.look(replica, t)

    def after(self, replica: Replica, t: int, moved: bool, counts: bool) -> None:
        """Compare what is due after a step that was decided.

        Args:
            t: verdicts applied before it, equal on all workers. moved: whether one was applied.
            counts: False for a worker who has not applied it with the others.

        Raises:
            AgreementError: parameters, or state that all share, differ.
        """
        self._rates.close(t, self._owners, [self._stats], self._ask)
        if moved and self.verification.is_due(t + 1):
            self.verification.compare(replica, t + 1, counts, self._ask)
