"""What is wrong, from what every worker says of itself: the error that all of them raise."""

from collections.abc import Callable, Sequence

from torch import Tensor

from dlion import agreement
from dlion.comparison import gathered
from dlion.errors import AgreementError, NonFiniteGradientError
from dlion.header import Status
from dlion.layout import local
from dlion.ops.bits import checksum
from dlion.options import Options
from dlion.stats import Stats
from dlion.voting import Voting, wait_for_all


def agree(
    voting: Voting,
    options: Options,
    fingerprint: int,
    params: Sequence[Tensor],
    shared: list[Tensor],
    stats: Stats,
    reports: Callable[[], list[agreement.Report]],
) -> None:
    """Compare fingerprints of layouts, parameters and shared state with the other workers', once for each layout.

    Args:
        reports: asks all workers, in a collective call, what they train.

    Raises:
        AgreementError: they may not begin together. ExchangeError: a worker did not come.
    """
    channel = voting.ballots
    voting.rounds[0] += 1
    wait_for_all(channel.group, f"dlion/agreement/{voting.rounds[0]}", options.timeout)
    checksums = [checksum([local(param) for param in params]) >> 1, checksum(shared) >> 1]
    layouts, replicas, states = zip(*gathered(channel, [fingerprint, *checksums], stats), strict=True)
    if len(set(layouts)) > 1:
        said = agreement.explain_layouts(reports(), channel.ranks)
        raise AgreementError(said or "the workers' layouts differ: use the same version of dlion everywhere")
    if len(set(replicas)) > 1:
        raise AgreementError(agreement.explain_parameters(replicas, channel.ranks))
    if len(set(states)) > 1:
        raise AgreementError(agreement.explain_state(options.method, states, channel.ranks))


def raise_in_step(
    status: int, offender: int, reports: list[agreement.Report], ranks: Sequence[int], t: int, overlap: bool
) -> None:
    """Raise what a verdict's status stands for; return only where every worker announced a new layout.

    Args:
        status, offender: of that verdict's header. reports: of all workers.
        t: verdicts applied before. overlap: whether ballots leave during backward.

    Raises:
        AgreementError, NonFiniteGradientError.
    """
    if status == Status.RAISE:
        found = [said["not_finite"] for said in reports]
        raise NonFiniteGradientError(agreement.explain_not_finite(found, ranks, t))
    if status == Status.HYPERPARAMETERS_DIFFER:
        raise AgreementError(agreement.explain_hyper_parameters(reports, ranks, offender))
    if said := agreement.explain_layout_change(reports, ranks, t, overlap, offender):
        raise AgreementError(said)


def raise_unheard(status: int, t: int) -> None:
    """Raise, on this worker alone, what is known of a step that was refused without a word so far; else return.

    Args:
        status: of the verdict that refused it. t: verdicts applied before.

    Raises:
        AgreementError, NonFiniteGradientError.
    """
    what = f"step t={t} was not applied on any worker"
    if status == Status.RAISE:
        raise NonFiniteGradientError(
            f"{what}, because a gradient was not finite and nonfinite='raise': call optimizer.check() on all workers "
            "to hear where"
        )
    if status != Status.OK:
        raise AgreementError(
            f"{what}, because layouts, hyper-parameters or step counts differ: call optimizer.check() on all workers "
            "to hear which"
        )
