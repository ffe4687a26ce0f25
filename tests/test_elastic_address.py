"""Addresses of a lighthouse, and numbers of elastic workers: what is none is refused at once, wherever it is given."""

from typing import Any

import pytest
import torch

from dlion.elastic import Elastic
from dlion.elastic.address import host_and_port, url_of
from dlion.elastic.quorum import Lighthouse

BAD = ["", "nonsense", "host:", ":29510", "host:port", "host:0", "host:99999", "host:-1", "host:१", "http://", "a b:1"]
BAD += [
    "http://host",
    "https://host:1",
    "http://host:1/path",
    "http://http://host:1",
    "host:1\n",
    "[::1]:1",
    "a..b:29510",
    ".a:29510",
    "a..:29510",
    f"{'a' * 64}:29510",
    f"{'a.' * 127}a:29510",
    None,
    29510,
]


@pytest.mark.parametrize("given", BAD, ids=repr)
def test_what_is_no_address_is_refused_when_the_optimizer_is_made(given: str) -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="is no address of a lighthouse: give HOST:PORT"):
        Elastic([param], lr=0.1, lighthouse=given, worker=0, workers=2)
    with pytest.raises(ValueError, match="is no address of a lighthouse"):
        Lighthouse(given, 0, 1.0)


@pytest.mark.parametrize("given", ["host.example:29510", "http://host.example:29510", "http://host.example:29510/"])
def test_an_address_is_the_same_in_every_form(given: str) -> None:
    assert url_of(given) == "http://host.example:29510"
    assert host_and_port(url_of(given)) == ("host.example", 29510)


BAD_NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"workers": True}, "worker=0 of workers=True: workers must be from 1 to 1,000,000"),
    ({"workers": 2**70}, "of workers=1180591620717411303424"),
    ({"workers": 2.5}, "of workers=2.5"),
    ({"worker": False}, "worker=False of workers=2"),
    ({"worker": 2}, "worker=2 of workers=2"),
    ({"min_workers": True}, "min_workers=True must be a whole number from 1 to workers=2"),
    ({"min_workers": 3}, "min_workers=3 must be"),
    ({"quorum_every": True}, "quorum_every=True must be a whole number of steps"),
    ({"quorum_every": 2**70}, "quorum_every=1180591620717411303424 must be"),
    ({"timeout": True}, "timeout=True must be a number of seconds"),
    ({"timeout": 0}, "timeout=0 must be"),
    ({"quorum_timeout": True}, "quorum_timeout=True must be a number of seconds"),
    ({"quorum_timeout": float("inf")}, "quorum_timeout=inf must be"),
    ({"start_timeout": True}, "start_timeout=True must be a number of seconds"),
    ({"start_timeout": "soon"}, "start_timeout='soon' must be"),
]


@pytest.mark.parametrize(("wrong", "said"), BAD_NUMBERS, ids=repr)
def test_numbers_out_of_range_are_refused_when_the_optimizer_is_made(wrong: dict[str, Any], said: str) -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    given: dict[str, Any] = {"lr": 0.1, "lighthouse": "host:1", "worker": 0, "workers": 2}
    with pytest.raises(ValueError) as error:
        Elastic([param], **(given | wrong))
    assert said in str(error.value)
