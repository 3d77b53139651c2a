"""Parse the `Idempotency-Key` header.

The draft (draft-ietf-httpapi-idempotency-key-header) defines the value as a String of RFC 9651: in
double quotes, followed by optional parameters, which have no meaning here. Many clients send the
key without quotes. Therefore a UUID, or any other string of letters, digits and `-._~:/+=`, is
accepted as if it were quoted. Any other value raises `MalformedKey`. A bad key must not be ignored,
because a client that sends a key relies on it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_KEY_LENGTH = 255

# An unquoted key starts with a letter or digit. Otherwise values of other RFC 9651 types, such as
# `:aGk=:` (bytes) or `-1`, would be accepted as keys.
_UNQUOTED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:/+=-]*")
_COMMON_KEY = re.compile(rb'"?([A-Za-z0-9][A-Za-z0-9._~:/+=-]{0,254})"?')
"""Fast path: nearly all keys match this, quoted or not, and need no further parsing."""
_QUOTED_TEXT = r'"((?:[ !#-\[\]-~]|\\["\\])*)"'
_STRING = re.compile(_QUOTED_TEXT)
_ESCAPED = re.compile(r"\\(.)")
_PARAMETER = re.compile(
    rf"""
    ;[ ]* [a-z*][a-z0-9_.*-]*
    (?: = (?:
        -? (?: [0-9]{{1,12}} \. [0-9]{{1,3}} | [0-9]{{1,15}} ) (?! [0-9.] )  # Decimal, Integer
      | {_QUOTED_TEXT}                                                             # String
      | [A-Za-z*][A-Za-z0-9:/!#$%&'*+.^_`|~-]*                               # Token
      | :[A-Za-z0-9+/=]*:                                                    # Byte Sequence
      | \?[01]                                                               # Boolean
      | @-?[0-9]{{1,15}} (?! [0-9.] )                                        # Date
      | %"(?P<display>(?:[\x20-\x21\x23\x24\x26-\x7e]|%[0-9a-f]{{2}})*)"     # Display String
    ) )?
    """,
    re.VERBOSE,
)


class MalformedKey(Exception):
    """The header is malformed. The message is a sentence for the client."""


def parse_key(lines: Sequence[bytes]) -> str:
    """Return the key, given the values of all `Idempotency-Key` lines of a request."""
    if len(lines) != 1:
        msg = f"Idempotency-Key must be sent once, not {len(lines)} times."
        raise MalformedKey(msg)
    line = lines[0]
    common = _COMMON_KEY.fullmatch(line)
    if common is not None and len(line) - len(common[1]) != 1:  # two quotes or none
        return common[1].decode()
    try:
        text = line.decode("ascii").strip(" ")
    except UnicodeDecodeError:
        msg = "Idempotency-Key must be ASCII."
        raise MalformedKey(msg) from None
    key = _parse_quoted(text) if text.startswith('"') else _parse_unquoted(text)
    if not 1 <= len(key) <= MAX_KEY_LENGTH:
        msg = f"Idempotency-Key must have 1 to {MAX_KEY_LENGTH} characters, not {len(key)}."
        raise MalformedKey(msg)
    return key


def _parse_unquoted(text: str) -> str:
    if text and not _UNQUOTED.fullmatch(text):
        msg = (
            'Idempotency-Key must be a string in double quotes, as in "8e03978e-40d5-43dd-bc93-'
            '6894a57f9324". A key without quotes may contain only letters, digits and -._~:/+=, '
            "and must begin with a letter or digit."
        )
        raise MalformedKey(msg)
    return text


def _parse_quoted(text: str) -> str:
    string = _STRING.match(text)
    if string is None:
        msg = (
            "Idempotency-Key has no closing quote, or a character that is not allowed in quotes. "
            'Allowed is printable ASCII, with \\ before each " and \\.'
        )
        raise MalformedKey(msg)
    _check_parameters(text, string.end())
    return _ESCAPED.sub(r"\1", string[1]) if "\\" in string[1] else string[1]


def _check_parameters(text: str, start: int) -> None:
    """Raise MalformedKey unless only parameters (`;name` or `;name=value`) follow the key."""
    while start < len(text):
        parameter = _PARAMETER.match(text, start)
        if parameter is None or not _is_utf8(parameter["display"] or ""):
            msg = f"Idempotency-Key must end after the key, but {text[start:][:20]!r} follows."
            raise MalformedKey(msg)
        start = parameter.end()


def _is_utf8(display_string: str) -> bool:
    """Return whether the percent-encoded bytes of a Display String are valid UTF-8."""
    try:
        unquote_to_bytes(display_string).decode()
    except UnicodeDecodeError:
        return False
    return True
