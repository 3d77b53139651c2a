"""Redaction of secrets in everything that the API returns, and the definition of a secret."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import unquote_plus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.model import TaskContent

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    r"auth|cookie|token|secret|passw|passphrase|pwd|credential|signature|session|jwt|"
    r"api[-_.]?key|access[-_.]?key|private[-_.]?key|subscription-key|"
    r"(?:^|[-_.])(?:key|sig|sas|pin|otp)(?:$|[-_.])",
    re.IGNORECASE,
)
_QUERY_PARAMETER = re.compile(r"([?&;])([^=&;#]*)=([^&;#]*)")
_MIN_SECRET_LENGTH = 6
"""Shorter secrets are not searched for in texts, where they would be found by chance."""


@lru_cache(4096)
def is_secret(name: str) -> bool:
    """Return whether the value of a header or query parameter of this name is a secret."""
    return _SECRET_NAME.search(name) is not None


def redact_headers(headers: dict[str, str]) -> dict[str, str]:
    """Return headers with their secret values redacted."""
    return {name: REDACTED if is_secret(name) else value for name, value in headers.items()}


def redact_url(url: str) -> str:
    """Return a URL with the secret values of its query redacted."""
    if "?" not in url:
        return url
    path, mark, query = url.partition("?")
    return path + _QUERY_PARAMETER.sub(_redact_parameter, mark + query)


def redact_text(
    text: str | None, secrets: Sequence[str] | None, *, is_truncated: bool = False
) -> str | None:
    """Return a text that the target sent, without the secrets that the task sent to the target.

    If the secrets are unknown (None), the whole text is redacted. A truncated text may end with
    the beginning of a secret, which is redacted too.
    """
    if not text:
        return text
    if secrets is None:
        return REDACTED
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return _redact_partial_secret(text, secrets) if is_truncated else text


def redact_bytes(
    data: bytes, secrets: Sequence[str] | None, *, is_truncated: bool = False
) -> bytes:
    """Do the same as `redact_text` for bytes that the target sent."""
    latin1_secrets = secrets and [_utf8_as_latin1(secret) for secret in secrets]
    redacted = redact_text(data.decode("latin-1"), latin1_secrets, is_truncated=is_truncated)
    return (redacted or "").encode("latin-1")


def find_secrets(content: TaskContent | None) -> list[str] | None:
    """Return the secrets that a task sends, the longest first; None if its content is unknown."""
    if content is None:
        return None
    found = {value for name, value in content.headers.items() if is_secret(name)}
    for value in tuple(found):
        found.update(value.split())  # "Bearer SECRET": also SECRET alone
    for _, name, value in _QUERY_PARAMETER.findall(content.url):
        if is_secret(unquote_plus(name)):
            found.update((value, unquote_plus(value)))
    long_enough = (secret for secret in found if len(secret) >= _MIN_SECRET_LENGTH)
    return sorted(long_enough, key=len, reverse=True)


def _redact_partial_secret(text: str, secrets: Sequence[str]) -> str:
    """Redact the beginning of a secret at the end of a text."""
    for secret in secrets:
        for length in range(min(len(secret), len(text)), _MIN_SECRET_LENGTH - 1, -1):
            if text.endswith(secret[:length]):
                return text[:-length] + REDACTED
    return text


def _utf8_as_latin1(secret: str) -> str:
    """Return a secret as it looks in UTF-8 bytes that are decoded as Latin-1."""
    return secret.encode("utf-8", "surrogatepass").decode("latin-1")


def _redact_parameter(match: re.Match[str]) -> str:
    mark, name, value = match.groups()
    shown = REDACTED if value and is_secret(unquote_plus(name)) else value
    return f"{mark}{name}={shown}"
