"""From all workers' ballots of a bucket to its verdict, by the topologies' and the tally's own code."""

from collections.abc import Callable

from torch import Tensor

from dlion.header import NOBODY, BallotHeader, Status, VerdictHeader, worst
from dlion.layout import Bucket
from dlion.simulate.attacks import Attack
from dlion.simulate.faults import COLLUDING
from dlion.simulate.table import SharedTally, Table, side_by_side
from dlion.simulate.worker import Worker
from dlion.tallies import Observer, Tally

Said = list[tuple[Tensor, Status]]


def consult(
    bucket: Bucket,
    workers: list[Worker],
    answers: list[Tensor],
    table: Table,
    attack: Callable[[], Attack],
    observer: Observer | None,
) -> tuple[Tensor, VerdictHeader]:
    """Everybody's ballots of one bucket to its verdict T[verdict planes, n]; their memory is free afterwards.

    `answers` are those of the step's survey; `observer` is shown all ballots, if somebody looks at them.
    """
    first = workers[0]
    said = [worker.ballot(bucket, answers) for worker in workers]
    _collude(bucket, workers, said, attack)
    headers = [
        BallotHeader(status, bucket.number & 0xFFFF, first.moment.t & NOBODY, layout=0, hyper=0) for _, status in said
    ]
    shard_words = -(-said[0][0].shape[1] // first.topology.shards)
    tally = SharedTally(Tally(first.steps.wire.count, headers[0], bucket.first_word, shard_words, observer))
    consultations = [
        worker.topology.consult(header.encode().to(planes.device), planes, tally)
        for worker, header, (planes, _) in zip(workers, headers, said, strict=True)
    ]
    del said
    for worker in workers:
        worker.forget(bucket)
    rows, verdict = side_by_side(consultations, table)
    header = worst([VerdictHeader.decode(row) for row in rows.tolist()], len(workers))
    for worker in workers:
        worker.stats.abstentions += header.abstentions
    return verdict, header


def _collude(bucket: Bucket, workers: list[Worker], said: Said, attack: Callable[[], Attack]) -> None:
    """Let colluders, who know all ballots, say the opposite of what the honest would decide among themselves.

    Where nobody is honest they say what they computed.
    """
    colluders = [worker for worker in workers if worker.act == COLLUDING]
    honest = [
        planes
        for worker, (planes, status) in zip(workers, said, strict=True)
        if worker.act is None and status == Status.OK
    ]
    if not colluders or not honest:
        return
    agreed = attack().agreed(honest, bucket, workers[0].moment.t)
    opposite = attack().inverted(agreed, bucket)
    for worker in colluders:
        said[worker.rank] = (opposite, said[worker.rank][1])
