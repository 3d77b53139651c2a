"""The `RateLimit` field (draft-ietf-httpapi-ratelimit-headers): the quotas that are used up.

Rules of this module:

* One pure function of a string, in time that is linear in its length.
* The grammar of structured fields is kept to the letter. A malformed field says nothing; it never
  raises.
"""

from __future__ import annotations

import re

# Structured fields (RFC 9651 section 4.2): a List of Strings with parameters. At each place one
# character decides how to go on, so that the time is linear in the length. (Possessive quantifiers
# would say so, but are faulty in Python 3.11: python/cpython issues 101955 and 106052.) They are
# compiled on first use, not on import.
_STRING = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
_BARE_ITEM = (
    r"(?:-?[0-9]{1,12}\.[0-9]{1,3}|@?-?[0-9]{1,15}"  # Decimal; Integer and Date
    rf"|{_STRING}|:[A-Za-z0-9+/=]*:|\?[01]"  # String; Byte Sequence; Boolean
    r'|%"(?:[ !#$&-~]|%[0-9a-f]{2})*"'  # Display String
    r"|[A-Za-z*][!#$%&'*+.^_`|~0-9A-Za-z:/-]*)"  # Token
)
_PARAMETER = rf";\x20*([a-z*][a-z0-9_.*-]*)(?:=({_BARE_ITEM}))?"
_MEMBER = rf"{_STRING}((?:{_PARAMETER})*)"
_LIST = rf"{_MEMBER}(?:[ \t]*,[ \t]*{_MEMBER})*"


def resets_of(text: str) -> list[float]:
    """Return the `t` of each exhausted quota of a `RateLimit`; nothing when it is malformed.

    Only an exhausted quota asks for a wait: r > 0 promises nothing, but forbids nothing either.
    """
    if not re.fullmatch(_LIST, text):
        return []
    resets: list[float] = []
    for member in re.finditer(_MEMBER, text):
        # The last of two equal parameters wins (RFC 9651 section 4.2.3.2).
        given = {found[1]: found[2] for found in re.finditer(_PARAMETER, member[1])}
        remaining, reset = given.get("r"), given.get("t", "0")
        # An Integer is all digits here: every other type has a point, a quote or a letter.
        if not (remaining and remaining.isdigit() and reset and reset.isdigit()):
            return []
        if "t" in given and int(remaining) == 0:
            resets.append(float(reset))
    return resets
