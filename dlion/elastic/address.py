"""Where a lighthouse is: the address that a user gives, checked before anything is made."""

import re
from urllib.parse import urlsplit

LABEL = r"[A-Za-z0-9_-]{1,63}"  # a part of a host's name: an empty or longer one is no name to the resolver
ADDRESS = re.compile(rf"(http://)?({LABEL}(?:\.{LABEL})*\.?):([0-9]{{1,5}})/?")
LONGEST_HOST = 253  # letters of a name


def url_of(given: str) -> str:
    """`http://HOST:PORT`, of what was given in this form or as HOST:PORT.

    Raises:
        ValueError: that is no address.
    """
    found = ADDRESS.fullmatch(given) if isinstance(given, str) else None
    if found is None or not 1 <= int(found[3]) <= 65535 or len(found[2].rstrip(".")) > LONGEST_HOST:
        raise ValueError(
            f"{given!r} is no address of a lighthouse: give HOST:PORT, a name or an IPv4 address and a port "
            "from 1 to 65535, as of the torchft_lighthouse that runs"
        )
    return f"http://{found[2]}:{int(found[3])}"


def host_and_port(url: str) -> tuple[str, int]:
    """The parts of what `url_of` returned."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port
