"""Redaction of secrets in texts that the service stores or returns.

A header, query parameter or JSON member is a secret if its name suggests so (`is_secret_name`).
Texts from a target are searched for the secrets of the task's request, which the target may have
echoed, and for values with a secret name, which are secrets of the target itself.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING
from urllib.parse import unquote_plus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tarry.service.model import TaskContent

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    r"(?<!un)auth(?!or(?!i[sz]))|cookie|token|secret|passw|passphrase|pwd|credential|signature|session|"
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
_SECRET_SEPARATOR = re.compile(r"[\s;,]+")
_USER_INFO = re.compile(r"(?<=://)[^/?#]+@")
# The quantifiers in the patterns below are possessive or bounded, so that the time to search a text
# from a target is proportional to its length.
_USER_INFO_IN_TEXT = re.compile(r"""(:\\{0,7}/\\{0,7}/)[^\s/?#"<>\\]+@""")
_ELEMENT = re.compile(r"<(?P<element>[\w.:-]{1,64}+)(?:\s[^<>]*+)?(?<!/)>")
"""The start tag of an XML element."""
_FORM_FIELD = re.compile(
    r"""form-data;[ \t]*+name="(?P<field>[^"\r\n]{1,64}+)"[^\r\n]*+\r?\n"""
    r"""(?:[^\r\n]++\r?\n){0,8}+\r?\n""",
    re.IGNORECASE,
)
"""The headers of a field in a body of multipart/form-data."""
_FORM_FIELD_END = re.compile(r"\r?\n--")
_VALUE_NAME = re.compile(
    r"""(?:(?P<quote>\\{0,7}["'])(?P<member>(?:[^"'\\]|\\{1,8}u[\da-fA-F]{4}){1,64})(?P=quote)"""
    r"""\s*+(?:=>|:)|(?<![\w.-])(?P<parameter>[\w.-]{1,64}+"""
    r"""(?:(?:\[|%5[Bb])[\w.-]{0,64}(?:\]|%5[Dd])){0,4})[ \t]*+(?:={1,3}>?|:(?!:)=?))\s*+"""
)
"""The name in `"name": value` (also in JSON that is a string in JSON), `name=value` or
`name: value`."""
_ESCAPE = re.compile(
    r"""\\++(?:u([\da-fA-F]{4})|u\{([\da-fA-F]{1,6})\}|x([\da-fA-F]{2}))?"""
    r"""|%(?:25){0,8}([\da-fA-F]{2})|&\#[xX]0{0,16}+([\da-fA-F]{1,6});|&\#0{0,16}+(\d{1,7});"""
    r"""|&(amp|apos|gt|lt|quot);"""
)
"""An escaped character in JSON, a URL (perhaps escaped several times), XML, HTML or source code, or
the backslashes before a character."""
_INCOMPLETE_ESCAPE = re.compile(
    r"(?:\\u?\{?[\da-fA-F]{0,6}|\\x[\da-fA-F]?|%(?:25){0,8}[\da-fA-F]?|&[\#\w]{0,24})\Z"
)
_MAX_ESCAPE_LENGTH = 26
_MAX_CODE_POINT = 0x10FFFF
_ENTITIES = {"amp": "&", "apos": "'", "gt": ">", "lt": "<", "quot": '"'}
_ESCAPED_CHAR = re.compile(r"\\+u([\da-fA-F]{4})")
_HEADER_VALUE = re.compile(r"""(?:[^\r\n"\\<>]|(?<==)"[^"\r\n]*")++""")
_BRACKET_OR_QUOTE = re.compile(r"""[\[({\])}]|\\{0,7}["']""")
_QUOTE = re.compile(r"""\\{0,7}["']""")
_UNQUOTED_VALUE = re.compile(
    r"""(?!(?:true|false|null)\b)(?:(?:Basic|Bearer)\s+)?[^\s"'\\&;,<>(){}\[\]]+"""
)
MIN_SECRET_LENGTH = 6
"""Shorter secrets are not redacted in texts, because other words could match them by chance."""
_MAX_SECRETS = 256
"""With more secrets, whole texts are redacted. A text is searched for each secret. With the 7,000
secrets that fit into the headers of a task, this took 21 ms for each attempt, and 0.6 s for a page
of tasks."""
_MAX_ENCODED = 64
"""How many secrets are also searched in base64 and hexadecimal digits: eight searches for each."""
_MAX_COMPILED = 16  # requests whose secrets are kept in the form in which they are searched


@lru_cache(4096)
def is_secret_name(name: str) -> bool:
    """Return whether the value of a header, parameter or JSON member of this name is a secret."""
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
    if not secrets:
        return text
    forms, plain_forms = _compile_forms(tuple(secrets))
    text = _replace_spans(text, _find_spans(_lower(text), forms, is_truncated=is_truncated))
    if _has_escapes(text):
        text = _redact_escaped(text, plain_forms, is_truncated=is_truncated)
    return text


def _has_escapes(text: str) -> bool:
    return "\\" in text or "%" in text or "&" in text


def _lower(text: str) -> str:
    """Return a text of the same length with ASCII letters in lower case."""
    if text.isascii():
        return text.lower()
    # `str.lower` changes the length of some texts, and `str.translate` takes 0.1 s for a megabyte.
    # Other characters may become equal, too, which is harmless.
    encoded = text.encode("utf-32-le", "surrogatepass").lower()
    return encoded.decode("utf-32-le", "surrogatepass")


# For all texts of a page, and for tasks with the same credentials. The cache is small, because the
# forms of one task may take a megabyte.
@lru_cache(_MAX_COMPILED)
def _compile_forms(secrets: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the forms of secrets to search for, and these forms without escapes."""
    forms = [form for secret in secrets[:_MAX_ENCODED] for form in _list_encoded_forms(secret)]
    forms += map(_lower, secrets[_MAX_ENCODED:])
    # Few secrets have escapes, and to search all forms for escapes would take 18 ms.
    plain_forms = [
        _lower(_ESCAPE.sub(_unescape_any, form)) if _has_escapes(form) else form for form in forms
    ]
    return forms, [form for form in plain_forms if len(form) >= MIN_SECRET_LENGTH]


def _list_encoded_forms(secret: str) -> tuple[str, ...]:
    """Return a secret as it is, in base64 and in hexadecimal digits, all in lower case.

    Within a longer text in base64, a secret has three forms: it may begin in each of three bytes.
    """
    data = secret.encode("utf-8", "surrogatepass")
    forms = {secret, data.hex()}
    for offset in range(3):
        encoded = b64encode(bytes(offset) + data).decode()
        # Without characters that also contain bits of other bytes.
        form = encoded[(8 * offset + 5) // 6 : 8 * (offset + len(data)) // 6]
        forms |= {form, form.replace("+", "-").replace("/", "_")}
    return tuple(_lower(form) for form in forms if len(form) >= MIN_SECRET_LENGTH)


def _find_spans(text: str, forms: Sequence[str], *, is_truncated: bool) -> list[tuple[int, int]]:
    """Return start and end of all secrets in a text in lower case."""
    spans: list[tuple[int, int]] = []
    for form in forms:
        start = text.find(form)
        while start >= 0:
            end = start + len(form)
            spans.append((start, end))
            start = text.find(form, end)
        if is_truncated and (start := _find_truncated(text, form)) >= 0:
            spans.append((start, len(text)))
    return spans


def _replace_spans(text: str, spans: list[tuple[int, int]]) -> str:
    """Return a text in which the spans, which may overlap, are redacted."""
    if not spans:
        return text
    parts: list[str] = []
    position = 0
    for start, end in sorted(spans):
        if start >= position:
            parts += (text[position:start], REDACTED)
        position = max(position, end)
    parts.append(text[position:])
    return "".join(parts)


def _find_truncated(text: str, secret: str) -> int:
    """Return the position of a beginning of the secret at the end of the text, or -1."""
    beginning = secret[:MIN_SECRET_LENGTH]
    position = text.find(beginning, max(0, len(text) - len(secret)))
    while position >= 0 and not secret.startswith(text[position:]):
        position = text.find(beginning, position + 1)
    return position


def _redact_escaped(text: str, plain_forms: Sequence[str], *, is_truncated: bool) -> str:
    r"""Redact secrets of which the target has escaped characters: `a\/b` or `a\u002fb` for `a/b`.

    Text and secrets are compared without escapes and without backslashes. So it does not matter how
    often a text was escaped, as in a JSON string within a JSON string.
    """
    complete = text
    if is_truncated and (
        match := _INCOMPLETE_ESCAPE.search(text, max(0, len(text) - _MAX_ESCAPE_LENGTH))
    ):
        complete = text[: match.start()]
    plain = _lower(_ESCAPE.sub(_unescape_any, complete))
    spans = _find_spans(plain, plain_forms, is_truncated=is_truncated)
    if not spans:  # most texts have no escaped secret, and need no places
        return text
    places = _find_places(complete)
    return _replace_spans(
        text,
        [
            (
                places[start][0],
                len(text) if end == len(plain) and is_truncated else places[end - 1][1],
            )
            for start, end in spans
        ],
    )


def _unescape_any(match: re.Match[str]) -> str:
    """Return the character of an `_ESCAPE`, or an empty string for a backslash."""
    *hex_codes, decimal_code, entity = match.groups()
    if code := next(filter(None, hex_codes), None):
        number = int(code, 16)
    elif decimal_code:
        number = int(decimal_code)
    else:
        return _ENTITIES.get(entity, "")
    char = chr(number) if number <= _MAX_CODE_POINT else ""
    return "" if char == "\\" else char


def _find_places(text: str) -> list[tuple[int, int]]:
    """Return start and end, in `text`, of each character that is left without escapes."""
    places: list[tuple[int, int]] = []
    end = 0
    for match in _ESCAPE.finditer(text):
        start = match.start()
        places += zip(range(end, start), range(end + 1, start + 1), strict=True)
        end = match.end()
        if _unescape_any(match):
            places.append((start, end))
    places += zip(range(end, len(text)), range(end + 1, len(text) + 1), strict=True)
    return places


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


def find_secrets(content: TaskContent | None, sent_secrets: Sequence[str] = ()) -> list[str] | None:
    """Return the secrets in a task's request; `sent_secrets`, those of its lane, come first.

    Returns None if they are unknown, because `content` is None, or too many.
    """
    if content is None:
        return None
    secrets: dict[str, None] = {}  # an ordered set
    for value in sent_secrets:
        secrets.update(dict.fromkeys(_list_header_secrets(value)))
    for name, value in content.headers.items():
        if is_secret_name(name):
            secrets.update(dict.fromkeys(_list_header_secrets(value)))
    if "?" in content.url:
        for _, name, value in _QUERY_PARAMETER.findall(content.url):
            if is_secret_name(unquote_plus(name)):
                values = value, unquote_plus(value)
                long_values = [each for each in values if len(each) >= MIN_SECRET_LENGTH]
                secrets.update(dict.fromkeys(long_values))
    if len(secrets) > _MAX_SECRETS:
        return None
    return list(secrets)


@lru_cache(128)  # most tasks of a tenant have the same credentials
def _list_header_secrets(value: str) -> tuple[str, ...]:
    """Return the secrets in a header value: the value and its parts, at most `_MAX_SECRETS` + 1."""
    secrets = {each for each in (value, *_split_secret(value)) if len(each) >= MIN_SECRET_LENGTH}
    return tuple(islice(secrets, _MAX_SECRETS + 1))


def _split_secret(value: str) -> Iterator[str]:
    """Yield the parts of a secret header that are secrets alone.

    `Bearer SECRET`, `Cookie: name=SECRET; other=SECRET`, `sha256=SECRET`, and user name and
    password of `Basic BASE64`.
    """
    for part in _SECRET_SEPARATOR.split(value):
        yield part
        yield part.partition("=")[2].strip('"')
    scheme, _, credentials = value.partition(" ")
    if scheme.lower() == "basic":
        with suppress(ValueError):  # not base64, or not UTF-8
            user_and_password = b64decode(credentials).decode()
            yield user_and_password
            yield user_and_password.partition(":")[2]


def redact_named_values(text: str) -> str:
    """Return a text from a target with the values that have a secret name redacted.

    These are secrets of the target itself: `"access_token": "..."`, `password=...`, `Cookie: ...`,
    `<token>...</token>`, and fields of multipart/form-data. Only the name determines whether a
    value is a secret, see `is_secret_name`. User name and password in a URL are redacted, too.
    """
    # Most texts have neither "@" nor a part of a secret name, and these checks take at most a tenth
    # of the time of the searches.
    if "@" in text:
        text = _USER_INFO_IN_TEXT.sub(rf"\1{REDACTED}@", text)
    lower_text = text.lower()
    # A generator expression instead of `map` would take up to 0.8 us more.
    if "\\u" not in text and not any(map(lower_text.__contains__, _SECRET_NAME_PARTS)):
        return text
    if "form-data" in lower_text:
        text = _redact_values(text, _FORM_FIELD)
    return _redact_values(_redact_values(text, _ELEMENT), _VALUE_NAME)


def _redact_values(text: str, name_pattern: re.Pattern[str]) -> str:
    """Redact the values after the secret names that `name_pattern` finds."""
    parts: list[str] = []
    position = 0
    for match in name_pattern.finditer(text):
        # A name that starts before `position` is inside a value that was redacted.
        if match.start() < position:
            continue
        name = _ESCAPED_CHAR.sub(_unescape, match[match.lastgroup or 0])
        if not is_secret_name(name) or text.startswith(REDACTED, match.end()):
            continue
        start = end = match.end()
        if name_pattern is _ELEMENT:
            end = text.find(f"</{name}", start)
            end = len(text) if end < 0 else end
        elif name_pattern is _FORM_FIELD:
            boundary = _FORM_FIELD_END.search(text, start)
            end = len(text) if boundary is None else boundary.start()
        elif (
            name.lower().endswith(("authorization", "cookie"))
            and match["parameter"]
            and ":" in match[0]
            and (header_value := _HEADER_VALUE.match(text, start))
        ):
            end = header_value.end()
        else:
            start, end = _find_value(text, start)
        if start < end:
            parts += (text[position:start], REDACTED)
            position = end
    parts.append(text[position:])
    return "".join(parts)


def _find_value(text: str, start: int) -> tuple[int, int]:
    """Return start and end of the value at `start`, without its quotes.

    They are equal if there is no value, or only an empty list or object.
    """
    if quote := _QUOTE.match(text, start):
        return quote.end(), _find_string_end(text, quote)
    if text.startswith(("[", "{", "("), start):
        end = _find_container_end(text, start)
        return start, end if text[start:end].strip("[](){} \r\n\t") else start
    value = _UNQUOTED_VALUE.match(text, start)
    return start, start if value is None else value.end()


def _find_string_end(text: str, quote: re.Match[str]) -> int:
    """Return the position of the quote that ends the string after `quote`."""
    end = text.find(quote[0], quote.end())
    while end > 0 and text[end - 1] == "\\":  # an escaped quote within the value
        end = text.find(quote[0], end + 1)
    return len(text) if end < 0 else end


def _find_container_end(text: str, start: int) -> int:
    """Return the position after the list or object at `start`."""
    depth, position = 0, start
    while found := _BRACKET_OR_QUOTE.search(text, position):
        position = found.end()
        if found[0] in "[({":
            depth += 1
        elif found[0] in "])}":
            depth -= 1
            if not depth:
                return position
        else:
            position = _find_string_end(text, found) + len(found[0])
    return len(text)


def _unescape(match: re.Match[str]) -> str:
    return chr(int(match[1], 16))


def _redact_parameter(match: re.Match[str]) -> str:
    separator, name, value = match.groups()
    redacted = REDACTED if value and is_secret_name(unquote_plus(name)) else value
    return f"{separator}{name}={redacted}"
