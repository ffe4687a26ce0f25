"""torchft's lighthouse: who is there, and who trains together from now on. The only file that knows torchft.

The lighthouse answers a quorum request when all workers whose heart beats have asked, or after its `join_timeout` when
more than half of them have. A dead worker's heartbeat is forgotten after `heartbeat_timeout`: that is what the loss of
a worker costs the others. Only numbers and short JSON pass through it, never parameters.
"""

import os
import re
import threading
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

from dlion.elastic.address import url_of
from dlion.errors import QuorumError

BEAT_SECONDS = 0.2
ANSWER_SECONDS = 5.0  # for a heartbeat or the status page: both are answered at once or never
HEARTBEAT_TIMEOUT = 2.0
JOIN_TIMEOUT = 60.0
TICK_SECONDS = 0.05  # how often a lighthouse looks whether a heartbeat has become too old
NEEDS_EXTRA = 'elastic training needs torchft: pip install "dlion[elastic]"'


@dataclass(frozen=True)
class Member:
    """One worker of a quorum.

    Attributes:
        name: unique for each process. worker: its number, which another process may have had before.
        store: HOST:PORT of its key-value store.
        told: what it said when it asked, JSON.
    """

    name: str
    worker: int
    store: str
    told: dict[str, Any]


class Lighthouse:
    """One worker's connection to a lighthouse. Its heart beats until `close()`.

    Args:
        address: HOST:PORT of the lighthouse.
        worker: this worker's number.
        timeout: seconds to reach the lighthouse.

    Raises:
        ValueError: `address` is none.
        QuorumError: torchft is missing, or the lighthouse is not reached within `timeout` seconds.
    """

    def __init__(self, address: str, worker: int, timeout: float) -> None:
        self.address = url_of(address)
        self.name = f"{worker:06d}-{uuid.uuid4().hex[:12]}"
        self._client = self._connect(timeout)
        self._closed = threading.Event()
        # a client of its own: the other one waits for quorums
        beating = threading.Thread(target=self._beat, args=(self._connect(timeout),), daemon=True)
        beating.start()

    def quorum(self, store: str, told: dict[str, Any], timeout: float) -> list[Member]:
        """Ask who trains together from now on: the members in the order of their numbers, equal for all of them.

        Raises:
            QuorumError: none was found within `timeout` seconds, or the lighthouse went; says whose heart beats and
                whose does not.
        """
        began = time.monotonic()
        try:
            found = self._client.quorum(
                self.name, timedelta(seconds=timeout), address="", store_address=store, step=0, world_size=1, data=told
            )
        except (TimeoutError, RuntimeError, ConnectionError) as error:
            waited = time.monotonic() - began
            raise QuorumError(
                f"worker {number_of(self.name)} asked the lighthouse at {self.address} for a quorum and had none after "
                f"{waited:.1f} s: {self._who_is_there()}; look for an error on the workers that are missing, start "
                f"them again, or allow fewer with min_workers= ({_first_line(error)})"
            ) from error
        members = [Member(m.replica_id, number_of(m.replica_id), m.store_address, m.data) for m in found.participants]
        return sorted(members, key=lambda member: member.name)

    def close(self) -> None:
        """Leave: the others train on without this worker, after the lighthouse's `heartbeat_timeout`."""
        self._closed.set()

    def _connect(self, timeout: float) -> Any:
        try:
            return _torchft().LighthouseClient(self.address, timedelta(seconds=timeout))
        except RuntimeError as error:
            raise QuorumError(
                f"no lighthouse answered at {self.address} within {timeout:g} s: start one there, or give the address "
                f"of the one that runs ({_first_line(error)})"
            ) from error

    def _beat(self, client: Any) -> None:
        while True:
            try:
                client.heartbeat(self.name, timedelta(seconds=ANSWER_SECONDS))
            except (RuntimeError, TimeoutError, ConnectionError):
                pass  # the lighthouse may come back; the next quorum says so if it does not
            if self._closed.wait(BEAT_SECONDS):
                return

    def _who_is_there(self) -> str:
        """From the lighthouse's status page, the workers whose hearts beat, and the others that it knows."""
        try:
            with urllib.request.urlopen(f"{self.address}/status", timeout=ANSWER_SECONDS) as page:
                seen = re.findall(r"(\d{6})-[0-9a-f]{12}: seen ([0-9.]+)(m?s|[µn]s)", page.read().decode("utf-8"))
        except (OSError, urllib.error.URLError):
            return "the lighthouse itself does not answer"
        ages = {int(number): 0.0 for number, _, _ in seen} | {
            int(number): float(age) for number, age, unit in seen if unit == "s"
        }
        here = sorted(number for number, age in ages.items() if age < HEARTBEAT_TIMEOUT)
        gone = [f"worker {number} was last seen {age:.0f} s ago" for number, age in sorted(ages.items()) if age >= 2.0]
        present = f"present are {workers_text(here)}" if here else "nobody is present"
        return "; ".join([present, *gone])


class LighthouseServer:
    """A lighthouse in this process.

    Args:
        min_workers: below this number nobody trains on.
        host, port: where it listens; port 0 takes a free one.
        join_timeout: seconds that a quorum waits for workers that live and have not asked: as long as the longest
            time between two steps.
        heartbeat_timeout: seconds after which a worker that was not heard of is lost.
    """

    def __init__(
        self,
        min_workers: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        join_timeout: float = JOIN_TIMEOUT,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
    ) -> None:
        milliseconds = [int(1000 * seconds) for seconds in (join_timeout, TICK_SECONDS, heartbeat_timeout)]
        self._server = _torchft().LighthouseServer(f"{host}:{port}", min_workers, *milliseconds)
        self.address = f"{host}:{self._server.address().rpartition(':')[2]}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()


def number_of(name: str) -> int:
    """The number of the worker whose process has this name."""
    return int(name.partition("-")[0])


def workers_text(workers: list[int]) -> str:
    """'worker 1' or 'workers 1, 3'."""
    return f"worker{'s' if len(workers) != 1 else ''} {', '.join(map(str, workers))}"


def changes(before: list[str], now: list[str], step: int, seconds: float) -> list[str]:
    """Who went and who came, in sentences: processes count, not numbers. Nothing for the first quorum.

    Args:
        seconds: since the step began that a loss held up.
    """
    with_whom = f"going on with {workers_text([number_of(name) for name in now])}"
    lost = [number_of(name) for name in before if name not in now]
    came = [number_of(name) for name in now if name not in before]
    back = ", in which its place was taken again" if set(lost) & set(came) else ""
    said = [f"{workers_text(lost)} lost at step {step}: {with_whom} after {seconds:.1f} s{back}"] if lost else []
    return said + ([f"{workers_text(came)} joined at step {step}: {with_whom}"] if came and before else [])


def check_torchft() -> None:
    """Find out before anything is made.

    Raises:
        QuorumError: torchft is missing.
    """
    _torchft()


def _torchft() -> ModuleType:
    os.environ.setdefault("RUST_LOG", "error")  # its log is written by Rust, which asks nobody else
    try:
        import torchft.coordination
    except ImportError as error:
        raise QuorumError(f"{NEEDS_EXTRA} ({error})") from None
    module: ModuleType = torchft.coordination
    return module


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
