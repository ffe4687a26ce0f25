"""Guards the emulated links of bench/: they are made and removed, they limit and delay, and workers on them end."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import delay_switch
import links
import pytest
from delay_switch import Wire, enter
from links import LinkError, Place, bits_per_second, burst_bytes, delayed, loopback, shaped
from workers import WorkerError, run_workers

BENCH = Path(links.__file__).parent
MEGABYTE = 10**6


@pytest.fixture
def net() -> None:
    if lacking := links.missing():
        pytest.skip(lacking)


@pytest.fixture
def tun(net: None) -> None:
    if lacking := links.missing_for_delay():
        pytest.skip(lacking)


def made_by(process: int) -> list[str]:
    return [path.name for path in links.NAMESPACES.glob(f"dlion-{process}-*")]


def socket_in(place: Place) -> socket.socket:
    """A TCP socket of the place's namespace: it stays there, whoever uses it."""
    made: list[socket.socket] = []

    def make() -> None:
        enter(place.namespace)  # this thread alone
        made.append(socket.socket())

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def connected(source: Place, target: Place) -> tuple[socket.socket, socket.socket, float]:
    """Both ends of a connection, and how long connecting took: one round trip."""
    with socket_in(target) as server:
        server.settimeout(10)
        server.bind((target.address, 0))
        server.listen()
        client = socket_in(source)
        client.settimeout(10)
        start = time.perf_counter()
        client.connect(server.getsockname())
        took = time.perf_counter() - start
        return client, server.accept()[0], took


def seconds_to_move(size: int, source: Place, target: Place) -> float:
    client, receiver, _ = connected(source, target)
    with client, receiver:
        sender = threading.Thread(target=client.sendall, args=(bytes(size),))
        start = time.perf_counter()
        sender.start()
        left = size
        while left:
            left -= len(receiver.recv(min(left, MEGABYTE)))
        took = time.perf_counter() - start
        sender.join()
    return took


def test_links_are_made_and_removed(net: None) -> None:
    with shaped(2, "10mbit") as places:
        assert len(made_by(os.getpid())) == 3  # two workers and the bridge
        assert [place.address for place in places] == ["10.231.0.1", "10.231.0.2"]
        with pytest.raises(LinkError, match="File exists"), shaped(2, "none"):
            pytest.fail("made twice")
    assert made_by(os.getpid()) == []
    with pytest.raises(ZeroDivisionError), loopback(2):
        assert len(made_by(os.getpid())) == 1
        raise ZeroDivisionError
    assert made_by(os.getpid()) == []


HOLDER = """
import sys
from links import shaped, stopping_on_signals
with stopping_on_signals(), shaped(2, "10mbit"):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(net: None) -> Iterator[subprocess.Popen[str]]:
    """A process that holds links and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], cwd=BENCH, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert len(made_by(process.pid)) == 3
    yield process
    process.kill()
    process.communicate()


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_links_are_removed_after_a_signal(holder: subprocess.Popen[str], number: signal.Signals) -> None:
    holder.send_signal(number)
    assert holder.wait(10) == 128 + number
    assert made_by(holder.pid) == []


