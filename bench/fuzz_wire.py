"""What comes from other workers: headers, rows of ballots and verdicts, reports."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from fuzz import Parser
from mutations import spoiled, spoiled_json
from torch import Tensor

from dlion import agreement
from dlion.channel import told_by
from dlion.codecs import Moment
from dlion.elastic.standing import ROW_BYTES, Standing, behind, donor, next_round, resolves
from dlion.errors import AgreementError
from dlion.header import NOBODY, BallotHeader, Status, VerdictHeader, judge, worst
from dlion.layout import Layout
from dlion.methods import METHODS, Choices
from dlion.ops import choose
from dlion.replica import Replica
from dlion.stats import Stats
from dlion.tallies import Tally
from dlion.topology import Replicated, Sharded

WORKERS = 3
KERNELS = choose("auto")[1]


def headers() -> Iterator[Parser]:
    own = BallotHeader(Status.OK, 3, 7, 123, 456)
    others = [own, BallotHeader(Status.ABSTAIN, 3, 7, 123, 456), BallotHeader(Status.SKIP, 3, 7, 123, 456)]
    said = [VerdictHeader(Status.OK, 3, 7, 2, 1, NOBODY), VerdictHeader(Status.RAISE, 3, 7, 0, 3, 1)]

    def ballots(content: bytes) -> None:
        judge([BallotHeader.decode(words) for words in _pairs(content)], own)

    def verdicts(content: bytes) -> None:
        header = worst([VerdictHeader.decode(words) for words in _pairs(content)], WORKERS)
        if header.status == Status.OK:
            assert header.voters <= WORKERS

    yield Parser("ballot headers", [_bytes(torch.cat([h.encode() for h in others]))], ballots, 25)
    verdict_rows = [_bytes(torch.cat([one.encode()] * WORKERS)) for one in said]
    yield Parser("verdict headers", verdict_rows, verdicts, 15)


def _pairs(content: bytes) -> list[list[int]]:
    """Three headers: rows have one length, whatever is in them."""
    whole = content[: 16 * WORKERS].ljust(16 * WORKERS, b"\0")
    pairs: list[list[int]] = torch.frombuffer(bytearray(whole), dtype=torch.int64).view(-1, 2).tolist()
    return pairs


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@dataclass
class Liars:
    """A line on which the others' rows are those that were put there."""

    rank: int
    size: int
    rows: Tensor

    def all_to_all(self, rows: Tensor) -> Any:
        return SimpleNamespace(result=self.rows)

    def all_gather(self, row: Tensor) -> Any:
        return SimpleNamespace(result=self.rows)


