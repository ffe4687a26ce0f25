"""What a worker needs to talk to the others, whether they are in other processes or at one table in this one."""

from typing import Protocol, TypeVar

from torch import Tensor

Result = TypeVar("Result", covariant=True)


class Awaited(Protocol[Result]):
    """A call under way."""

    @property
    def result(self) -> Result:
        """What it brings, once it is over."""

    def arrived(self) -> bool:
        """Whether it is."""

    def wait(self) -> Result:
        """The result, once it is there."""


class Line(Protocol):
    """What a topology needs of a channel, between processes or within one."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_to_all(self, rows: Tensor) -> Awaited[Tensor]: ...
    def all_gather(self, row: Tensor) -> Awaited[Tensor]: ...
    def gather(self, row: Tensor, to: int) -> Awaited[Tensor | None]: ...
    def send_out(self, row: Tensor, source: int) -> Awaited[Tensor]: ...


class Lines(Protocol):
    """One for ballots and one for verdicts, so that they do not wait for each other."""

    @property
    def ballots(self) -> Line: ...
    @property
    def verdicts(self) -> Line: ...
