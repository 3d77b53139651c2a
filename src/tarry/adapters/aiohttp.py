"""Retries for aiohttp, as a client middleware (aiohttp 3.12 and later).

    session = aiohttp.ClientSession(middlewares=(RetryMiddleware(),))

The middleware sees every request and every answer of the session. It returns the last answer as
the session would without it: no exception is made of a 503.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

from tarry.adapters.http.hand_off import Parts, make_hand_off
from tarry.adapters.http.headers import (
    MAX_DRAINED_BYTES,
    add_safety_note,
    attempt_time_limit,
    check_idempotency_key,
    classify_proxy_refusal,
    classify_response,
    drain_timeout,
    final_response,
    is_worth_draining,
    make_repeatable,
    set_attempt_headers,
)
from tarry.adapters.http.origins import Origins
from tarry.core.outcome import PERMANENT, Kind, Outcome
from tarry.errors import MissingExtra, ResultNotAccepted
from tarry.runtime import async_driver, event_loops
from tarry.runtime.call import Run
from tarry.runtime.clocks import system
from tarry.wire import http

try:
    from aiohttp import (
        BytesPayload,
        ClientConnectionError,
        ClientConnectorError,
        ClientError,
        ClientHttpProxyError,
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

    from tarry.adapters.http.hand_off import AsyncService, HandOff
    from tarry.adapters.http.headers import IdempotencyKey
    from tarry.adapters.http.origins import Downstreams
    from tarry.core.policy import Policy

_FINAL = (ClientSSLError, ServerFingerprintMismatch)
"""Certificates do not heal."""
_NEVER_SENT = (ClientConnectorError, ConnectionTimeoutError)
_PERHAPS_READ = (ClientConnectionError, ClientPayloadError, ConnectionError, TimeoutError)

_keys: ContextVar[tuple[object, str, str] | None] = ContextVar("tarry_key", default=None)
"""The key that the last call of this task was given, its method, and what identifies that call."""
_given_up: ContextVar[tuple[object, Exception] | None] = ContextVar("tarry_aiohttp", default=None)
"""The error that the last call of this task ended with, and what identifies that call."""


class RetryMiddleware:
    """Retries the requests of an `aiohttp.ClientSession`.

    `downstream`: one for all origins, a function that makes one for an origin, or None for a
    breaker and a budget each. `idempotency_key`: "auto" or a function puts one key on all attempts
    of a request that is not idempotent, which makes it safe to retry. `hand_off`: a
    `tarry.AsyncClient`, which gets what may be repeated and cannot go on now; `HandedOff` is
    raised.
    """

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        downstream: Downstreams = None,
        idempotency_key: IdempotencyKey = None,
        hand_off: AsyncService | None = None,
    ) -> None:
        self._key = check_idempotency_key(idempotency_key)
        self._origins = Origins(policy, downstream, _outcome_of, _judge, _release)
        self._limit = self._origins.policy.attempt_timeout
        self._hand_off: HandOff | None = make_hand_off(
            hand_off, policy, looped=True, parts=_parts, judge=_judge, release=_release
        )

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        """Send a request until it is answered for good."""
        _refuse_second_round(request)
        replayable = _can_replay(request.body)
        run = self._begin(request, replayable=replayable)
        try:
            return await async_driver.drive(run, self._send, (run, request, handler), {})
        except ResultNotAccepted as error:
            if self._hand_off is not None:
                await self._hand_off.aover(request, error)
            response: Any = final_response(error)
            return response  # type: ignore[no-any-return]
        except Exception as error:
            add_safety_note(error, replayable=replayable)
            if self._hand_off is not None:
                await self._hand_off.aover(request, error)
            if isinstance(error, (ClientOSError, ServerDisconnectedError)):
                _given_up.set((_identity(request), error))
            raise

    def _begin(self, request: ClientRequest, *, replayable: bool) -> Run:
        method, url = request.method, request.url
        if self._key is not None:
            _keep_key(request)
        repeatable = make_repeatable(method, request.headers, self._key, request)
        if self._key is not None and (key := request.headers.get(http.KEY)):
            _keys.set((_identity(request), method, key))
        origin = http.origin_of(url.scheme, url.host or "", url.port)
        return Run.new(self._origins.spec(method, origin, repeatable=repeatable and replayable))

    async def _send(
        self, run: Run, request: ClientRequest, handler: ClientHandlerType
    ) -> ClientResponse:
        if run.attempts > 1:
            await request.close()  # the last attempt may still be reading the body
        set_attempt_headers(request.headers, run.attempts, attempt_time_limit(self._limit))
        try:
            return await handler(request)
        except TimeoutError as error:
            if type(error) is TimeoutError:
                # Of the session, whose total timeout covers all attempts and waits: now it is over.
                run.deadline = system.now()
            raise


def _identity(request: ClientRequest) -> object:
    """Return what all requests of one call of the session share: there is no public name for it."""
    return request._traces  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _keep_key(request: ClientRequest) -> None:
    """Put the key of a request on the one that follows a redirect, which aiohttp makes anew."""
    before = _keys.get()
    if before is not None and before[0] is _identity(request) and before[1] == request.method:
        request.headers.setdefault(http.KEY, before[2])


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


def _parts(request: ClientRequest) -> Parts:
    body: Any = request.body
    if isinstance(body, BytesPayload):
        body = body._value  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    # What is compressed on its way is not what its headers say.
    is_plain = isinstance(body, (bytes, bytearray, memoryview)) and not request.compress
    sent = bytes(cast("bytes", body)) if is_plain else None
    return Parts(request.method, str(request.url), request.headers.items(), sent)


def _outcome_of(error: Exception, repeatable: bool) -> Outcome:  # noqa: FBT001
    detail = type(error).__name__
    timeout = isinstance(error, TimeoutError)
    if isinstance(error, ClientHttpProxyError):
        return classify_proxy_refusal(error.status)
    if isinstance(error, _FINAL):
        return PERMANENT
    if isinstance(error, _NEVER_SENT):
        return Outcome(Kind.TRANSIENT, timeout=timeout, detail=detail)
    if isinstance(error, _PERHAPS_READ):
        return Outcome(Kind.TRANSIENT, safe=repeatable, timeout=timeout, detail=detail)
    return PERMANENT


def _judge(policy: Policy, repeatable: bool, response: ClientResponse) -> Outcome:  # noqa: FBT001
    return classify_response(response.status, response.headers, policy, repeatable=repeatable)


async def _release(response: ClientResponse) -> bool:
    """Give the connection back, open if the rest of the answer is short: then it is kept."""
    kept = False
    with suppress(ClientError):  # a connection that cannot be kept is closed
        if is_worth_draining(response.headers):
            with event_loops.timeout(drain_timeout()):
                kept = await _read(response)
    if not kept:
        response.close()
        await response.wait_for_close()
    return kept


async def _read(response: ClientResponse) -> bool:
    """Read the rest of an answer, if that is not much."""
    pieces: list[bytes] = []
    room = MAX_DRAINED_BYTES
    async for piece in response.content.iter_any():
        pieces.append(piece)
        room -= len(piece)
        if room < 0:
            return False
    response._body = b"".join(pieces)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    await response.read()  # ends with what was read, when the connection is given back
    return True
