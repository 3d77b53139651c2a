"""The `Idempotency-Key` field: from the lines of a request to the key, or to what is wrong with it.

By its draft it is a String of RFC 9651, in double quotes, with parameters that mean nothing here.
Many clients send the key bare: a UUID, or anything else of letters, digits and `-._~:/+=`, is taken
as if it were quoted. All else is malformed, which a request should not get away with: who sends a
key counts on it. Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST = 255

# A letter or digit first, so that no other type of RFC 9651 is taken for a key: neither `:aGk=:`
# (bytes) nor `-1`.
_BARE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:/+=-]*")
_PLAIN = re.compile(rb'"?([A-Za-z0-9][A-Za-z0-9._~:/+=-]{0,254})"?')
"""What nearly all keys are: those need no grammar."""
_TEXT = r'"((?:[ !#-\[\]-~]|\\["\\])*)"'
_STRING = re.compile(_TEXT)
_ESCAPED = re.compile(r"\\(.)")
_PARAMETER = re.compile(
    rf"""
    ;[ ]* [a-z*][a-z0-9_.*-]*
    (?: = (?:
        -? (?: [0-9]{{1,12}} \. [0-9]{{1,3}} | [0-9]{{1,15}} ) (?! [0-9.] )  # Decimal, Integer
      | {_TEXT}                                                             # String
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
    """The field is not as it must be; the message is a sentence for whoever sent it."""


def parse_key(lines: Sequence[bytes]) -> str:
    """Return the key that the lines of the field carry."""
    if len(lines) != 1:
        msg = f"Idempotency-Key must be sent once, not {len(lines)} times."
        raise MalformedKey(msg)
    line = lines[0]
    plain = _PLAIN.fullmatch(line)
    if plain is not None and len(line) - len(plain[1]) != 1:  # one quote is none
        return plain[1].decode()
    try:
        text = line.decode("ascii").strip(" ")
    except UnicodeDecodeError:
        msg = "Idempotency-Key must be ASCII."
        raise MalformedKey(msg) from None
    key = _quoted(text) if text.startswith('"') else _bare(text)
    if not 1 <= len(key) <= LONGEST:
        msg = f"Idempotency-Key must have 1 to {LONGEST} characters, not {len(key)}."
        raise MalformedKey(msg)
    return key


def _bare(text: str) -> str:
    if text and not _BARE.fullmatch(text):
        msg = (
            'Idempotency-Key must be a text in double quotes, as in "8e03978e-40d5-43dd-bc93-'
            '6894a57f9324"; without them it may only have letters, digits and -._~:/+=, and begins '
            "with a letter or digit."
        )
        raise MalformedKey(msg)
    return text


def _quoted(text: str) -> str:
    string = _STRING.match(text)
    if string is None:
        msg = (
            "Idempotency-Key has no closing quote, or a character that may not stand in quotes: "
            'it takes printable ASCII, with \\ before each " and \\.'
        )
        raise MalformedKey(msg)
    _check_parameters(text, string.end())
    return _ESCAPED.sub(r"\1", string[1]) if "\\" in string[1] else string[1]


def _check_parameters(text: str, start: int) -> None:
    """Refuse what follows the key, unless it is `;name` or `;name=value` any number of times."""
    while start < len(text):
        parameter = _PARAMETER.match(text, start)
        if parameter is None or not _is_utf8(parameter["display"] or ""):
            msg = f"Idempotency-Key must end after the key, not go on with {text[start:][:20]!r}."
            raise MalformedKey(msg)
        start = parameter.end()


def _is_utf8(display: str) -> bool:
    try:
        unquote_to_bytes(display).decode()
    except UnicodeDecodeError:
        return False
    return True
