"""Guards what is made of measured figures: the break-even, formulas, the sentence, counters of interfaces, the page."""

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
from page_reader import Page

from dlion.channel import Channel
from dlion.train.bench import formulas
from dlion.train.bench.break_even import Terms, break_even
from dlion.train.bench.folder import BenchFolder
from dlion.train.bench.interface import Interface, carrier, interface_of
from dlion.train.bench.page import page_of
from dlion.train.bench.sentence import duration, rate, sentence, volume
from dlion.train.bench.table import show

MBIT = 8e-6


def test_voting_pays_below_the_bandwidth_at_which_steps_are_equal() -> None:
    # 30 MB against 1 MB, and 10 ms more work: 29 MB take 10 ms at 2.9 GB/s
    found = break_even(Terms(0.10, 30e6, 0.0, 0.0), Terms(0.11, 1e6, 0.0, 0.0))
    assert found.pays == "below"
    assert found.mbit_per_s == pytest.approx(8 * 2900)


def test_what_backward_hides_and_latency_move_the_break_even() -> None:
    # DDP shows 30e6 x + 0.002 - 0.052, voting 1e6 x + 0.004 over equal work: 29e6 x = 0.054
    found = break_even(Terms(0.1, 30e6, 0.002, 0.052), Terms(0.1, 1e6, 0.004, 0.0))
    assert found.pays == "below"
    assert found.mbit_per_s == pytest.approx(MBIT * 29e6 / 0.054)


def test_the_last_crossing_counts_when_voting_is_ahead_on_both_sides() -> None:
    # ahead by 1 ms at no cost of bytes, behind while DDP hides everything, ahead again on slow links
    ddp, dlion = Terms(0.101, 30e6, 0.0, 0.05), Terms(0.100, 1e6, 0.0, 0.0)
    found = break_even(ddp, dlion)
    assert found.pays == "below" and found.mbit_per_s is not None
    slowness = MBIT / found.mbit_per_s
    assert ddp.seconds(slowness) == pytest.approx(dlion.seconds(slowness))
    assert ddp.seconds(0.999 * slowness) < dlion.seconds(0.999 * slowness)
    assert all(ddp.seconds(k * slowness) > dlion.seconds(k * slowness) for k in (1.001, 2, 1000))


def test_voting_can_pay_everywhere() -> None:
    found = break_even(Terms(0.12, 30e6, 0.0, 0.0), Terms(0.1, 1e6, 0.0, 0.0))
    assert (found.pays, found.mbit_per_s) == ("everywhere", None)
    hiding = break_even(Terms(0.12, 30e6, 0.001, 0.05), Terms(0.1, 1e6, 0.001, 0.05))
    assert hiding.pays == "everywhere"


def test_voting_can_pay_nowhere() -> None:
    more = break_even(Terms(0.1, 1e6, 0.0, 0.0), Terms(0.1, 2e6, 0.0, 0.0))
    alone = break_even(Terms(0.1, 0.0, 0.0, 0.0), Terms(0.11, 0.0, 0.0, 0.0))
    assert more.pays == alone.pays == "nowhere" and more.mbit_per_s is None


def test_formulas_are_those_of_the_readme() -> None:
    million = 1_000_000
    assert 8 * formulas.ring(4 * million, 4) == 48 * million
    assert 8 * formulas.votes(million, 4, "majority") == 1.5 * million
    assert 8 * formulas.votes(million, 4, "average") == 3 * million
    assert 8 * formulas.votes(million, 2, "average") == million  # replicated: the ballots are all there is
    assert [formulas.ddp_calls(4_902_144, cap) for cap in (1, 5, 25)] == [19, 4, 1]


