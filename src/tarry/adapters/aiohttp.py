"""Retries for aiohttp, as a client middleware (aiohttp 3.12 and later).

    session = aiohttp.ClientSession(middlewares=(RetryMiddleware(),))

The middleware handles every request and response of the session. When it gives up, it returns the
last response, as the session would without the middleware: a 503 is returned, not raised.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

from tarry.adapters.http import messages
from tarry.adapters.http.hand_off import HandOffSender
from tarry.adapters.http.messages import DrainedBody, HttpClientFunctions, RequestSnapshot
from tarry.adapters.http.send import OriginRegistry, reject_unknown_arguments
from tarry.core.checks import check_flag
from tarry.core.extras import require_extra
from tarry.core.outcome import PERMANENT, Kind, Outcome
from tarry.errors import ResultNotAccepted
from tarry.runtime import drivers, event_loops
from tarry.runtime.call import RunningCall
from tarry.runtime.effects import effects
from tarry.wire import http

with require_extra("tarry.adapters.aiohttp needs aiohttp 3.12 or later", "aiohttp"):
    import aiohttp
    from aiohttp import BytesPayload, ConnectionTimeoutError

if TYPE_CHECKING:
    from typing import Never

    from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

    from tarry.adapters.http.hand_off import AsyncHandOff
    from tarry.adapters.http.messages import KeyOption
    from tarry.adapters.http.send import DownstreamArgument
    from tarry.core.policy import Policy

_PERMANENT_TLS_ERRORS = (aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch)
_NOT_SENT_ERRORS = (aiohttp.ClientConnectorError, ConnectionTimeoutError)
"""Errors that occur before the request is sent."""
_AIOHTTP_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
_MAYBE_SENT_ERRORS = (*_AIOHTTP_ERRORS, ConnectionError, TimeoutError)
"""Errors after which the server may have read the request."""

_last_key: ContextVar[tuple[object, str, str] | None] = ContextVar("tarry_key", default=None)
"""(call identity, method, key) of this asyncio task's last request with an Idempotency-Key."""
_last_error: ContextVar[tuple[object, Exception] | None] = ContextVar("tarry_aiohttp", default=None)
"""(call identity, error) of this asyncio task's last call, if aiohttp itself may retry it."""


class RetryMiddleware:
    """Retries the requests of an `aiohttp.ClientSession`.

    Args:
        policy: the retry policy; by default `tarry.Policy()`.
        downstream: one `tarry.Downstream` for all origins, or a function that returns one for an
            origin. By default each origin gets its own, with a breaker and a retry budget.
        idempotency_key: "auto" or a function of the request adds an Idempotency-Key to requests
            that are not idempotent, which makes them repeatable. All attempts send the same key.
            In a handler behind `IdempotencyMiddleware`, "auto" derives the key from the key of the
            request that is being handled; otherwise it is random.
        hand_off: a `tarry.AsyncClient` or `tarry.HandOff`. A repeatable request that cannot succeed
            now is enqueued there, and `HandedOff` is raised.
        mark_given_up: whether a response that is returned after the last attempt gets the header
            `x-should-retry: false`, so that an SDK that obeys it does not retry again.
    """

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        downstream: DownstreamArgument = None,
        idempotency_key: KeyOption = None,
        hand_off: AsyncHandOff | None = None,
        mark_given_up: bool = True,
        **unknown: Never,
    ) -> None:
        reject_unknown_arguments(self, unknown)
        self._idempotency_key = messages.check_idempotency_key(idempotency_key)
        self._origins = OriginRegistry(
            policy, downstream, _classify_error, _classify_response, _release_connection
        )
        self._mark_given_up = check_flag("mark_given_up", mark_given_up)
        self._attempt_timeout = self._origins.policy.attempt_timeout
        self._hand_off = HandOffSender(hand_off, self._origins.policy, _HTTP_FUNCTIONS)

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        """Send a request and retry it; return the last response."""
        _raise_if_given_up(request)
        can_resend_body = _can_resend(request.body)
        call = self._new_call(request, can_resend_body=can_resend_body)
        try:
            return await drivers.drive_async(call, self._send, (call, request, handler), {})
        except ResultNotAccepted as error:  # given up: the last response is a failure
            await self._hand_off.async_try_hand_off(request, error)
            response: Any = messages.final_response(error)
            if self._mark_given_up and messages.forbids_more_retries(error):
                headers = response.headers.copy()
                headers[http.SHOULD_RETRY_HEADER] = "false"
                response._headers = type(response.headers)(headers)  # noqa: SLF001 - no setter
                response._cache.pop("headers", None)  # noqa: SLF001 - where the property is cached
            return response  # type: ignore[no-any-return]  # `final_response` returns Any
        except Exception as error:
            messages.add_not_repeatable_note(error, can_resend_body=can_resend_body)
            await self._hand_off.async_try_hand_off(request, error)
            if isinstance(error, (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)):
                _last_error.set((_call_identity(request), error))
            raise

    def _new_call(self, request: ClientRequest, *, can_resend_body: bool) -> RunningCall:
        method, url, headers = request.method, request.url, request.headers
        policy = self._origins.policy
        last_key = None if self._idempotency_key is None else _last_key.get()
        if last_key and last_key[0] is _call_identity(request) and last_key[1] == method:
            # The request follows a redirect. aiohttp has created new headers, without the key.
            headers.setdefault(policy.idempotency_key_header, last_key[2])
        repeatable = messages.try_make_repeatable(
            method, headers, self._idempotency_key, policy, request, _snapshot
        )
        if self._idempotency_key is not None and (
            key := headers.get(policy.idempotency_key_header)
        ):
            _last_key.set((_call_identity(request), method, key))
        origin = http.origin_of(url.scheme, url.host or "", url.port)
        repeatable = repeatable and can_resend_body
        return RunningCall.new(self._origins.retry_config(method, origin, repeatable=repeatable))

    async def _send(
        self, call: RunningCall, request: ClientRequest, handler: ClientHandlerType
    ) -> ClientResponse:
        if call.attempts > 1:  # `attempts` includes this one
            await request.close()  # the previous attempt may still be reading the body
        time_limit = messages.limit_by_deadline(self._attempt_timeout)
        messages.set_attempt_headers(request.headers, call.attempts, time_limit)
        try:
            return await handler(request)
        except TimeoutError as error:
            if type(error) is TimeoutError:  # other timeouts raise aiohttp's subclasses
                # The session's total timeout has expired. It covers all attempts and waits, so no
                # further attempt may start.
                call.deadline = effects.now()
            raise


