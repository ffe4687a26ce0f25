"""Learning rates and weight decay on the device: their values, and the fingerprint that workers compare."""

import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from dlion.ops import kept
from dlion.resident import scalars

HERE = torch.device("cpu")
KEYS = ("lr", "betas", "weight_decay")
PLAIN = [(0.1, 0.0), (1e-3, 0.3), (float("nan"), -0.0), (float("inf"), 5e-324), (3, 2**-30)]


def groups_of(values: list[tuple[Any, Any]], betas: tuple[float, float] = (0.9, 0.99)) -> list[dict[str, Any]]:
    return [{"lr": lr, "weight_decay": decay, "betas": betas} for lr, decay in values]


def found(groups: list[dict[str, Any]]) -> scalars.Scalars:
    return scalars.scalars(groups, KEYS, HERE)


def patterns(tensor: Tensor) -> list[list[int]]:
    return tensor.view(torch.int64).tolist()


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    scalars._plain.clear()


def there(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def test_a_tensor_and_a_number_of_one_value_are_the_same() -> None:
    """One worker may give a tensor, another a number."""
    wanted = found(groups_of(PLAIN))
    assert patterns(wanted.applied) == [list(struct.unpack("<2q", struct.pack("<2d", *each))) for each in PLAIN]
    for mixed in (
        [(there(lr), decay) for lr, decay in PLAIN],
        [(lr, there(decay)) for lr, decay in PLAIN],
        [(there(lr), there(decay)) for lr, decay in PLAIN],
        [*PLAIN[:2], *((there(lr), decay) for lr, decay in PLAIN[2:])],
    ):
        other = found(groups_of(mixed))
        assert patterns(other.applied) == patterns(wanted.applied)
        assert int(other.fingerprint) == int(wanted.fingerprint)
    single = torch.tensor(0.003)
    ours, theirs = (found(groups_of([(lr, 0.0)])).fingerprint for lr in (single, float(single)))
    assert int(ours) == int(theirs)


def test_every_difference_is_seen() -> None:
    same = groups_of([(0.1, 0.2), (0.3, 0.4)])
    others = [
        groups_of([(0.3, 0.4), (0.1, 0.2)]),
        groups_of([(0.2, 0.1), (0.3, 0.4)]),
        groups_of([(0.1, 0.2), (0.3, 0.4 + 2**-53)]),
        groups_of([(0.1, 0.2), (0.3, 0.4)], betas=(0.9, 0.98)),
        groups_of([(0.1, 0.2)]),
    ]
    fingerprints = {int(found(groups).fingerprint) for groups in (same, *others)}
    assert len(fingerprints) == len(others) + 1 and all(0 <= each < 2**32 for each in fingerprints)


def test_plain_numbers_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = scalars.sent
    monkeypatch.setattr(scalars, "sent", lambda values, *rest: sent.append(len(values)) or send(values, *rest))
    first, again = (found(groups_of(PLAIN)) for _ in range(2))
    assert sent == [11] and first.applied.data_ptr() == again.applied.data_ptr()
    found(groups_of([(0.2, 0.0)]))
    assert sent == [11, 3]


def test_a_tensor_is_copied_and_what_is_kept_stays() -> None:
    lr = there(0.25)
    mixed = found(groups_of([(lr, 0.5)]))
    lr.fill_(9.0)
    assert mixed.applied.tolist() == [[0.25, 0.5]]
    assert [float(mixed.hypers[0][name]) for name in ("lr", "weight_decay")] == [0.25, 0.5]
    assert found(groups_of([(0.0, 0.5)])).applied.tolist() == [[0.0, 0.5]]


def test_what_was_given_may_be_given_again() -> None:
    """Numbers stay numbers, for which nothing is started; tensors are copies."""
    mixed = found(groups_of([(there(0.25), 0.5), (3, there(0.75))]))
    assert isinstance(mixed.given[0]["weight_decay"], float) and isinstance(mixed.given[1]["lr"], float)
    again = found([group | before for group, before in zip(groups_of(PLAIN[:2]), mixed.given, strict=True)])
    assert patterns(again.applied) == patterns(mixed.applied) and int(again.fingerprint) == int(mixed.fingerprint)


def test_in_a_graph_they_are_written_by_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = found(groups_of(PLAIN))
    scalars._plain.clear()
    monkeypatch.setattr(kept, "is_captured", lambda device: True)
    within = found(groups_of(PLAIN))
    assert patterns(within.applied) == patterns(wanted.applied)
    assert int(within.fingerprint) == int(wanted.fingerprint) and not scalars._plain._things
