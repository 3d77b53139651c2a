"""What the middleware reads from a request: the `Idempotency-Key`, the caller and the content.

The draft (draft-ietf-httpapi-idempotency-key-header) defines the value as a String of RFC 9651: in
double quotes, followed by optional parameters, which have no meaning here. Many clients send the
key without quotes. Therefore a value that does not begin with a quote is the key itself: `order-7`
and `"order-7"` are the same key. Without quotes a key must not have quotes, commas or brackets:
these are values that a proxy joined from two headers, or whose first quote is missing. A malformed
value raises `MalformedKey`. It must not be ignored, because a client that sends a key relies on it.

A request with a key whose caller cannot be distinguished from other callers raises `UnknownCaller`:
one caller could otherwise get the stored response of another.

The name of a record in the store is a digest of the request's host, method, path, caller and key,
so equal keys of different callers have different records. Stores get this name as `key`.
The fingerprint is a digest that also covers the content (query, content type and body), because a
key must not be used again for different content.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from hashlib import sha256
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote, unquote_to_bytes

from tarry.errors import ConfigurationTypeError
from tarry.wire.http import Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

logger: logging.Logger = logging.getLogger("tarry.idempotency")

Identity: TypeAlias = Callable[[Scope], str]
"""A function of the user that returns a string which identifies the caller."""
RequestHeaders: TypeAlias = Mapping[bytes, list[bytes]]
"""The headers that the middleware reads: the values of all header lines, by lower-case name."""

MAX_KEY_LENGTH = 255

_COMMON_KEY = re.compile(rb'"?([A-Za-z0-9][A-Za-z0-9._~:/+=-]{0,254})"?')
"""Fast path: nearly all keys match this, quoted or not, and need no further parsing."""
_QUOTES_COMMAS_BRACKETS = re.compile(r"""[",()\[\]{}]""")
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

KEY_HEADER = b"idempotency-key"
_RELEVANT_HEADERS = frozenset(
    {
        KEY_HEADER,
        b"authorization",
        b"cookie",
        b"x-api-key",
        b"host",
        b"content-type",
        b"content-length",
    }
)
_NO_VALUES: list[bytes] = []
_STABLE_SCHEMES = frozenset({b"basic", b"bearer", b"token", b"apikey", b"dpop", b"jwt"})
"""Authorization schemes whose credentials stay the same in a retry. Other schemes may sign each
request, so that their value differs in a retry."""
_SCHEMES = _STABLE_SCHEMES | {
    b"concealed", b"digest", b"gnap", b"hoba", b"mutual", b"negotiate", b"ntlm", b"oauth",
    b"privatetoken", b"scram-sha-1", b"scram-sha-256", b"signature", b"vapid",
}  # fmt: skip
"""Names of schemes. A value that is only such a name is not a token."""
_TOKEN = re.compile(rb"[!-~]+")


class MalformedKey(Exception):
    """The header is malformed. The message is a sentence for the client."""


class UnknownCaller(Exception):
    """The caller cannot be distinguished from others. The message is for client and operator."""


def parse_key(lines: Sequence[bytes]) -> str:
    """Return the key, given the values of all `Idempotency-Key` lines of a request."""
    if len(lines) != 1:
        raise MalformedKey(f"Idempotency-Key must be sent once, not {len(lines)} times.")
    line = lines[0]
    common = _COMMON_KEY.fullmatch(line)
    if common is not None and len(line) - len(common[1]) != 1:  # two quotes or none
        return common[1].decode()
    text = line.decode("latin-1").strip(" ")
    if text.startswith('"') and text.isascii():
        key = _parse_quoted(text)
    elif text.isascii() and text.isprintable():
        key = text
        if found := _QUOTES_COMMAS_BRACKETS.search(text):
            raise MalformedKey(
                f"Idempotency-Key: a key without quotes must not have {found[0]!r}. If two headers "
                "were joined, send only one; otherwise send the key in double quotes."
            )
    else:
        raise MalformedKey("Idempotency-Key must be visible ASCII characters and spaces.")
    if not 1 <= len(key) <= MAX_KEY_LENGTH:
        raise MalformedKey(
            f"Idempotency-Key must have 1 to {MAX_KEY_LENGTH} characters, not {len(key)}."
        )
    return key


def _parse_quoted(text: str) -> str:
    string = _STRING.match(text)
    if string is None:
        raise MalformedKey(
            "Idempotency-Key has no closing quote, or a character that is not allowed in quotes. "
            'Allowed is printable ASCII, with \\ before each " and \\.'
        )
    start = string.end()
    while start < len(text):  # only parameters (`;name` or `;name=value`) may follow the key
        parameter = _PARAMETER.match(text, start)
        if parameter is None or not _is_utf8(parameter["display"] or ""):
            rest = text[start:][:20]
            raise MalformedKey(
                f"Idempotency-Key: only parameters may follow the key, but {rest!r} follows."
            )
        start = parameter.end()
    return _ESCAPED.sub(r"\1", string[1]) if "\\" in string[1] else string[1]


