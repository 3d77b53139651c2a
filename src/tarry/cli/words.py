"""Text from outside, made fit for a terminal: what it cannot print does not move its cursor."""

from __future__ import annotations

import re

# Control characters (C0, DEL, C1), marks that reverse the direction of text, odd line ends.
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """Return one line in which control characters are written out, as Python writes them."""
    one_line = " ".join(text.split())
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], one_line)