@pytest.mark.processes
def test_what_a_killed_process_left_is_removed_by_the_next(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait(10)
    assert len(made_by(holder.pid)) == 3
    with loopback(1):
        assert made_by(holder.pid) == []


def test_a_shaped_link_limits(net: None) -> None:
    """Headers make up for the bucket that leaves at once: 2.5 MB need 1,727 packets of 66 B, 114 kB against 64 kB."""
    size = 2_500_000
    with shaped(2, "50mbit") as (one, other):
        assert seconds_to_move(size, one, other) >= size * 8 / 50e6
    with shaped(2, "none") as (one, other):
        assert seconds_to_move(size, one, other) < size * 8 / 50e6


@pytest.mark.processes
def test_the_switch_delays_and_limits(tun: None) -> None:
    with delayed(2, delay_ms=20, rate_mbit=40) as (one, other):
        client, receiver, took = connected(one, other)
        client.close()
        receiver.close()
        assert took >= 2 * 0.020
        assert seconds_to_move(MEGABYTE, one, other) >= MEGABYTE * 8 / 40e6 + 0.020
    assert made_by(os.getpid()) == []


def test_when_packets_arrive() -> None:
    assert Wire(delay=0.5).arrival(10.0, 1500, 1, 2) == 10.5
    wire = Wire(delay=0.5, rate=1000.0, queue=3.0)  # bytes a second
    # A second on the way up, one on the way down; the next waits for both links.
    assert [wire.arrival(10.0, 1000, 1, 2) for _ in range(3)] == [11.5, 12.5, 13.5]
    assert wire.arrival(10.0, 1000, 1, 2) is None  # it would wait for four seconds
    assert wire.arrival(10.0, 1000, 3, 2) is None  # another up-link, the same down-link
    assert wire.arrival(10.0, 1000, 3, 1) == 11.5  # links in other directions are free
    lossy = [Wire(delay=0.0, loss=0.25).arrival(0.0, 1, 1, 2) for _ in range(2)]
    assert lossy[0] == lossy[1]  # the same packets every time
    wire = Wire(delay=0.0, loss=0.25)
    assert 200 <= sum(wire.arrival(0.0, 1, 1, 2) is None for _ in range(1000)) <= 300


@pytest.mark.processes
def test_a_switch_that_cannot_start_says_so(net: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "delay_switch.py"
    broken.write_text("")
    monkeypatch.setattr(links, "__file__", str(tmp_path / "links.py"))
    with pytest.raises(LinkError, match="did not start"), delayed(2, delay_ms=1):
        pytest.fail("it did start")
    assert made_by(os.getpid()) == []


def test_rates_and_bursts() -> None:
    assert bits_per_second("none") is None and bits_per_second("10gbit") == 1e10
    assert burst_bytes("200mbit") == 64 * 1024 and burst_bytes("201mbit") == 128 * 1024 and burst_bytes("none") is None
    for wrong in ("100", "0mbit", "1.5gbit", "fast", "100mbps"):
        with pytest.raises(LinkError, match="whole number with kbit, mbit or gbit"):
            bits_per_second(wrong)


def test_what_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert links.missing() == "emulated links need root, to make network namespaces: run the command as root."
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(links.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert links.missing() == "emulated links need the command tc: install it (Debian: apt-get install iproute2)."
    monkeypatch.setattr(links.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(links.subprocess, "run", refuse)
    assert links.missing() == (
        f"emulated links do not work here: `ip netns add dlion-{os.getpid()}-probe` failed: Operation not permitted"
    )
    assert links.missing_for_delay() == links.missing()
    monkeypatch.setattr(links.sys, "platform", "darwin")
    assert links.missing() == "emulated links need Linux's network namespaces and this is darwin."


def refuse(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(command, 1, "", "Operation not permitted\n")


def test_every_worker_has_its_place(net: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = f'echo "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $OMP_NUM_THREADS $EXTRA" > {tmp_path}/$RANK;'
    script += "ls /sys/class/net | grep -x $GLOO_SOCKET_IFNAME && echo rank $RANK"
    with shaped(2, "none") as places:
        run_workers(places, ["sh", "-c", script], 10, {"EXTRA": "more"})
    assert (tmp_path / "0").read_text() == "0 2 0 10.231.0.1 1 more\n"
    assert (tmp_path / "1").read_text() == "1 2 0 10.231.0.1 1 more\n"
    assert capfd.readouterr().out == "e0\nrank 0\n"


FOREVER = "exec tail -f /dev/null"


def test_a_rank_that_fails_ends_the_others(net: None) -> None:
    with loopback(3) as places:
        start = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            run_workers(places, ["sh", "-c", f"[ $RANK = 1 ] && echo no luck && exit 3; {FOREVER}"], 60)
        assert time.monotonic() - start < 30
        assert str(caught.value) == "rank 1 ended with status 3; its last lines:\n    no luck"
        # the namespace is empty: every process has ended
        assert subprocess.run(["ip", "netns", "pids", places[0].namespace], capture_output=True).stdout == b""


def test_ranks_that_hang_are_ended(net: None) -> None:
    with loopback(2) as places, pytest.raises(WorkerError, match=r"ranks \[1\] had not ended after 0.3 s"):
        run_workers(places, ["sh", "-c", f"[ $RANK = 0 ] || {FOREVER}"], 0.3)


def test_the_switch_needs_a_namespace() -> None:
    with pytest.raises(OSError, match="No such file"):
        delay_switch.enter("dlion-none")
