"""Secrets, wherever something is shown: the one place that says what is one and hides it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import unquote_plus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.model import TaskContent

REDACTED = "[redacted]"

_SECRET = re.compile(
    r"auth|cookie|token|secret|passw|passphrase|pwd|credential|signature|session|jwt|"
    r"api[-_.]?key|access[-_.]?key|private[-_.]?key|subscription-key|"
    r"(?:^|[-_.])(?:key|sig|sas|pin|otp)(?:$|[-_.])",
    re.IGNORECASE,
)
_ARGUMENT = re.compile(r"([?&;])([^=&;#]*)=([^&;#]*)")
_SHORTEST = 6
"""Characters of a secret that is looked for in other texts: a shorter one is found by chance."""


@lru_cache(4096)
def is_secret(name: str) -> bool:
    """Say whether what goes by this name is not for everybody's eyes."""
    return _SECRET.search(name) is not None


def headers(given: dict[str, str]) -> dict[str, str]:
    """Return headers without their secrets."""
    return {name: REDACTED if is_secret(name) else value for name, value in given.items()}


def url(given: str) -> str:
    """Return a URL without the secrets in its query."""
    if "?" not in given:
        return given
    path, mark, query = given.partition("?")
    return path + _ARGUMENT.sub(_hidden, mark + query)


def text(given: str | None, secrets: Sequence[str] | None, *, cut: bool = False) -> str | None:
    """Return a text that a target wrote without the secrets that it was sent.

    Where nobody knows them (None), any word may be one. One that was cut may end within a secret.
    """
    if not given:
        return given
    if secrets is None:
        return REDACTED
    for secret in secrets:
        given = given.replace(secret, REDACTED)
    return _without_beginning(given, secrets) if cut else given


def body(given: bytes, secrets: Sequence[str] | None, *, cut: bool = False) -> bytes:
    """Return bytes that a target wrote, as `text` does."""
    shown = text(given.decode("latin-1"), secrets and [_as_bytes(one) for one in secrets], cut=cut)
    return (shown or "").encode("latin-1")


def secrets_of(content: TaskContent | None) -> list[str] | None:
    """Return the secrets that a task sends, the longest first; None: its content is not known."""
    if content is None:
        return None
    found = {value for name, value in content.headers.items() if is_secret(name)}
    for whole in tuple(found):
        found.update(whole.split())  # Bearer SECRET
    for _, name, value in _ARGUMENT.findall(content.url):
        if is_secret(unquote_plus(name)):
            found.update((value, unquote_plus(value)))
    return sorted((one for one in found if len(one) >= _SHORTEST), key=len, reverse=True)


def _without_beginning(given: str, secrets: Sequence[str]) -> str:
    """Hide the beginning of a secret at the end of a text."""
    for secret in secrets:
        for length in range(min(len(secret), len(given)), _SHORTEST - 1, -1):
            if given.endswith(secret[:length]):
                return given[:-length] + REDACTED
    return given


def _as_bytes(secret: str) -> str:
    """Return a secret as it stands in bytes that are read as Latin-1."""
    return secret.encode("utf-8", "surrogatepass").decode("latin-1")


def _hidden(argument: re.Match[str]) -> str:
    mark, name, value = argument.groups()
    shown = REDACTED if value and is_secret(unquote_plus(name)) else value
    return f"{mark}{name}={shown}"
