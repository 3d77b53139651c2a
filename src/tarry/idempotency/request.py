"""The request's side: which requests need a key, what a key belongs to, what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, TypeAlias

from tarry.core.checks import shown
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.idempotency.problems import too_large
from tarry.wire.asgi import Scope

if TYPE_CHECKING:
    from tarry.wire.asgi import Message, Receive

Routes: TypeAlias = Iterable[str] | Callable[[Scope], bool]
Identity: TypeAlias = Callable[[Scope], str]


class Disconnected(Exception):
    """The client went away before its request had arrived."""


def lines_of(scope: Scope, name: bytes) -> list[bytes]:
    """Return the values of all lines of a header field."""
    return [value for field, value in scope["headers"] if field == name]


def caller_of(scope: Scope) -> str:
    """Return who sent the request, as far as its credentials tell; `record_key` hides them."""
    return b"\n".join(lines_of(scope, b"authorization")).decode("latin-1")


def record_key(scope: Scope, identity: str, key: str) -> str:
    """Return the name of a record: the key within its method, its path and its caller.

    A digest, so that neither keys nor callers lie around in a store, and none is too long for one.
    """
    return _digest(
        scope["method"].encode(), _encoded(_paths(scope)[0]), _encoded(identity), key.encode()
    )


def fingerprint(scope: Scope, body: bytes) -> str:
    """Return a digest of all that was asked for."""
    return _digest(
        scope["method"].encode(),
        _encoded(_paths(scope)[0]),
        scope.get("query_string", b""),
        b",".join(lines_of(scope, b"content-type")),
        body,
    )


def needs_key(required: Routes) -> Callable[[Scope], bool]:
    """Return the question whether a request must carry a key."""
    if callable(required):
        return required
    if isinstance(required, (str, bytes)):
        msg = f"required must be a list of paths or a function, got {shown(required)}"
        raise ConfigurationTypeError(msg)
    exact: set[str] = set()
    below: list[str] = []
    for path in required:
        prefix, star, rest = path.partition("*")
        if not path.startswith("/") or rest or (star and not prefix.endswith("/")):
            msg = f'required has paths such as "/payments" or "/payments/*", got {shown(path)}'
            raise ConfigurationError(msg)
        if star:
            below.append(prefix)
        else:
            exact.add(path)
    prefixes = tuple(below)

    def asked(scope: Scope) -> bool:
        path = _paths(scope)[1]
        return path in exact or path.startswith(prefixes)

    return asked


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the whole body, or refuse one that is longer than `limit`."""
    for length in lines_of(scope, b"content-length"):
        if length.isdigit() and float(length) > limit:  # int refuses more than 4,300 digits
            raise too_large(limit)
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        chunks.append(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


def again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that begins with a body that has been read."""
    unread = [body]

    async def from_start() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return from_start


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


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(*parts: bytes) -> str:
    """Return one digest; each part's length goes in too, so that no two lists give the same."""
    return sha256(b"".join([b"%d:%b" % (len(part), part) for part in parts])).hexdigest()
