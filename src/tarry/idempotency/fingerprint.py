"""The identity of a request: the name of its record in the store, and its fingerprint.

The record's name is a digest of the key with its host, method, path and caller, so equal keys of
different callers have different records. Stores call this name `key`. The fingerprint is a digest
of the content, because a key must not be used again for different content.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from hashlib import sha256
from ipaddress import ip_address
from typing import Any, TypeAlias

from tarry.errors import ConfigurationTypeError
from tarry.wire.http import Scope

logger: logging.Logger = logging.getLogger("tarry.idempotency")

Identity: TypeAlias = Callable[[Scope], str]
"""A function that returns a string which identifies the caller."""
RequestHeaders: TypeAlias = Mapping[bytes, list[bytes]]
"""The headers that the middleware reads: lower-case name to the values of all its lines."""

KEY_HEADER = b"idempotency-key"
_RELEVANT_HEADERS = frozenset(
    {KEY_HEADER, b"authorization", b"x-api-key", b"host", b"content-type", b"content-length"}
)
_NO_VALUES: list[bytes] = []
_STABLE_SCHEMES = frozenset({b"basic", b"bearer", b"token", b"apikey", b"dpop"})
"""Authorization schemes whose credentials stay the same in a retry. Other schemes may sign each
request, so that their value differs in a retry."""


def relevant_headers(scope: Scope) -> RequestHeaders:
    """Return the headers that the middleware reads, collected in one pass."""
    headers: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        if name in _RELEVANT_HEADERS:
            if name in headers:
                headers[name].append(value)
            else:
                headers[name] = [value]
    return headers


def caller_credentials(headers: RequestHeaders) -> str:
    """Return the credentials that identify the caller. They are only ever stored as a digest."""
    credentials = headers.get(b"x-api-key", _NO_VALUES)
    for value in headers.get(b"authorization", _NO_VALUES):
        if value.partition(b" ")[0].lower() in _STABLE_SCHEMES:
            credentials = [*credentials, value]
        else:
            warn_of_unstable_credentials()
    return b"\n".join(credentials).decode("latin-1")


@cache  # once per process, because clients could fill the log with such requests
def warn_of_unstable_credentials() -> None:
    """Log that the Authorization header of a request does not identify its caller."""
    logger.warning(
        "Authorization header ignored as caller identity: its scheme is not Basic, Bearer, Token, "
        "ApiKey or DPoP, so its value may differ in each attempt; pass identity= a function that "
        "returns the caller"
    )


def check_identity(identity: Any) -> str:
    """Return the result of the user's `identity` function; raise if it is not a string."""
    if not isinstance(identity, str):
        if hasattr(identity, "cr_code"):
            identity.close()  # avoids the warning that the coroutine was never awaited
        rule = "must return a string that identifies the caller"
        raise ConfigurationTypeError("identity", rule, identity)
    return identity


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
    # Two different requests never give the same text, because the length of the path is part of
    # it, a path begins with a slash, a method has no spaces and a key has no line breaks.
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
    name = host.decode("latin-1").lower()
    if name.startswith("["):
        return ""
    name = name.partition(":")[0]
    try:
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
