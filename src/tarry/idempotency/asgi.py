"""The middleware: a write API whose requests take effect once, however often they are sent.

Follows draft-ietf-httpapi-idempotency-key-header-07. What that leaves open is decided here: a key
belongs to a method, a path and a caller; a replay carries `Idempotent-Replayed: true`; a response
that says "not now" (5xx, 408, 425, 429) is not kept; a store that fails refuses the request.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tarry.core.checks import count, positive, shown
from tarry.errors import ConfigurationTypeError, Rejected
from tarry.idempotency.key import MalformedKey, parse_key
from tarry.idempotency.lease import Lease
from tarry.idempotency.problems import (
    Refusal,
    malformed,
    missing,
    not_kept,
    outstanding,
    refuse,
    reused,
    unavailable,
)
from tarry.idempotency.record import Conflict, Mismatch, Replay, judge
from tarry.idempotency.request import (
    Disconnected,
    again,
    caller_of,
    fingerprint,
    lines_of,
    needs_key,
    read_body,
    record_key,
)
from tarry.idempotency.response import Recorder, replay

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tarry.idempotency.record import StoredResponse
    from tarry.idempotency.request import Identity, Routes
    from tarry.idempotency.store import Store
    from tarry.wire.asgi import App, Receive, Scope, Send

logger: logging.Logger = logging.getLogger("tarry.idempotency")

MEBIBYTE = 1 << 20
DAY = 86_400.0
_HEADER = b"idempotency-key"
_SWEEP_EVERY = 100
"""Requests; each sweep takes twice as many records as these have made, so that none pile up."""


class IdempotencyMiddleware:
    """Answers a request whose `Idempotency-Key` is known as it was answered the first time.

    store: where records are kept; by default in the memory of this process.
    methods: those that are guarded; the others pass.
    required: where a request without a key is refused: paths within the application ("/payments"),
        all below one ("/payments/*"), or a function of the scope. Elsewhere a key is optional.
    lease: seconds after which the key of a process that died is free again.
    keep: seconds for which a response is replayed.
    identity: a function of the scope that says who calls; by default the Authorization header does.
    max_request: bytes of a body that is accepted together with a key.
    max_response: bytes of a body that is kept; a larger one is sent, but not replayed.
    store_errors: also keep responses of 500 and above.
    docs_url: where the API's users read about this; the problems link to it.
    """

    def __init__(
        self,
        app: App,
        store: Store | None = None,
        *,
        methods: Iterable[str] = ("POST", "PATCH"),
        required: Routes = (),
        lease: float = 30.0,
        keep: float = DAY,
        identity: Identity | None = None,
        max_request: int = MEBIBYTE,
        max_response: int = MEBIBYTE,
        store_errors: bool = False,
        docs_url: str | None = None,
    ) -> None:
        if isinstance(methods, str):
            msg = f"methods must be a list of names, got {shown(methods)}"
            raise ConfigurationTypeError(msg)
        if store is None:
            from tarry.idempotency.stores.memory import MemoryStore

            store = MemoryStore()
        self._app = app
        self._store = store
        self._methods = frozenset(method.upper() for method in methods)
        self._needs_key = needs_key(required)
        self._lease = positive("lease", lease)
        self._keep = positive("keep", keep)
        self._identity = caller_of if identity is None else identity
        self._max_request = count("max_request", max_request, 0)
        self._max_response = count("max_response", max_response, 0)
        self._store_errors = store_errors
        self._docs_url = docs_url
        self._until_sweep = _SWEEP_EVERY

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] not in self._methods:
            await self._app(scope, receive, send)
            return
        lines = lines_of(scope, _HEADER)
        try:
            if lines:
                await self._guard(lines, scope, receive, send)
            elif self._needs_key(scope):
                raise missing()
            else:
                await self._app(scope, receive, send)
        except Disconnected:
            return
        except Refusal as refusal:
            await refuse(send, refusal, self._docs_url)

    async def _guard(self, lines: list[bytes], scope: Scope, receive: Receive, send: Send) -> None:
        try:
            key = parse_key(lines)
        except MalformedKey as error:
            raise malformed(str(error)) from None
        body = await read_body(scope, receive, self._max_request)
        asked = fingerprint(scope, body)
        name = record_key(scope, self._identity(scope), key)
        lease = Lease(self._store, name, self._lease, scope)
        try:
            taken = await lease.claim(asked)
        except Exception as error:
            # Fail closed: to run what may have run before is what the caller wants to be safe from.
            logger.exception("the idempotency store failed, so a request was refused")
            raise unavailable(error.retry_after if isinstance(error, Rejected) else None) from None
        if taken is None:
            await self._run(lease, scope, again(body, receive), send)
            await self._sweep()
            return
        match judge(taken.record, asked, taken.now):
            case Replay(response):
                await self._replay(send, response)
            case Conflict() as conflict:
                raise outstanding(conflict)
            case Mismatch():
                raise reused()

    async def _run(self, lease: Lease, scope: Scope, receive: Receive, send: Send) -> None:
        recorder = Recorder(
            send,
            lease,
            keep=self._keep,
            limit=self._max_response,
            store_errors=self._store_errors,
        )
        try:
            async with lease.kept():
                await self._app(scope, receive, recorder.send)
        finally:
            await lease.release()  # of what did not come to an answer
        await recorder.pass_on()

    async def _replay(self, send: Send, response: StoredResponse) -> None:
        if response.body is None:
            raise not_kept(response)
        await replay(send, response, response.body)

    async def _sweep(self) -> None:
        """Let stores forget, in small steps and after the client has its answer."""
        self._until_sweep -= 1
        if self._until_sweep > 0:
            return
        self._until_sweep = _SWEEP_EVERY
        try:
            await self._store.sweep(2 * _SWEEP_EVERY)
        except Exception:
            logger.exception("the idempotency store failed to forget what has expired")