class Bench:
    """A worker of a method, at the moment at which the others' rows of a bucket have come.

    All rows come from the input: those of ballots, or, where ballots are counted shard by shard, those of verdicts.
    """

    def __init__(self, method: str, zeros: str = "balanced") -> None:
        rule = METHODS[method].rule(KERNELS, "nearest", None)
        self.steps: Any = METHODS[method].steps(rule, Choices(KERNELS, WORKERS, "rotate", zeros, "nearest"))
        made = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, generator=made)) for shape in ((20, 5), (70,), ())]
        for param in params:
            param.grad = torch.randn(param.shape, generator=made)
        groups = [{"params": params, **rule.defaults(), "weight_decay": 0.0, "maximize": False, "t": 3}]
        groups[0].setdefault("lr", 0.01)
        self.replica = Replica(groups, defaultdict(dict))
        rule.allocate(self.replica)
        self.replica.hypers = agreement.hyper_parameters(groups, {*rule.defaults(), "lr", "weight_decay", "maximize"})
        elements = self.steps.wire.bucket_elements(2**10)
        self.bucket = Layout.of(groups, elements, self.steps.wire.up.align).buckets[0]
        self.moment = Moment(3, 0, WORKERS)
        self.own = BallotHeader(Status.OK, 0, 3, 11, 22)
        questions = self.steps.survey(self.replica, self.moment)
        answer = None
        while (question := self._next(questions, answer)) is not None:
            answer = question.values * (WORKERS if question.how == "sum" else 1)
        self.planes, _ = self.steps.ballot(self.replica, self.bucket, self.moment)

    @staticmethod
    def _next(questions: Any, answer: Tensor | None) -> Any:
        try:
            return next(questions) if answer is None else questions.send(answer)
        except StopIteration:
            return None

    def told_all(self, content: bytes) -> None:
        """Everybody's rows of ballots are the input."""
        row = torch.cat([self.own.encode().view(self.planes.dtype), self.planes.reshape(-1)])
        line = Liars(0, WORKERS, self._rows(content, row))
        lines = SimpleNamespace(ballots=line, verdicts=line)
        self._run(Replicated(lines, Stats()).consult(self.own.encode(), self.planes, self._tally(1)))

    def told_a_shard(self, content: bytes) -> None:
        """Everybody's rows of verdicts are the input."""
        tally = self._tally(WORKERS)
        width = -(-self.planes.shape[1] // WORKERS) * tally.verdict_planes
        row = torch.zeros(16 // self.planes.element_size() + width, dtype=self.planes.dtype)
        ballots = Liars(0, WORKERS, self._rows(b"", self._ballot_row()))
        lines = SimpleNamespace(ballots=ballots, verdicts=Liars(0, WORKERS, self._rows(content, row)))
        self._run(Sharded(lines, Stats()).consult(self.own.encode(), self.planes, tally))

    def seeds(self) -> list[bytes]:
        """Good rows: of ballots, and headers of verdicts with votes behind them."""
        row = torch.cat([self.own.encode().view(self.planes.dtype), self.planes.reshape(-1)])
        verdict = VerdictHeader(Status.OK, 0, 3, WORKERS, 0, NOBODY).encode().view(self.planes.dtype)
        shard = -(-self.planes.shape[1] // WORKERS) * self.steps.wire.count.verdict_planes
        votes = torch.full((shard,), 5, dtype=torch.int64).view(self.planes.dtype)[:shard]
        return [_bytes(row) * WORKERS, _bytes(torch.cat([verdict, votes])) * WORKERS]

    def _ballot_row(self) -> Tensor:
        width = -(-self.planes.shape[1] // WORKERS) * len(self.planes)
        header = self.own.encode().view(self.planes.dtype)
        return torch.cat([header, torch.zeros(width, dtype=self.planes.dtype)])

    def _rows(self, content: bytes, like: Tensor) -> Tensor:
        """Rows of the right length: the network library sees to that."""
        nbytes = like.numel() * like.element_size() * WORKERS
        whole = content[:nbytes].ljust(nbytes, b"\0") if nbytes else b""
        return torch.frombuffer(bytearray(whole), dtype=like.dtype).view(WORKERS, -1)

    def _tally(self, shards: int) -> Tally:
        return Tally(self.steps.wire.count, self.own, self.bucket.first_word, -(-self.planes.shape[1] // shards))

    def _run(self, consultation: Any) -> None:
        while True:
            try:
                next(consultation)
            except StopIteration as end:
                rows, verdict = end.value
                break
        header = worst([VerdictHeader.decode(row) for row in rows.tolist()], WORKERS)
        before = [param.detach().clone() for param in self.replica.params]
        noted = dict(self.replica.noted)
        if header.status == Status.OK and header.voters:
            self.steps.apply(self.replica, self.bucket, verdict, header.voters, self.moment)
        for param, value in zip(self.replica.params, before, strict=True):
            param.detach().copy_(value)
        self.replica.noted = noted


def rows() -> Iterator[Parser]:
    for method in METHODS:
        bench = Bench(method)
        yield Parser(f"rows of {method}", bench.seeds(), bench.told_all, 1.5, _headed)
        if "sharded" in METHODS[method].topologies:
            yield Parser(f"verdicts of {method}", bench.seeds(), bench.told_a_shard, 1, _headed)


def _headed(content: bytes, others: Any, random: Random) -> bytes:
    """Mostly rows whose headers are in order, or little would get past them."""
    changed = spoiled(content, others, random)
    if random.random() < 0.7 and len(content) % WORKERS == 0:
        width = len(content) // WORKERS
        changed = changed[: len(content)].ljust(len(content), b"\0")
        for at in range(0, len(content), width):
            changed = changed[:at] + content[at : at + 16] + changed[at + 16 :]
    return changed


def reports() -> Iterator[Parser]:
    groups: Any = [{"params": [torch.nn.Parameter(torch.zeros(3, 2))], "lr": 0.1, "t": 4}]
    hyper = agreement.hyper_parameters(groups, ["lr"])
    own = agreement.report(groups, {"method": "dlion-mavo"}, hyper, Status.OK)
    text = json.dumps(own).encode()

    def read(content: bytes) -> None:
        ranks = range(3)
        heard = agreement.checked_reports([own, told_by(1, content), own], ranks)
        sum(one["status"] == Status.LAYOUT_CHANGED for one in heard)
        found = agreement.explain_not_finite([one["not_finite"] for one in heard], ranks, 4)
        if heard[1] != own:
            different = agreement.explain_layouts(heard, ranks) or agreement.explain_hyper_parameters(heard, ranks, 1)
            raise AgreementError(different + found)

    yield Parser("reports of workers", [text], read, 12, spoiled_json)


def standings() -> Iterator[Parser]:
    """What elastic workers say of where they stand."""
    own = Standing(3 << 20, 17, 0, 17, 1, 2, 3, 1, {"step": 17})

    def read(content: bytes) -> None:
        row = torch.frombuffer(bytearray(content[:ROW_BYTES].ljust(ROW_BYTES)), dtype=torch.uint8)
        heard = [own, Standing.decode(row), own]
        donor(heard), behind(heard), [resolves(one, heard) for one in heard]
        replace(own, round=next_round([one.round for one in heard], ["a", "b"])).encode()

    yield Parser("standings", [_bytes(own.encode())], read, 10)


def wire() -> Iterator[Parser]:
    """All of them."""
    yield from headers()
    yield from standings()
    yield from rows()
    yield from reports()
