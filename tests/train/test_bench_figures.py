"""Guards what is made of measured figures: the break-even, formulas, ratios, the sentence, counters of interfaces."""

import copy
from pathlib import Path
from typing import Any

import pytest
from bench_result import RESULT, changed, whole

from dlion.channel import Channel
from dlion.train.bench import formulas
from dlion.train.bench.break_even import Terms, break_even
from dlion.train.bench.folder import BenchFolder
from dlion.train.bench.interface import Interface, carrier, interface_of
from dlion.train.bench.ratios import ratio, ratios
from dlion.train.bench.sentence import bits, duration, rate, sentence, volume

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
