"""Redaction of secrets in what the service stores, shows and reports.

A header, query parameter or JSON member is a secret if its name suggests so (`is_secret_name`).
Texts of a target are searched for the secrets of the task's request, which the target may have
returned, and for named secrets of the target itself.
"""

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
    r"auth(?!or(?!i[sz]))|cookie|token|secret|passw|passphrase|pwd|credential|signature|session|"
    r"jwt|api[-_.]?key|access[-_.]?key|private[-_.]?key|subscription-key|"
    r"(?:^|[-_.])(?:key|sig|sas|pin|otp)(?:$|[-_.])",
    re.IGNORECASE,
)
_SECRET_NAME_PARTS = (
    "auth", "cookie", "token", "secret", "pass", "pwd", "credential", "sig", "session", "jwt",
    "key", "sas", "pin", "otp",
)  # fmt: skip
"""Every name that `_SECRET_NAME` matches contains one of these."""
_QUERY_PARAMETER = re.compile(r"([?&;])([^=&;#]*)=([^&;#]*)")
_USER_INFO = re.compile(r"(?<=://)[^/?#]+@")
_VALUE_NAME = re.compile(
    r"""(?:(?P<quote>\\{0,7}["'])(?P<member>[^"'\\]{1,64})(?P=quote)\s*:"""
    r"""|(?<![\w.-])(?P<parameter>[\w.-]{1,64})=)\s*"""
)
"""The name of a JSON member, also in JSON that is a string of JSON, or of `name=value`."""
_QUOTE = re.compile(r"""\\{0,7}["']""")
_UNQUOTED_VALUE = re.compile(
    r"""(?!(?:true|false|null)\b)(?:(?:Basic|Bearer)\s+)?[^\s"'\\&;,<>(){}\[\]]+"""
)
_MIN_SECRET_LENGTH = 6
"""Shorter secrets are not redacted in texts, because other words could match them by chance."""


@lru_cache(4096)
def is_secret_name(name: str) -> bool:
    """Return whether the value of a header or query parameter of this name is a secret."""
    return _SECRET_NAME.search(name) is not None


def redact_headers(headers: dict[str, str]) -> dict[str, str]:
    """Return headers with their secret values redacted."""
    return {name: REDACTED if is_secret_name(name) else value for name, value in headers.items()}


def redact_url(url: str) -> str:
    """Return a URL with the secret values of its query parameters redacted."""
    if "?" not in url:
        return url
    path, separator, query = url.partition("?")
    return path + _QUERY_PARAMETER.sub(_redact_parameter, separator + query)


def redact_user_info(url: str) -> str:
    """Return a URL with the user name and the password before its host redacted."""
    return _USER_INFO.sub(f"{REDACTED}@", url)


def redact_text(text: str, secrets: Sequence[str] | None, *, is_truncated: bool = False) -> str:
    """Return a text that the target sent, with the `secrets` of the task's request redacted.

    If the secrets are unknown (None), the whole text is redacted. A truncated text may end with
    the beginning of a secret. This beginning is redacted, too.
    """
    if not text:
        return text
    if secrets is None:
        return REDACTED
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    if is_truncated:
        for secret in secrets:
            beginning = secret[:_MIN_SECRET_LENGTH]
            position = text.find(beginning, max(0, len(text) - len(secret)))
            while position >= 0:
                if secret.startswith(text[position:]):
                    return text[:position] + REDACTED
                position = text.find(beginning, position + 1)
    return text


def redact_bytes(
    data: bytes, secrets: Sequence[str] | None, *, is_truncated: bool = False
) -> bytes:
    """Return bytes that the target sent, redacted as `redact_text` redacts a text."""
    # Latin-1 maps each byte to a character, so `redact_text` finds the UTF-8 bytes of secrets.
    latin1_secrets = secrets and [
        secret.encode("utf-8", "surrogatepass").decode("latin-1") for secret in secrets
    ]
    text = data.decode("latin-1")
    return redact_text(text, latin1_secrets, is_truncated=is_truncated).encode("latin-1")


def find_secrets(content: TaskContent | None) -> list[str] | None:
    """Return the secrets in a task's request, the longest first; None if `content` is None."""
    if content is None:
        return None
    secrets = {value for name, value in content.headers.items() if is_secret_name(name)}
    for value in tuple(secrets):
        secrets.update(value.split())  # "Bearer SECRET": also SECRET alone
    for _, name, value in _QUERY_PARAMETER.findall(content.url):
        if is_secret_name(unquote_plus(name)):
            secrets.update((value, unquote_plus(value)))
    long_secrets = (secret for secret in secrets if len(secret) >= _MIN_SECRET_LENGTH)
    return sorted(long_secrets, key=len, reverse=True)


def redact_named_values(text: str) -> str:
    """Return a text of the target with the values of secret JSON members and parameters redacted.

    These are secrets of the target itself: `"access_token": "..."`, `password=...`. The name of a
    value decides whether the value is a secret, see `is_secret_name`.
    """
    lower_text = text.lower()
    # Most texts have no such name, and this check takes a tenth of the time of the search below.
    if not any(part in lower_text for part in _SECRET_NAME_PARTS):
        return text
    parts: list[str] = []
    position = 0
    for name in _VALUE_NAME.finditer(text):
        # A name that starts before `position` is inside a value that was redacted.
        if name.start() < position or not is_secret_name(name["member"] or name["parameter"]):
            continue
        start, end = _find_value(text, name.end())
        if start < end:
            parts += (text[position:start], REDACTED)
            position = end
    parts.append(text[position:])
    return "".join(parts)


def _find_value(text: str, start: int) -> tuple[int, int]:
    """Return start and end of the value at `start`, without quotes; objects and lists are empty."""
    quote_match = _QUOTE.match(text, start)
    if quote_match is None:
        value = _UNQUOTED_VALUE.match(text, start)
        return start, start if value is None else value.end()
    quote, start = quote_match[0], quote_match.end()
    end = text.find(quote, start)
    while end > 0 and text[end - 1] == "\\":  # a quote within the value
        end = text.find(quote, end + 1)
    return start, len(text) if end < 0 else end


def _redact_parameter(match: re.Match[str]) -> str:
    separator, name, value = match.groups()
    redacted = REDACTED if value and is_secret_name(unquote_plus(name)) else value
    return f"{separator}{name}={redacted}"
