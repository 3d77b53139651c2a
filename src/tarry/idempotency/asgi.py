"""The middleware: a write API whose requests take effect once, however often they are sent.

Follows draft-ietf-httpapi-idempotency-key-header-07. What that leaves open is decided here: a key
belongs to a host, a method, a path and a caller; a replay carries `Idempotent-Replayed: true`; a
response that says that nothing was done is not kept; a store that fails refuses the request.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tarry.core.checks import count, positive
from tarry.errors import ConfigurationTypeError, Rejected, short_repr
from tarry.idempotency.exchange import Exchange, replay
from tarry.idempotency.key import MalformedKey, parse_key
from tarry.idempotency.lease import PATIENCE, Lease, Terms
from tarry.idempotency.loops import apart
from tarry.idempotency.problems import (
    Docs,
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
from tarry.idempotency.renewal import Renewals
from tarry.idempotency.request import (
    KEY,
    Disconnected,
    credentials,
    digests,
    fields_of,
    needs_key,
    read_body,
    told,
)
from tarry.idempotency.stores.memory import MemoryStore
from tarry.runtime.callables import plain_function
from tarry.runtime.clocks import system

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tarry.idempotency.request import Fields, Identity, Routes
    from tarry.idempotency.store import Store, Taken
    from tarry.wire.asgi import App, Receive, Scope, Send

logger: logging.Logger = logging.getLogger("tarry.idempotency")

MEBIBYTE = 1 << 20
DAY = 86_400.0
_GUARDED = "tarry.idempotency"
"""In the scope of a request that runs under its key: another middleware inside lets it pass."""
_SWEEPS = 0.01
"""So many requests sweep; each takes twice as many records as these make, so that none pile up."""
_SWEPT = 200


class IdempotencyMiddleware:
    """Answers a request whose `Idempotency-Key` is known as it was answered the first time.

    store: where records are kept; by default in the memory of this process.
    methods: those that are guarded; the others pass.
    required: where a request without a key is refused: paths within the application ("/payments"),
        all below one ("/payments/*", not "/payments" itself), or a function of the scope. Elsewhere
        a key is optional.
    lease: seconds after which the key of a process that died is free again.
    keep: seconds for which a response is replayed.
    identity: a function of the scope that says who calls; by default the Authorization and
        X-API-Key headers do.
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
        if not callable(app):
            raise ConfigurationTypeError("app", "must be an ASGI application", app)
        if isinstance(methods, str):
            raise ConfigurationTypeError("methods", "must be a list of names", methods)
        if not isinstance(store_errors, bool):
            raise ConfigurationTypeError("store_errors", "must be True or False", store_errors)
        if identity is not None:
            if not callable(identity):
                rule = "must be a function of the scope"
                raise ConfigurationTypeError("identity", rule, identity)
            plain_function("identity", identity)
        self._app = app
        self._store = MemoryStore() if store is None else _checked(store)
        self._methods = frozenset(method.upper() for method in methods)
        self._needs_key = needs_key(required)
        self._terms = Terms(
            self._store,
            lease=positive("lease", lease),
            keep=positive("keep", keep),
            max_response=count("max_response", max_response, 0),
            store_errors=store_errors,
        )
        self._renewals = Renewals(lease)
        self._identity = identity
        self._max_request = count("max_request", max_request, 0)
        self._docs = Docs(docs_url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] not in self._methods or _GUARDED in scope:
            await self._app(scope, receive, send)
            return
        fields = fields_of(scope)
        try:
            if KEY in fields:
                await self._guard(fields, scope, receive, send)
            elif self._needs_key(scope):
                raise missing()
            else:
                await self._app(scope, receive, send)
        except Disconnected:
            return
        except Refusal as refusal:
            await refuse(send, refusal, self._docs)

    async def _guard(self, fields: Fields, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            key = parse_key(fields[KEY])
        except MalformedKey as error:
            raise malformed(str(error)) from None
        body = await read_body(fields, receive, self._max_request)
        told_by = self._identity
        caller = credentials(fields) if told_by is None else told(told_by(scope))
        name, asked = digests(scope, fields, caller, key, body)
        lease = Lease(self._terms, name, asked, scope)
        try:
            taken = await lease.claim()
        except Exception as error:
            # Fail closed: to run what may have run before is what the caller wants to be safe from.
            logger.exception("the idempotency store failed, so a request was refused")
            raise unavailable(error.retry_after if isinstance(error, Rejected) else None) from None
        if taken is not None:
            await self._answer(taken, asked, send)
            return
        renewed = self._renewals.begin(lease) if self._terms.memory is None else None
        try:
            scope[_GUARDED] = True
            await Exchange(lease, body, receive, send).run(self._app, scope)
        finally:
            if renewed is None:
                lease.abandon()
            else:
                renewed.pop(lease, None)
            scope.pop(_GUARDED, None)
        if system.draw() < _SWEEPS:
            await self._sweep()

    async def _answer(self, taken: Taken, asked: str, send: Send) -> None:
        """Answer a request whose key is taken."""
        match judge(taken.record, asked, taken.now):
            case Replay(response):
                if response.body is None:
                    raise not_kept(response)
                await replay(send, response, response.body)
            case Conflict() as conflict:
                raise outstanding(conflict, self._terms.lease)
            case Mismatch():
                raise reused()

    async def _sweep(self) -> None:
        """Let stores forget, in small steps and after the client has its answer."""
        try:
            await apart(lambda: self._store.sweep(_SWEPT), PATIENCE)
        except Exception:
            logger.exception("the idempotency store failed to forget what has expired")


def _checked(store: object) -> Store:
    names = ("claim", "extend", "finish", "release", "sweep", "close")
    if isinstance(store, type) or not all(callable(getattr(store, name, None)) for name in names):
        rule = 'store must be a store, such as SqliteStore("keys.db") or MemoryStore()'
        raise ConfigurationTypeError(f"{rule}, got {short_repr(store)}")
    return store  # type: ignore[return-value]
