"""JSON as it comes from files."""

import json
from typing import Any


def from_json(text: str | bytes) -> Any:
    """The value in a document of JSON.

    Raises:
        ValueError: it is none, or lists in lists (tables in tables) go deeper than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or tables lie within one another, too deep to be read") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in UTF-8 ({error.reason})") from None
    except ValueError as error:
        raise ValueError(str(error)) from None
