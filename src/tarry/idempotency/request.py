"""The request's side: which requests need a key, what a key belongs to, what was asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from hashlib import sha256
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, TypeAlias

from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr
from tarry.idempotency.problems import too_large
from tarry.runtime.callables import plain_function
from tarry.wire.asgi import Scope

if TYPE_CHECKING:
    from tarry.wire.asgi import Receive

logger: logging.Logger = logging.getLogger("tarry.idempotency")

Routes: TypeAlias = Iterable[str] | Callable[[Scope], bool]
Identity: TypeAlias = Callable[[Scope], str]
Fields: TypeAlias = Mapping[bytes, list[bytes]]
"""The header fields that matter here, with the values of all their lines."""

KEY = b"idempotency-key"
_NAMES = frozenset(
    {KEY, b"authorization", b"x-api-key", b"host", b"content-type", b"content-length"}
)
_NONE: list[bytes] = []
_LASTING = frozenset({b"basic", b"bearer", b"token", b"apikey", b"dpop"})
"""Schemes whose credentials are the same in a retry. Others sign each request."""


class Disconnected(Exception):
    """The client went away before its request had arrived."""


def fields_of(scope: Scope) -> Fields:
    """Return the header fields that matter, in one go."""
    fields: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        if name in _NAMES:
            if name in fields:
                fields[name].append(value)
            else:
                fields[name] = [value]
    return fields


def credentials(fields: Fields) -> str:
    """Return who sent the request, as far as its credentials tell; `digests` hides them."""
    callers = fields.get(b"x-api-key", _NONE)
    for value in fields.get(b"authorization", _NONE):
        if value.partition(b" ")[0].lower() in _LASTING:
            callers = [*callers, value]
        else:
            warn_of_signatures()
    return b"\n".join(callers).decode("latin-1")


@cache  # once: clients choose what they send
def warn_of_signatures() -> None:
    """Say that callers are not told apart."""
    logger.warning(
        "a request's Authorization is neither Basic, Bearer, Token, ApiKey nor DPoP, and may "
        "differ in each attempt, so it does not tell callers apart: pass identity= a function that "
        "returns who calls"
    )


def told(identity: Any) -> str:
    """Return what an `identity` function has returned, if that is a text."""
    if not isinstance(identity, str):
        if hasattr(identity, "cr_code"):
            identity.close()  # or Python warns that it was never awaited
        raise ConfigurationTypeError("identity", "must return a text that says who calls", identity)
    return identity


def digests(scope: Scope, fields: Fields, identity: str, key: str, body: bytes) -> tuple[str, str]:
    """Return the name of a record, and the fingerprint of what was asked for.

    The name is the key within its host, method, path and caller. Digests, so that neither keys nor
    callers lie around in a store, and none is too long for one. The fingerprint goes on where the
    name ends: who does not know the key cannot try out what the body may have been.
    """
    path = _paths(scope)[0] if scope.get("root_path") else scope["path"]
    host = _host_of(fields[b"host"][0]) if b"host" in fields else ""
    # No two lists of parts give the same: a path begins with a slash, a method has no spaces, and a
    # key no line breaks.
    text = f"{len(path)} {host}{path}{scope['method']} {identity}\n{key}"
    digest = sha256(text.encode("utf-8", "surrogatepass"))
    named = digest.hexdigest()
    kind = b",".join(fields.get(b"content-type", _NONE))
    # Nor do these: neither a query nor a header has line breaks.
    digest.update(b"\n".join((scope.get("query_string", b""), kind, body)))
    return named, digest.hexdigest()


@lru_cache(maxsize=100)
def _host_of(host: bytes) -> str:
    """Return the name that was asked for; an address only says which process of many it was."""
    name = host.decode("latin-1").lower()
    if name.startswith("["):
        return ""
    name = name.partition(":")[0]
    try:
        ip_address(name)
    except ValueError:
        return f"{len(name)} {name}"
    return ""


def needs_key(required: Routes) -> Callable[[Scope], bool]:
    """Return the question whether a request must carry a key."""
    if callable(required):
        plain_function("required", required)
        return required
    if isinstance(required, (str, bytes)) or not hasattr(required, "__iter__"):
        raise ConfigurationTypeError("required", "must be a list of paths or a function", required)
    exact: set[str] = set()
    below: list[str] = []
    for path in required:
        prefix, star = _checked(path)
        if star:
            below.append(prefix)
        else:
            exact.add(prefix.rstrip("/"))
    prefixes = tuple(below)

    def asked(scope: Scope) -> bool:
        path = _paths(scope)[1]
        return path.rstrip("/") in exact or path.startswith(prefixes)

    return asked


def _checked(path: object) -> tuple[str, str]:
    """Return a path without its star, and the star."""
    if not isinstance(path, str):
        rule = f"must be a list of paths, got {short_repr(path)} in it"
        raise ConfigurationTypeError("required", rule)
    prefix, star, rest = path.partition("*")
    if not path.startswith("/") or rest or (star and not prefix.endswith("/")):
        msg = f'required has paths such as "/payments" or "/payments/*", got {short_repr(path)}'
        raise ConfigurationError(msg)
    if "{" in path or "<" in path:
        msg = (
            f"required has plain paths and no parameters, got {short_repr(path)}: take all below, "
            '"/payments/*", or a function of the scope'
        )
        raise ConfigurationError(msg)
    return prefix, star


async def read_body(fields: Fields, receive: Receive, limit: int) -> bytes:
    """Return the whole body, or refuse one that is longer than `limit`."""
    for length in fields.get(b"content-length", _NONE):
        if length.isdigit() and float(length) > limit:  # int refuses more than 4,300 digits
            raise too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        if not message.get("more_body"):
            return b"".join([*chunks, chunk]) if chunks else chunk
        chunks.append(chunk)


def _paths(scope: Scope) -> tuple[str, str]:
    """Return the path that the client sees, and the path within the application.

    Frameworks differ in whether `path` has the mount point (`root_path`) in front.
    """
    root: str = scope.get("root_path", "").rstrip("/")
    path: str = scope["path"]
    if not root:
        return path, path
    if path == root or path.startswith(f"{root}/"):
        return path, path[len(root) :] or "/"
    return root + path, path