RESULT: dict[str, Any] = {
    "workers": 4,
    "parameters": 4_902_144,
    "rounds": 5,
    "seconds": 61.2,
    "settings": {"batch_size": 2, "tokens": 64, "contenders": ["dlion", "ddp-fp32"], "workers": 4},
    "environment": {"device": "cpu", "threads": 1, "backend": "gloo", "cpu": "a <fine> & fast one"},
    "contenders": {
        "no communication": {"seconds": 0.11, "sent": None, "sent_by_formula": 0.0, "interface_sent": 900.0},
        "ddp fp32": {"seconds": 25.4, "sent": None, "sent_by_formula": 29_412_864.0, "interface_sent": 29.5e6},
        "powersgd 2": {"seconds": 0.503, "sent": None, "sent_by_formula": 347_904.0, "interface_sent": 362_000.0},
        "dlion": {"seconds": 1.02, "sent": 919_248.0, "sent_by_formula": 919_152.0, "interface_sent": 925_000.0},
    },
    "interface": {"name": "eth0", "shared_by": 1},
    "phases": {"compute": 0.1, "ballot": 0.004, "wait": 0.9, "tally": 0.001, "apply": 0.0015},
    "overlap_phases": None,
    "bare_exchange": {"payload": 919_248, "seconds": 0.8, "mbit_per_s": 9.19},
    "break_even": {
        "contender": "dlion",
        "pays": "below",
        "mbit_per_s": 3210.0,
        "ddp": {"local": 0.11, "bytes_sent": 29_412_864.0, "delay": 0.001, "hidden": 0.06},
        "dlion": {"local": 0.105, "bytes_sent": 919_152.0, "delay": 0.001, "hidden": 0.0},
    },
}
for _found in RESULT["contenders"].values():
    _found["steps"] = [_found["seconds"] * factor for factor in (0.9, 1.0, 1.3)]
RESULT["sentence"] = sentence(RESULT)


def changed(**changes: Any) -> dict[str, Any]:
    result = copy.deepcopy(RESULT | changes)
    result["sentence"] = sentence(result)
    return result


def test_the_sentence_says_whether_and_where_and_who_was_quicker() -> None:
    said = RESULT["sentence"]
    assert said.startswith("Voting pays here, by a factor of 24.9: a step takes 1.02 s with dlion and 25.4 s with DDP")
    assert "it starts to below 3.21 Gbit/s" in said
    assert said.endswith("PowerSGD of rank 2 is 2.03 times as quick as dlion, 503 ms a step.")
    slower = changed(break_even=RESULT["break_even"] | {"pays": "everywhere", "mbit_per_s": None})
    slower["contenders"]["powersgd 2"]["seconds"] = 2.0
    slower["contenders"]["ddp fp32"]["seconds"] = 0.51
    assert sentence(slower) == (
        "Voting does not pay here, by a factor of 2: a step takes 1.02 s with dlion and 510 ms with DDP in fp32; by "
        "the model it pays at every bandwidth."
    )
    assert "at no bandwidth" in sentence(changed(break_even=RESULT["break_even"] | {"pays": "nowhere"}))
    assert sentence(changed(break_even=None)).startswith("Nothing is said about voting")


def test_figures_have_units() -> None:
    assert [duration(one) for one in (25.44, 0.131, 0.00042, 0)] == ["25.4 s", "131 ms", "420 µs", "0 µs"]
    assert [volume(one) for one in (29_412_864, 919_248, 12, 0)] == ["29.4 MB", "919 kB", "12 B", "0 B"]
    assert [rate(one) for one in (93.2, 1234.0)] == ["93.2 Mbit/s", "1.23 Gbit/s"]


def test_the_page_is_one_file_that_says_it_all() -> None:
    text = page_of(RESULT).decode()
    page = Page(text)
    said = " ".join(" ".join(page.words).split())
    assert page.open == [] and all(link.startswith("#") for link in page.links)
    assert RESULT["sentence"] in said and "a <fine> & fast one" in said
    assert text.count("<svg") == 4
    assert len(re.findall(r' id="([^"]*)"', text)) == len(set(re.findall(r' id="([^"]*)"', text)))
    for figure in ("25.4 s", "503 ms", "29.4 MB", "48.00", "9.19 Mbit/s"):
        assert figure in said


