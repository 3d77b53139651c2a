"""ASGI middleware: a request with an `Idempotency-Key` takes effect only once.

Implements draft-ietf-httpapi-idempotency-key-header-07. Where the draft leaves a choice:

- A key belongs to a host, a method, a path and a caller.
- A stored response is sent with `Idempotent-Replayed: true`, and without headers that belong to the
  client, the time or the connection of the first response, such as Set-Cookie.
- A response whose status means that nothing was done, such as 401 or 429, is not stored.
- If the store fails, the request is rejected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from math import ceil
from typing import TYPE_CHECKING, TypeAlias

from tarry.core.checks import Seconds, check_count, check_positive, to_seconds
from tarry.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    LimitReached,
    Rejected,
    short_repr,
)
from tarry.idempotency import request
from tarry.idempotency.lease import KeyLease, LeaseContext, LeaseRenewer, run_with_timeout
from tarry.idempotency.request import KEY_HEADER
from tarry.idempotency.responses import ProblemSender, Rejection, ResponseRecorder
from tarry.idempotency.store import MemoryStore
from tarry.runtime.derived_keys import KeyedRequest, current_request
from tarry.runtime.effects import effects
from tarry.runtime.functions import check_not_async
from tarry.wire.http import HOP_BY_HOP_HEADERS, Scope

if TYPE_CHECKING:
    from tarry.idempotency.request import Identity, RequestHeaders
    from tarry.idempotency.store import ExistingRecord, IdempotencyStore
    from tarry.wire.http import App, Receive, Send

RequireKey: TypeAlias = Iterable[str] | Callable[[Scope], bool]
"""Paths, or a function that returns whether a request must have a key."""

logger: logging.Logger = logging.getLogger("tarry.idempotency")

_SKIPPED_HEADERS = frozenset({
    b"set-cookie", b"set-cookie2", b"www-authenticate", b"date", b"age",
    *(name.encode() for name in HOP_BY_HOP_HEADERS),
})  # fmt: skip
"""Headers that are not replayed: a session or an authentication challenge belongs to the client of
the first response, a date to its time, and a hop-by-hop header to its connection."""

_MEBIBYTE = 1 << 20
_DAY_S = 86_400.0
_SCOPE_MARK = "tarry.idempotency"
"""Set in the scope of a request that runs with a key, so that a nested `IdempotencyMiddleware`
passes the request through."""
_SWEEP_PROBABILITY = 0.01
_SWEEP_LIMIT = 200
"""Maximum number of records that one sweep deletes: twice as many as are added between two sweeps
(100 on average), so that expired records do not accumulate."""


class IdempotencyMiddleware:
    """Answers a repeated request with the stored response to the first request with the same key.

    Times are seconds or a `timedelta`.

    Args:
        app: the ASGI application.
        store: where records are stored; by default in the memory of this process.
        methods: the HTTP methods for which keys are processed; other requests are passed through.
        require_key: the requests that are rejected if they have no key. Either a list of paths
            within the application ("/payments") and of patterns for all paths below a path
            ("/payments/*", which does not match "/payments" itself), or a function that gets the
            scope and returns a bool. For other requests a key is optional.
        lease: time after which a key becomes free again if the process that ran its request
            died. While the request runs, its lease is renewed.
        retention: time for which a response is stored; at most 10 minutes for a status of 4xx.
        identity: a function that gets the scope and returns a string that identifies the caller.
            By default the Authorization and X-API-Key headers identify the caller. A request with a
            key is rejected if its Authorization differs in a retry, or if it has only cookies.
        max_request_bytes: the largest request body that is accepted with a key.
        max_response_bytes: the largest response body that is stored. A larger body is sent to the
            client once, but a repeated request gets a 409 instead.
        store_errors: also store responses with a status of 500 and above.
        also_replay: names of headers to store and replay although they are left out by default:
            Set-Cookie, WWW-Authenticate, Date, Age and hop-by-hop headers such as Connection.
        docs_url: the page about idempotency in the documentation of the API. Problem responses
            link to it.
    """

    def __init__(
        self,
        app: App,
        store: IdempotencyStore | None = None,
        *,
        methods: Iterable[str] = ("POST", "PATCH"),
        require_key: RequireKey = (),
        lease: Seconds = 30.0,
        retention: Seconds = _DAY_S,
        identity: Identity | None = None,
        max_request_bytes: int = _MEBIBYTE,
        max_response_bytes: int = _MEBIBYTE,
        store_errors: bool = False,
        also_replay: Iterable[str] = (),
        docs_url: str | None = None,
    ) -> None:
        if not callable(app):
            raise ConfigurationTypeError("app", "must be an ASGI application", app)
        if isinstance(methods, str):
            raise ConfigurationTypeError("methods", "must be a list of HTTP method names", methods)
        if not isinstance(store_errors, bool):
            raise ConfigurationTypeError("store_errors", "must be True or False", store_errors)
        if identity is not None:
            if not callable(identity):
                rule = "must be a function that takes the scope"
                raise ConfigurationTypeError("identity", rule, identity)
            check_not_async("identity", identity)
        self._app = app
        self._store = MemoryStore() if store is None else _check_store(store)
        self._methods = frozenset(method.upper() for method in methods)
        self._requires_key = _build_key_requirement(require_key)
        self._lease_context = LeaseContext(
            self._store,
            lease_s=check_positive("lease", to_seconds(lease)),
            retention_s=check_positive("retention", to_seconds(retention)),
            max_response_bytes=check_count("max_response_bytes", max_response_bytes, 0),
            stores_error_responses=store_errors,
            skipped_headers=_SKIPPED_HEADERS - _encode_header_names(also_replay),
        )
        self._renewer = LeaseRenewer(self._lease_context.lease_s)
        self._identity = identity
        self._max_request_bytes = check_count("max_request_bytes", max_request_bytes, 0)
        self._problems = ProblemSender(docs_url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] not in self._methods or _SCOPE_MARK in scope:
            await self._app(scope, receive, send)
            return
        headers = request.relevant_headers(scope)
        if KEY_HEADER not in headers and not self._requires_key(scope):
            await self._app(scope, receive, send)
            return
        try:
            await self._serve_with_key(headers, scope, receive, send)
        except ClientDisconnected:
            return
        except Rejection as rejection:
            await self._problems.send_rejection(send, rejection, request.instance_of(scope))

    async def _serve_with_key(
        self, headers: RequestHeaders, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if KEY_HEADER not in headers:
            detail = (
                "Send a new unique key with each operation, and the same key when you retry it."
            )
            raise Rejection("missing", detail)
        try:
            key = request.parse_key(headers[KEY_HEADER])
            if self._identity is None:
                caller = request.caller_credentials(headers)
            else:
                caller = request.check_caller(self._identity(scope))
        except request.MalformedKey as error:
            raise Rejection("malformed", str(error)) from None
        except request.UnknownCaller as error:
            raise Rejection("unknown-caller", str(error)) from None
        body = await _read_body(headers, receive, self._max_request_bytes)
        name, fingerprint = request.record_name_and_fingerprint(scope, headers, caller, key, body)
        lease = KeyLease(self._lease_context, name, fingerprint, scope, caller)
        try:
            existing = await lease.claim()
        except Exception as error:
            # Fail closed: the request may have run before, and the key must prevent a second run.
            # A full store logs once that it is full, because clients could fill the log.
            if not isinstance(error, LimitReached):
                logger.exception("request rejected because the idempotency store failed")
            retry_after = error.retry_after if isinstance(error, Rejected) else None
            raise Rejection(
                "unavailable",
                "The server cannot currently check whether a request with this key ran before. "
                "This request has not run.",
                retry_after=retry_after or 0,
            ) from None
        if existing is not None:
            await self._answer_from_record(existing, fingerprint, send)
            return
        needs_renewal = self._lease_context.memory_store is None
        renewed_leases = self._renewer.add(lease) if needs_renewal else None
        outer_request, keyed_request = current_request.get(), KeyedRequest(name)
        try:
            scope[_SCOPE_MARK] = True
            current_request.set(keyed_request)
            await ResponseRecorder(lease, body, receive, send).run(self._app, scope)
        finally:
            if renewed_leases is None:
                lease.abandon()
            else:
                renewed_leases.pop(lease, None)
            scope.pop(_SCOPE_MARK, None)
            # A finalizer may run this in another context, which must stay unchanged.
            if current_request.get() is keyed_request:
                current_request.set(outer_request)
        # The response has been sent, so no client waits for the sweep.
        if effects.draw_random() < _SWEEP_PROBABILITY:
            try:
                await run_with_timeout(lambda: self._store.sweep(_SWEEP_LIMIT))
            except Exception:
                logger.exception("idempotency store failed to delete expired records")

    async def _answer_from_record(
        self, existing: ExistingRecord, fingerprint: str, send: Send
    ) -> None:
        """Answer a request whose key already has a record."""
        record, now = existing
        if record.fingerprint != fingerprint:
            raise Rejection(
                "reused",
                "The first request with this key had a different query, content type or body. Use "
                "a new key for a new operation; repeat the first request exactly to retry it.",
            )
        response = record.response
        if response is None:
            free_in_s = ceil(max(0.0, record.free_at - now))
            # A server renews the lease when a third of it has passed. If less than a third remains,
            # the server has probably died, and the key becomes free when the lease expires.
            has_server_probably_died = record.free_at - now < self._lease_context.lease_s / 3
            retry_after = free_in_s if has_server_probably_died else 0
            raise Rejection(
                "outstanding",
                "The first request with this key is still running. Send the same request again "
                f"later. If its server has died, the key is free in {free_in_s} s.",
                retry_after=retry_after,
            )
        if response.body is None:
            status = response.status
            raise Rejection(
                "not-kept",
                f"The first request with this key was answered with status {status}. Its response "
                "was too large, or of a type that is not stored. The request has not been run "
                "again.",
                extensions={"originalStatus": status},
            )
        headers = [*response.headers, (b"idempotent-replayed", b"true")]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})


def _check_store(store: object) -> IdempotencyStore:
    method_names = ("claim", "extend", "finish", "release", "sweep", "close")
    has_methods = all(callable(getattr(store, name, None)) for name in method_names)
    if isinstance(store, type) or not has_methods:
        rule = 'must be a store, such as SqliteStore("keys.db") or MemoryStore()'
        raise ConfigurationTypeError("store", rule, store)
    return store  # type: ignore[return-value]  # has all methods of a store


def _encode_header_names(also_replay: Iterable[str]) -> set[bytes]:
    """Return the names in lower case; raise ConfigurationError for a header replayed anyway."""
    if isinstance(also_replay, str):
        raise ConfigurationTypeError("also_replay", "must be a list of header names", also_replay)
    names: set[bytes] = set()
    for name in also_replay:
        encoded = name.lower().encode() if isinstance(name, str) else b""
        if encoded not in _SKIPPED_HEADERS:
            rule = "takes headers that are left out by default, such as Set-Cookie and Date"
            raise ConfigurationError("also_replay", rule, name)
        names.add(encoded)
    return names


def _build_key_requirement(require_key: RequireKey) -> Callable[[Scope], bool]:
    """Return a function that returns whether a request must have a key."""
    if callable(require_key):
        check_not_async("require_key", require_key)
        return require_key
    if isinstance(require_key, (str, bytes)) or not hasattr(require_key, "__iter__"):
        rule = "must be a list of paths or a function"
        raise ConfigurationTypeError("require_key", rule, require_key)
    patterns = [_split_path_pattern(path) for path in require_key]
    exact_paths = {path.rstrip("/") for path, star in patterns if not star}
    prefixes = tuple(prefix for prefix, star in patterns if star)

    def requires_key(scope: Scope) -> bool:
        path = request.external_and_internal_path(scope)[1]
        return path.rstrip("/") in exact_paths or path.startswith(prefixes)

    return requires_key


def _split_path_pattern(path: object) -> tuple[str, str]:
    """Return a path without its final star, and the star ("" for a path without one)."""
    if not isinstance(path, str):
        rule = f"must be a list of paths, but contains {short_repr(path)}"
        raise ConfigurationTypeError("require_key", rule)
    prefix, star, rest = path.partition("*")
    if not path.startswith("/") or rest or (star and not prefix.endswith("/")):
        rule = 'takes paths such as "/payments" or "/payments/*"'
        raise ConfigurationError("require_key", rule, path)
    if "{" in path or "<" in path:
        rule = (
            f"takes paths without parameters, got {short_repr(path)}: use a pattern for all paths "
            'below, such as "/payments/*", or a function that takes the scope'
        )
        raise ConfigurationError("require_key", rule)
    return prefix, star


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete."""


def _too_large_rejection(max_bytes: int) -> Rejection:
    return Rejection(
        "too-large",
        f"A request with an Idempotency-Key may have a body of up to {max_bytes} bytes here "
        "(max_request_bytes of the middleware).",
    )


async def _read_body(headers: RequestHeaders, receive: Receive, max_bytes: int) -> bytes:
    """Return the whole request body; reject a body that is larger than `max_bytes`."""
    for length in headers.get(b"content-length", ()):
        # float, because int() rejects more than 4,300 digits.
        if length.isdigit() and float(length) > max_bytes:
            raise _too_large_rejection(max_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large_rejection(max_bytes)
        if not message.get("more_body"):
            return b"".join([*chunks, chunk]) if chunks else chunk
        chunks.append(chunk)
