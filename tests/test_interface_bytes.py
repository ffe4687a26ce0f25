"""The wire is honest at every worker's own interface: what crosses it is the formula plus TCP/IP headers."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import links
import packets
import pytest
import torch.distributed as dist
import wire
from delay_switch import enter
from processes import launch, meet

PARAMETERS = 2_000_000


def exchange(namespaces: list[str], interfaces: list[str], rank: int, size: int, folder: Path) -> Any:
    enter(namespaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces[rank]
    meet(folder, "meeting", rank, size)
    figures = [wire.bytes_of_steps(interfaces[rank], vote, PARAMETERS, 4) for vote in ("majority", "average")]
    dist.destroy_process_group()
    return figures


@pytest.mark.processes
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_interface_bytes_are_the_formula(workers: int, tmp_path: Path) -> None:
    if lacking := links.missing():
        pytest.skip(lacking)
    with links.shaped(workers, "none", segment_like_a_wire=True) as places:
        namespaces = [place.namespace for place in places]
        interfaces = [place.interface for place in places]
        seen = launch(tmp_path, workers, partial(exchange, namespaces, interfaces))
    print(json.dumps(seen))
    for each in zip(*seen, strict=True):  # the figures of all workers, for each vote
        for way in ("sent", "received"):
            for figures in each:
                payload, moved = figures[f"payload_{way}"], figures[f"interface_{way}"]
                assert payload >= figures["formula"]
                assert packets.HEADERS_LEAST <= moved / payload - 1 <= packets.HEADERS_MOST
            # What TCP sends again, because a busy machine lets a receiver wait, is not dlion's.
            total, again, formula = (sum(f[key] for f in each) for key in (f"payload_{way}", "repeated", "formula"))
            assert total - again <= 1.02 * formula


def test_formula() -> None:
    """Two bits in each direction but for the own shard; counts of up to 2, 4 and 8 need 2, 3 and 4 planes."""
    assert [packets.formula_bytes(n, "majority", 8000) for n in (2, 4, 8)] == [1000.0, 1500.0, 1750.0]
    assert [packets.formula_bytes(n, "average", 8000) for n in (2, 4, 8)] == [1500.0, 3000.0, 4375.0]
    assert packets.formula_bytes(16, "majority", 8000) / packets.formula_bytes(4, "majority", 8000) == 1.25
