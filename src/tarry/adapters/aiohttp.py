"""Retries for aiohttp, as a client middleware (aiohttp 3.12 and later).

    session = aiohttp.ClientSession(middlewares=(RetryMiddleware(),))

The middleware sees every request and every answer of the session. It returns the last answer as
the session would without it: no exception is made of a 503.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from tarry.core.outcome import PERMANENT, Kind, Outcome
from tarry.errors import MissingExtra, ResultNotAccepted
from tarry.runtime import asynchronous, outgoing
from tarry.runtime.clocks import world
from tarry.runtime.origins import Origins
from tarry.runtime.run import Run
from tarry.wire import http

try:
    from aiohttp import (
        BytesPayload,
        ClientConnectionError,
        ClientConnectorError,
        ClientError,
        ClientOSError,
        ClientPayloadError,
        ClientSSLError,
        ConnectionTimeoutError,
        IOBasePayload,
        MultipartWriter,
        ServerDisconnectedError,
        ServerFingerprintMismatch,
    )
except ImportError as _missing:
    _message = "this needs aiohttp 3.12 or later: pip install 'tarry[aiohttp]'"
    raise MissingExtra(_message) from _missing

if TYPE_CHECKING:
    from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

    from tarry.core.policy import Policy
    from tarry.runtime.origins import Downstreams
    from tarry.runtime.outgoing import Key

_FINAL = (ClientSSLError, ServerFingerprintMismatch)
"""Certificates do not heal."""
_NEVER_SENT = (ClientConnectorError, ConnectionTimeoutError)
_PERHAPS_READ = (ClientConnectionError, ClientPayloadError, ConnectionError, TimeoutError)

_given_up: ContextVar[tuple[object, Exception] | None] = ContextVar("tarry_aiohttp", default=None)
"""The error that the last call of this task ended with, and what identifies that call."""


class RetryMiddleware:
    """Retries the requests of an `aiohttp.ClientSession`.

    `downstream`: one for all origins, a function that makes one for an origin, or None for a
    breaker and a budget each. `idempotency_key`: "auto" or a function puts one key on all attempts
    of a request that is not idempotent, which makes it safe to retry.
    """

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        downstream: Downstreams = None,
        idempotency_key: Key = None,
    ) -> None:
        self._key = outgoing.checked_key(idempotency_key)
        self._origins = Origins(policy, downstream, _outcome_of, _judge, _release)
        self._limit = self._origins.policy.attempt_timeout

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        """Send a request until it is answered for good."""
        _refuse_second_round(request)
        replayable = _can_replay(request.body)
        run = self._begin(request, replayable=replayable)
        try:
            return await asynchronous.drive(run, self._send, (run, request, handler), {})
        except ResultNotAccepted as error:
            response: Any = error.result
            return response  # type: ignore[no-any-return]
        except Exception as error:
            outgoing.explain(error, replayable=replayable)
            if isinstance(error, (ClientOSError, ServerDisconnectedError)):
                _given_up.set((_identity(request), error))
            raise

    def _begin(self, request: ClientRequest, *, replayable: bool) -> Run:
        method, url = request.method, request.url
        keyed = outgoing.put_key(request.headers, method, self._key, request)
        origin = http.origin_of(url.scheme, url.host or "", url.port)
        repeatable = replayable and http.repeatable(method, keyed=keyed)
        return Run.new(self._origins.spec(method, origin, repeatable=repeatable))

    async def _send(
        self, run: Run, request: ClientRequest, handler: ClientHandlerType
    ) -> ClientResponse:
        if run.attempts > 1:
            await request.close()  # the last attempt may still be reading the body
        outgoing.announce(request.headers, run.attempts, self._limit)
        try:
            return await handler(request)
        except TimeoutError as error:
            if type(error) is TimeoutError:
                # Of the session, whose total timeout covers all attempts and waits: now it is over.
                run.deadline = world.now()
            raise


def _identity(request: ClientRequest) -> object:
    """Return what all requests of one call of the session share: there is no public name for it."""
    return request._traces  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _refuse_second_round(request: ClientRequest) -> None:
    """Raise again what the call was given up with.

    When a connection breaks, aiohttp itself sends an idempotent request a second time, through all
    middlewares: a second layer of retries around this one.
    """
    before = _given_up.get()
    if before is not None:
        _given_up.set(None)
        if before[0] is _identity(request):
            raise before[1]


def _can_replay(body: Any) -> bool:
    """Say whether a body can be sent a second time; aiohttp goes back in files by itself."""
    if isinstance(body, (bytes, BytesPayload)):
        return True
    if isinstance(body, IOBasePayload):
        return bool(body._value.seekable())  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return isinstance(body, MultipartWriter) and all(_can_replay(part) for part, *_ in body)


def _outcome_of(error: Exception, repeatable: bool) -> Outcome:  # noqa: FBT001
    detail = type(error).__name__
    timeout = isinstance(error, TimeoutError)
    if isinstance(error, _FINAL):
        return PERMANENT
    if isinstance(error, _NEVER_SENT):
        return Outcome(Kind.TRANSIENT, timeout=timeout, detail=detail)
    if isinstance(error, _PERHAPS_READ):
        return Outcome(Kind.TRANSIENT, safe=repeatable, timeout=timeout, detail=detail)
    return PERMANENT


def _judge(response: ClientResponse, policy: Policy, repeatable: bool) -> Outcome:  # noqa: FBT001
    return outgoing.judge(response.status, response.headers, policy, repeatable=repeatable)


async def _release(response: ClientResponse) -> None:
    """Give the connection back, open if the rest of the answer is short."""
    with suppress(ClientError):  # a connection that cannot be kept is closed
        if outgoing.is_short(response.headers):
            await response.read()
    response.release()
    await response.wait_for_close()
