"""Addresses of a lighthouse: what is none is refused at once, wherever it is given."""

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
