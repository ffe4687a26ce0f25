"""Guards what is made of measured figures: the break-even, formulas, the sentence, counters of interfaces, the page."""

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from page_reader import Page

from dlion.channel import Channel
from dlion.cli import main
from dlion.train.bench import bars, formulas
from dlion.train.bench.break_even import Terms, break_even
from dlion.train.bench.folder import BenchFolder
from dlion.train.bench.interface import Interface, carrier, interface_of
from dlion.train.bench.page import page_of
from dlion.train.bench.ratios import ratio, ratios
from dlion.train.bench.sentence import bits, duration, rate, sentence, shown, volume
from dlion.train.bench.settings import FLAGS
from dlion.train.bench.table import COLUMNS_MEAN, PHASES_MEAN, show

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


def whole(result: dict[str, Any], spread: float = 1.0) -> dict[str, Any]:
    """With what follows from contenders and break-even. Rounds differ, and dlion's by `spread` beside the others."""
    result = copy.deepcopy(result)
    for name, found in result["contenders"].items():
        lows = (1.0, 1.0, 1.1, 1 / spread, spread) if name == "dlion" else (1.0, 1.0, 1.1, 1.0, 1.0)
        found["turns"] = [found["seconds"] * factor for factor in lows]
    result["ratios"] = ratios(result["contenders"])
    result["sentence"] = sentence(result)
    return result


RESULT = whole(RESULT)


def changed(**changes: Any) -> dict[str, Any]:
    return whole(RESULT | changes)