@pytest.mark.parametrize("name", ["no communication", "ddp fp32", "powersgd 2", "dlion"])
def test_one_contender_alone_makes_a_page_and_a_table(name: str) -> None:
    alone = changed(contenders={name: RESULT["contenders"][name]}, break_even=None, interface=None)
    alone["contenders"][name] |= {"interface_sent": None}
    if name != "dlion":
        alone["phases"] = None
    assert f"<th>{name}</th>" in page_of(alone).decode()
    shown = io.StringIO()
    show(alone, shown)
    assert f"\n{name} " in shown.getvalue()


def test_the_table_is_plain_and_whole_where_there_is_no_terminal() -> None:
    shown = io.StringIO()
    show(RESULT, shown)
    lines = shown.getvalue().splitlines()
    assert "\x1b" not in shown.getvalue() and "…" not in shown.getvalue()
    row = next(line.split() for line in lines if line.startswith("ddp fp32"))
    assert row == "ddp fp32 25.4 s 24.90 25.3 s 29.4 MB 48.00 29.5 MB".split()


def test_a_folder_with_results_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BenchFolder.claim(tmp_path / "one", "gpt-n4")
    folder.write(RESULT)
    folder.leave()
    with pytest.raises(ValueError, match="holds a measurement already"):
        BenchFolder.claim(tmp_path / "one", "gpt-n4")
    monkeypatch.chdir(tmp_path)
    names = [BenchFolder.claim(None, "gpt-n4").path.name for _ in range(2)]
    assert names == ["gpt-n4", "gpt-n4-2"]


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """What /sys/class/net holds on a machine with three interfaces."""
    for name, sent, received in (("lo", 10, 10), ("eth0", 123456789012, 42), ("eth1", 0, 7)):
        folder = tmp_path / name / "statistics"
        folder.mkdir(parents=True)
        (folder / "tx_bytes").write_text(f"{sent}\n")
        (folder / "rx_bytes").write_text(f"{received}\n")
    return tmp_path


def test_counters_are_read(system: Path) -> None:
    assert Interface("eth0", 1, system).read() == (123456789012, 42)


@pytest.mark.parametrize(
    ("environment", "backend", "expected"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "gloo", "eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth0,nothere"}, "gloo", "eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, "gloo", None),
        ({"GLOO_SOCKET_IFNAME": "nothere"}, "gloo", None),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "nccl", None),
        ({"NCCL_SOCKET_IFNAME": "eth1"}, "nccl", "eth1"),
        ({"NCCL_SOCKET_IFNAME": "^lo"}, "nccl", None),
    ],
)
def test_the_interface_is_the_one_the_backend_was_told(
    environment: dict[str, str], backend: str, expected: str | None, system: Path
) -> None:
    assert carrier(environment, backend, system) == expected


@pytest.mark.parametrize(("address", "expected"), [("127.0.1.1", "lo"), ("203.0.113.77", None)])
def test_without_being_told_the_host_names_address_decides(
    address: str, expected: str | None, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostbyname", lambda name: address)
    assert carrier({}, "gloo", system) == expected


class OneOfThree(Channel):
    """Answers for two workers beside this one: one in the same place, one elsewhere."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def gather_json(self, value: Any) -> list[Any]:
        self.told.append(value)
        return [value, value, ["eth0", "another machine", ""]]


def test_workers_of_one_place_share_an_interface(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert interface_of(OneOfThree(), "gloo", system) == Interface("eth0", 2, system)


def test_an_interface_without_counters_is_unknown_and_still_told(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers gather once, whatever each one finds, or they would hang."""
    (system / "eth0/statistics/rx_bytes").unlink()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    channel = OneOfThree()
    assert interface_of(channel, "gloo", system) is None
    assert channel.told == [None]
