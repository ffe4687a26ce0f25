"""Whether this worker is the one that is not like the others: then it alone raises, and the others go on."""

from collections.abc import Sequence
from typing import Any

from dlion.elastic.standing import Standing
from dlion.errors import AgreementError
from dlion.header import majority_value


def what_is_strange(
    worker: int, mine: Standing, standings: Sequence[Standing], hyper: list[dict[str, Any]], fits: bool
) -> str | None:
    """One sentence about what keeps this worker's ballots from counting; None where nothing does.

    Args:
        hyper: this worker's hyper-parameters.
        fits: whether its layout is the one that was agreed.
    """
    if not fits:
        return (
            f"the layout changed on worker {worker} after t={mine.t} steps, which elastic workers cannot agree on "
            "while they train, and the others go on without it: change it before the first step"
        )
    t, fingerprint = majority_value([(standing.t, standing.hyper) for standing in standings])
    if mine.t != t:
        return (
            f"worker {worker} counts t={mine.t} applied steps and most others {t}, who go on without it: load the same "
            "checkpoint on every worker, or none on one that joins"
        )
    if mine.hyper != fingerprint:
        return (
            f"the hyper-parameters of worker {worker} are not those of most others, who go on without it; here they "
            f"are {hyper}: give all workers the same hyper-parameters and schedule"
        )
    return None


def is_usual(checksums: Sequence[int], mine: int) -> bool:
    """Whether this worker's parameters are those of the strict majority.

    Raises:
        AgreementError: there is none.
    """
    usual = majority_value(checksums)
    if 2 * checksums.count(usual) <= len(checksums):
        raise AgreementError(
            f"the parameters of {len(checksums)} workers differ and no strict majority has the same: start again from "
            "the last checkpoint"
        )
    return mine == usual


def changed(worker: int) -> str:
    """What the worker says that found itself changed, with on_mismatch="raise"."""
    return (
        f"the parameters of worker {worker} are not those of the others, who go on without it: look for broken memory "
        "there, start it again, or use on_mismatch='repair'"
    )
