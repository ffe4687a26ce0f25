"""What is wrong, from what every worker says of itself: the error that all of them raise."""

from collections.abc import Callable, Sequence

from dlion import agreement
from dlion.errors import AgreementError, NonFiniteGradientError
from dlion.header import Status


def raise_at_start(
    method: str,
    ranks: Sequence[int],
    told: Sequence[Sequence[int]],
    reports: Callable[[], list[agreement.Report]],
) -> None:
    """Raise an AgreementError where workers may not begin together; else return.

    Args:
        told: of each worker the fingerprint of its layout, and checksums of its parameters and its shared state.
        reports: asks all workers, in a collective call, what they train.
    """
    layouts, replicas, states = zip(*told, strict=True)
    if len(set(layouts)) > 1:
        said = agreement.explain_layouts(reports(), ranks)
        raise AgreementError(said or "the workers' layouts differ: use the same version of dlion everywhere")
    if len(set(replicas)) > 1:
        raise AgreementError(agreement.explain_parameters(replicas, ranks))
    if len(set(states)) > 1:
        raise AgreementError(agreement.explain_state(method, states, ranks))


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