def _call_identity(request: ClientRequest) -> object:
    """Return an object that all requests of one user call, such as `session.get(...)`, share."""
    return request._traces  # noqa: SLF001 - no public attribute is shared  # pyright: ignore[reportPrivateUsage]


def _raise_if_given_up(request: ClientRequest) -> None:
    """Raise the error of the last call, if it was given up and aiohttp itself now retries it.

    When a connection is lost, aiohttp sends an idempotent request a second time, through all
    middlewares. Without this check, the attempts of tarry and of aiohttp would multiply.
    """
    last_error = _last_error.get()
    if last_error is not None:
        _last_error.set(None)
        if last_error[0] is _call_identity(request):
            raise last_error[1]


def _can_resend(body: Any) -> bool:
    """Return whether a body can be sent a second time. aiohttp rewinds files itself."""
    if isinstance(body, (bytes, BytesPayload)):
        return True
    if isinstance(body, aiohttp.IOBasePayload):
        return bool(body._value.seekable())  # noqa: SLF001 - no public access  # pyright: ignore[reportPrivateUsage]
    return isinstance(body, aiohttp.MultipartWriter) and all(_can_resend(part) for part, *_ in body)


def _snapshot(request: ClientRequest) -> RequestSnapshot:
    body: Any = request.body
    if isinstance(body, BytesPayload):
        body = body._value  # noqa: SLF001 - no public access  # pyright: ignore[reportPrivateUsage]
    # With `compress`, aiohttp compresses the body while it sends it. The headers describe the
    # compressed body, which is not available here.
    is_bytes = isinstance(body, (bytes, bytearray, memoryview)) and not request.compress
    body_bytes = bytes(cast("bytes", body)) if is_bytes else None
    return RequestSnapshot(request.method, str(request.url), request.headers.items(), body_bytes)


def _classify_error(error: Exception, repeatable: bool) -> Outcome:  # noqa: FBT001 - passed by position
    detail, timeout = type(error).__name__, isinstance(error, TimeoutError)
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return messages.classify_proxy_refusal(error.status)
    if isinstance(error, _PERMANENT_TLS_ERRORS):
        return PERMANENT
    if isinstance(error, _NOT_SENT_ERRORS):
        return Outcome(Kind.TRANSIENT, timeout=timeout, detail=detail)
    if isinstance(error, _MAYBE_SENT_ERRORS):
        return Outcome(Kind.TRANSIENT, repeatable=repeatable, timeout=timeout, detail=detail)
    return PERMANENT


def _classify_response(policy: Policy, repeatable: bool, response: ClientResponse) -> Outcome:  # noqa: FBT001 - passed by position
    headers = response.headers
    return messages.classify_status(response.status, headers, policy, repeatable=repeatable)


async def _release_connection(response: ClientResponse) -> bool:
    """Drain a short body, and release the connection; return whether the whole body was read."""
    is_complete = False
    with suppress(aiohttp.ClientError):  # if reading fails, the connection is closed
        if messages.is_worth_draining(response.headers):
            body = DrainedBody()
            with event_loops.timeout(body.timeout):
                async for chunk in response.content.iter_any():
                    if not body.add(chunk):
                        break
                else:
                    response._body = body.content()  # noqa: SLF001 - no public setter  # pyright: ignore[reportPrivateUsage]
                    await response.read()  # waits until the connection is released
                    is_complete = True
    if not is_complete:
        response.close()
        await response.wait_for_close()
    return is_complete


_HTTP_FUNCTIONS = HttpClientFunctions(
    is_async=True,
    classify_error=_classify_error,
    classify_response=_classify_response,
    release_connection=_release_connection,
    snapshot=_snapshot,
)
