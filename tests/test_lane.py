"""The stream beside backward, on a device that only writes down what it is told."""

from typing import Any, ClassVar

import pytest
import torch

from dlion.flight import Flight
from dlion.header import Status
from dlion.phases import Phases
from dlion.resident.lane import Beside, InLine, lane_for

DEVICE = torch.device("cuda")
BUCKET: Any = object()


class Stream:
    """Writes down who waits for whom, and where work goes."""

    here: "Stream"
    told: ClassVar[list[tuple[str, ...]]] = []

    def __init__(self, name: Any) -> None:
        self.name = name if isinstance(name, str) else "side"

    def wait_stream(self, other: "Stream") -> None:
        self.told.append((self.name, "waits for", other.name))

    def __enter__(self) -> None:
        self.before, Stream.here = Stream.here, self

    def __exit__(self, *error: object) -> None:
        Stream.here = self.before


class Memory:
    def record_stream(self, stream: Stream) -> None:
        Stream.told.append(("memory is read by", stream.name))


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream.here)
    Stream.here, Stream.told = Stream("main"), []


def test_what_is_taken_and_given_waits_and_keeps_its_memory() -> None:
    lane: Any = Beside(DEVICE)
    with lane.taking(Memory()):
        assert Stream.here.name == "side"
    assert Stream.here.name == "main"
    lane.give(Memory())
    assert Stream.told == [
        ("side", "waits for", "main"),
        ("memory is read by", "side"),
        ("main", "waits for", "side"),
        ("memory is read by", "main"),
    ]


def test_a_ballot_comes_after_gradients_of_other_streams() -> None:
    lane, main, other = Beside(DEVICE), Stream.here, Stream("other")
    for stream in (main, main, other, main):
        Stream.here = stream
        lane.follow()
    assert Stream.told == [("other", "waits for", "main"), ("main", "waits for", "other")]
    lane.begin()
    Stream.here = other
    lane.follow()
    assert len(Stream.told) == 2


def test_ballots_of_the_next_bucket_leave_before_the_verdict_on_one() -> None:
    """In hooks of backward and in `step()` alike, so that all workers start their calls in one order."""
    started: list[str] = []

    class Call:
        result = None

        def wait(self) -> None:
            pass

        def arrived(self) -> bool:
            return True

    def consultation(number: int) -> Any:
        started.append(f"ballots {number}")
        yield Call()
        started.append(f"verdict {number}")
        yield Call()
        return None

    flight, lane = Flight(Phases()), Beside(DEVICE)
    for number in range(3):
        flight.send(BUCKET, Status.OK, consultation(number))
        lane.sent(flight)
        lane.advance(flight)
    for _ in range(3):
        flight.receive()
    assert started == ["ballots 0", "ballots 1", "verdict 0", "ballots 2", "verdict 1", "verdict 2"]


def test_without_overlap_and_without_streams_all_is_in_line() -> None:
    assert type(lane_for(True, DEVICE)) is Beside
    for lane in (lane_for(False, DEVICE), lane_for(True, torch.device("cpu"))):
        assert type(lane) is InLine
        with lane.taking():
            lane.advance(Flight(Phases()))
    assert not Stream.told
