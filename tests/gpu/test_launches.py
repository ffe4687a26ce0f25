"""How much a device is asked to do in a step that no host waits for: launches of kernels, and operations of torch."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from resident_model import on_device
from torch import nn
from triton.runtime.interpreter import InterpretedFunction
from unread import Operators
from world import succeed, world

from dlion import Distributed
from dlion.resident import by_triton

assert on_device

SMALL, LARGE = 1, 3  # buckets
# how many there are for each bucket, and beside them for each step; one more where a step is decided as a whole
VOTES: list[tuple[dict[str, Any], int, int]] = [
    ({"topology": "sharded"}, 18, 4),
    ({"topology": "replicated", "zeros": "exact"}, 12, 4),
    ({"topology": "server", "method": "dlion-avg", "nonfinite": "skip"}, 16, 8),
]

NO_WORK = ("empty", "new_empty", "_unsafe_view", "_record_function")

_here = threading.local()


class Started(Operators):
    """Counts, in this thread, what starts work: neither views of tensors nor memory that nobody has written to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in function._schema.returns)
        if not (views or name.startswith(NO_WORK) or getattr(_here, "launching", False)):
            self.found[name] += 1
        return super().__torch_dispatch__(function, types, args, kwargs)


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are counted too, and made one after another: Triton's interpreter takes one thread."""
    lock, launch = threading.Lock(), InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        counted = getattr(_here, "counted", None)
        if counted is not None:
            counted.found[f"launch of {self.__name__}"] += 1
        _here.launching = True
        try:
            with lock:
                launch(self, *args, **kwargs)
        finally:
            _here.launching = False

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr("dlion.renewal.kernels_for", lambda name: by_triton)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    _here.counted = Started()
    try:
        with _here.counted:
            yield _here.counted.found
    finally:
        _here.counted = None


def started(rank: int, group: Any, buckets: int, options: dict[str, Any]) -> Counter[str]:
    """What one step starts whose layout and hyper-parameters are those of the steps before."""
    param = nn.Parameter(torch.ones(64 * 9 * buckets))  # shards of 5 words and 4
    optimizer = Distributed([param], process_group=group, bucket_bytes=72, verify_every=0, timeout=60, **options)
    for _ in range(4):  # the first ones compare gradients, and hear of it one step later
        param.grad = torch.full_like(param, 1.0 + rank)
        optimizer.step()
    with counting() as found:
        optimizer.step()
    assert int(optimizer.param_groups[0]["t"]) == 5
    return found


@pytest.mark.parametrize(("options", "of_a_bucket", "of_a_step"), VOTES)
def test_a_bucket_is_a_handful_of_launches(
    options: dict[str, Any], of_a_bucket: int, of_a_step: int, one_at_a_time: None
) -> None:
    few, many = (succeed(world(2, lambda r, g, n=n: started(r, g, n, options)))[0] for n in (SMALL, LARGE))
    found = {name: (number - few[name]) / (LARGE - SMALL) for name, number in many.items()}
    assert {"launch of ballot", "launch of judge", "launch of enter", "launch of numbers"} <= found.keys()
    assert sum(found.values()) <= of_a_bucket, found
    assert sum(few.values()) - SMALL * sum(found.values()) <= of_a_step, few