def _is_utf8(display_string: str) -> bool:
    """Return whether the percent-encoded bytes of a Display String are valid UTF-8."""
    try:
        unquote_to_bytes(display_string).decode()
    except UnicodeDecodeError:
        return False
    return True


def relevant_headers(scope: Scope) -> RequestHeaders:
    """Return the headers that the middleware reads."""
    headers: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        if name in _RELEVANT_HEADERS:
            headers.setdefault(name, []).append(value)
    return headers


def caller_credentials(headers: RequestHeaders) -> str:
    """Return the credentials that identify the caller, or raise UnknownCaller.

    They are empty for a request without credentials. Stores only get a digest of them.
    """
    credentials = [value for value in headers.get(b"x-api-key", _NO_VALUES) if value]
    for value in headers.get(b"authorization", _NO_VALUES):
        if not value:
            continue
        if not _is_stable(value):
            raise UnknownCaller(_rejection_text("The Authorization header"))
        credentials.append(value)
    if not credentials and any(headers.get(b"cookie", _NO_VALUES)):
        raise UnknownCaller(_rejection_text("A cookie"))
    return b"\n".join(credentials).decode("latin-1")


def _is_stable(authorization: bytes) -> bool:
    """Return whether an Authorization value identifies its caller, also in a retry."""
    scheme, _, credentials = authorization.partition(b" ")
    if credentials.strip():
        return scheme.lower() in _STABLE_SCHEMES
    # A value of one word is a token without a scheme.
    return _TOKEN.fullmatch(scheme) is not None and scheme.lower() not in _SCHEMES


def _rejection_text(header: str) -> str:
    _log_unknown_caller(header)
    return (
        f"{header} of this request does not identify its caller, so the key cannot be kept apart "
        "from the same key of another caller. Callers are identified by X-API-Key, by "
        "Authorization with Basic, Bearer, Token, ApiKey, DPoP or JWT, or by a token without a "
        "scheme. The server can identify them in another way with the argument identity= of "
        "IdempotencyMiddleware: a function that returns the caller."
    )


@cache  # once per process, because clients could fill the log with such requests
def _log_unknown_caller(header: str) -> None:
    logger.error(
        "request with Idempotency-Key rejected, because its caller is not known: %s does not "
        "identify it; pass a function that returns the caller as `identity`",
        header,
    )


def check_caller(caller: Any) -> str:
    """Return the result of the user's `identity` function; raise if it is not a string."""
    if not isinstance(caller, str):
        if hasattr(caller, "cr_code"):
            caller.close()  # avoids the warning that the coroutine was never awaited
        rule = "must return a string that identifies the caller"
        raise ConfigurationTypeError("identity", rule, caller)
    return caller


def record_name_and_fingerprint(
    scope: Scope, headers: RequestHeaders, caller: str, key: str, body: bytes
) -> tuple[str, str]:
    """Return the name of the record and the fingerprint of the request.

    Both are digests, so that the store contains neither keys nor credentials, and no name is too
    long for the store. The fingerprint also covers the name, so that the content cannot be guessed
    from the fingerprint without the key.
    """
    path = external_and_internal_path(scope)[0] if scope.get("root_path") else scope["path"]
    host = _host_with_length(headers[b"host"][0]) if b"host" in headers else ""
    # Different combinations of host, path, method, caller and key never give the same text. It has
    # the lengths of path and host. If the host is left out, the first slash of the path shows that.
    # A method has no spaces, and a key has no line breaks.
    text = f"{len(path)} {host}{path}{scope['method']} {caller}\n{key}"
    digest = sha256(text.encode("utf-8", "surrogatepass"))
    name = digest.hexdigest()
    content_type = b",".join(headers.get(b"content-type", _NO_VALUES))
    # Here line breaks suffice as separators: neither a query nor a header contains one.
    digest.update(b"\n".join((scope.get("query_string", b""), content_type, body)))
    return name, digest.hexdigest()


@lru_cache(maxsize=100)
def _host_with_length(host: bytes) -> str:
    """Return the length of the host name and the name, or "" for an IP address.

    An IP address is left out because it identifies one of several servers, not the API: a retry may
    reach another server.
    """
    name = host.decode("latin-1").lower().partition(":")[0]
    try:
        if not name.startswith("["):
            ip_address(name)
    except ValueError:
        return f"{len(name)} {name}"
    return ""


def external_and_internal_path(scope: Scope) -> tuple[str, str]:
    """Return the path that the client sees, and the path within the application.

    Frameworks differ in whether `path` starts with the mount point (`root_path`).
    """
    root: str = scope.get("root_path", "").rstrip("/")
    path: str = scope["path"]
    if not root:
        return path, path
    if path == root or path.startswith(f"{root}/"):
        return path, path[len(root) :] or "/"
    return root + path, path


def instance_of(scope: Scope) -> str:
    """Return the `instance` of a problem (RFC 9457): the path of the request."""
    return quote(external_and_internal_path(scope)[0], errors="surrogatepass")