def test_a_ratio_is_taken_within_rounds_and_outliers_bound_it_only_where_rounds_are_few() -> None:
    # the network was slow in the last round, for both
    found = ratio({"turns": [2.0, 2.2, 20.0]}, {"turns": [1.0, 1.0, 10.0]})
    assert (found.median, found.low, found.high) == pytest.approx((2.0, 2.0, 2.2))
    assert not found.is_undecided and found.inverse.is_undecided is False
    assert found.inverse.low == pytest.approx(1 / 2.2) and found.inverse.high == 0.5
    # the sign test's table: at 95 %, of 6 rounds none is left out, of 9 one, of 20 five on each side
    for rounds, left_out in ((1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (20, 5), (2000, 955)):
        rising = ratio({"turns": [1.0 + k for k in range(rounds)]}, {"turns": [1.0] * rounds})
        assert (rising.low, rising.high) == (1.0 + left_out, rounds - left_out)
    assert ratios({"ddp fp32": {"turns": [1.0]}}) == {}


def test_the_sentence_says_whether_and_where_and_who_was_quicker() -> None:
    said = RESULT["sentence"]
    assert said == (
        "Measured here: voting pays by a factor of 24.9 (24.9 to 24.9 over 5 rounds): a step takes 1.02 s with dlion "
        "and 25.4 s with DDP in fp32; PowerSGD of rank 2 is quicker than dlion by a factor of 2.03 (2.03 to 2.03), "
        "503 ms a step. On other networks, by a model that leaves out waiting for slower workers, the break-even is "
        "3.21 Gbit/s: voting pays below it."
    )
    slower = copy.deepcopy(RESULT)
    slower["break_even"] |= {"pays": "everywhere", "mbit_per_s": None}
    slower["contenders"]["powersgd 2"]["seconds"] = 2.0
    slower["contenders"]["ddp fp32"]["seconds"] = 0.51
    assert whole(slower)["sentence"] == (
        "Measured here: voting does not pay, by a factor of 2 (2 to 2 over 5 rounds): a step takes 1.02 s with dlion "
        "and 510 ms with DDP in fp32. On other networks, by a model that leaves out waiting for slower workers, voting "
        "pays at every bandwidth."
    )
    assert "at no bandwidth" in sentence(changed(break_even=RESULT["break_even"] | {"pays": "nowhere"}))
    assert sentence(changed(break_even=None)).startswith("Nothing is said about voting")


def test_where_the_spread_holds_1_no_difference_is_claimed() -> None:
    for seconds in (0.98, 1.06):
        close = copy.deepcopy(RESULT)
        close["contenders"]["ddp fp32"]["seconds"] = seconds
        close["contenders"]["powersgd 2"]["seconds"] = 0.98
        said = whole(close, spread=1.1)["sentence"]
        assert said.startswith("Measured here: no difference between voting and DDP beyond the spread of the ratio, ")
        assert "Voting" not in said and "PowerSGD" not in said
    decided = whole(close, spread=1.01)["sentence"]
    assert decided.startswith("Measured here: voting pays by a factor of 1.04 (1.03 to 1.05 over 5 rounds): ")


def test_figures_have_units() -> None:
    assert [duration(one) for one in (25.44, 0.131, 0.00042, 0)] == ["25.4 s", "131 ms", "420 µs", "0"]
    assert [volume(one) for one in (29_412_864, 919_248, 12, 0)] == ["29.4 MB", "919 kB", "12 B", "0 B"]
    assert [rate(one) for one in (93.2, 1234.0)] == ["93.2 Mbit/s", "1.23 Gbit/s"]
    assert [bits(one) for one in (1e7, 1e8, 1e9, 1e10)] == ["10 M", "100 M", "1 G", "10 G"]


def test_the_page_is_one_file_that_says_it_all() -> None:
    text = page_of(RESULT).decode()
    page = Page(text)
    said = " ".join(" ".join(page.words).split())
    assert page.open == [] and all(link.startswith("#") for link in page.links)
    assert RESULT["sentence"] in said and "a <fine> & fast one" in said
    assert text.count("<svg") == 4
    assert len(re.findall(r' id="([^"]*)"', text)) == len(set(re.findall(r' id="([^"]*)"', text)))
    for figure in ("25.4 s", "503 ms", "29.4 MB", "48.00", "24.9 to 24.9"):
        assert figure in said
    assert "effective rate of 9.19 Mbit/s for this small exchange, latency included" in said
    assert "Both lines are lower bounds" in said and PHASES_MEAN in said and "PowerSGD has no line" in said


def test_the_bare_exchange_is_not_on_the_axis_of_bandwidths(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(bars.bandwidths, RESULT, monkeypatch)
    upright = [line for line in axes.get_lines() if len(set(line.get_xdata())) == 1]
    assert [line.get_xdata()[0] for line in upright] == [3210e6]  # the break-even alone


def test_axes_say_bits_and_seconds_as_people_do(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(bars.bandwidths, RESULT, monkeypatch)
    axes.figure.canvas.draw()
    for axis, expected in ((axes.xaxis, {"10 M", "100 M", "1 G", "10 G"}), (axes.yaxis, {"100 ms", "1 s", "10 s"})):
        assert expected <= {text.get_text() for text in axis.get_ticklabels()}
    assert axes.get_xlabel() == "bit/s"


def test_figures_stay_whole_and_sections_together() -> None:
    text = page_of(RESULT).decode()
    assert text.count('<div class="grid" tabindex="0"><table>') == 2  # the phases and the figures
    assert ".grid { overflow-x: auto; }" in text and ".grid table { white-space: nowrap;" in text
    assert len(re.findall(r'<section style="break-inside: avoid"><h2>', text)) == 5


def drawn(draw: Callable[[dict[str, Any]], str], result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Axes:
    """What `draw` paints, before it becomes paths."""
    axes: Axes = Figure().subplots()
    monkeypatch.setattr(bars, "drawing", lambda paint, *_: paint(axes))
    draw(result)
    return axes


@pytest.mark.parametrize("name", ["no communication", "ddp fp32", "powersgd 2", "dlion"])
def test_one_contender_alone_makes_a_page_and_a_table(name: str) -> None:
    alone = changed(contenders={name: RESULT["contenders"][name]}, break_even=None, interface=None)
    alone["contenders"][name] |= {"interface_sent": None}
    if name != "dlion":
        alone["phases"] = None
    assert f"<th>{shown(name)}</th>" in page_of(alone).decode()
    said = io.StringIO()
    show(alone, said)
    assert f"\n{shown(name)} " in said.getvalue()


def test_the_table_is_plain_and_whole_where_there_is_no_terminal() -> None:
    said = io.StringIO()
    show(RESULT, said)
    lines = said.getvalue().splitlines()
    assert "\x1b" not in said.getvalue() and "…" not in said.getvalue()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["ddp-fp32"] == "25.4 s 24.9 24.9 to 24.9 25.3 s 29.4 MB 48.00 29.5 MB".split()
    assert rows["no-communication"][-4:] == ["0", "B", "900", "B"]
    assert rows["no-communication"][6] == "0"  # exposed
    assert {*COLUMNS_MEAN, PHASES_MEAN} <= set(lines)  # one line each


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    said = io.StringIO()
    wide = copy.deepcopy(RESULT)
    wide["ratios"]["ddp fp32"] = {"median": 124.9, "low": 99.95, "high": 1311.2}
    wide["ratios"]["no communication"] = {"median": 0.925, "low": 0.899, "high": 9.994}
    show(wide, said)
    rows = [line for line in said.getvalue().splitlines() if line.startswith(("ddp-fp32", "no-comm"))]
    assert max(map(len, rows)) <= 80
    assert "125 100.0 to 1311" in rows[1] and "0.93 0.90 to 9.99" in " ".join(rows[0].split())


def test_names_are_those_that_the_flag_takes() -> None:
    names = ["no communication", "ddp fp32", "ddp fp16", "powersgd 2", "dlion", "dlion overlap"]
    assert tuple(map(shown, names)) == FLAGS


def test_help_writes_values_as_a_shell_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "[default: 1.0 5.0 25.0]" in said and f"[default: {' '.join(FLAGS)}]" in said
    assert "--contenders ddp-fp32 dlion" in said and "('" not in said


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
