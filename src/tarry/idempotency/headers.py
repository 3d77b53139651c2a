"""Header fields as one text, for stores that keep texts: every byte and the order come back."""

from __future__ import annotations

import json

Headers = tuple[tuple[bytes, bytes], ...]


def pack(headers: Headers) -> str:
    """Return the fields as JSON; latin-1 gives each byte a character of its own."""
    return json.dumps(
        [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]
    )


def unpack(text: str | bytes) -> Headers:
    """Return the fields that `pack` was given."""
    return tuple(
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in json.loads(text)
    )
