"""Retries and hedging for httpx, and for httpx2, which has the same interface.

    client = httpx.Client(transport=RetryTransport(httpx.HTTPTransport()))

The transport handles every request and response of the client. When it gives up, it returns the
last response, as the inner transport would: a 503 is returned, not raised.

httpx and httpx2 are both optional. Their classes are therefore recognised by name.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

from tarry import errors
from tarry.adapters.http import messages
from tarry.adapters.http.messages import DrainedBody, HttpClientFunctions, RequestSnapshot
from tarry.adapters.http.send import LRUCache, RequestSender, reject_unknown_arguments
from tarry.core.outcome import PERMANENT, Kind, Outcome
from tarry.runtime import event_loops, scopes
from tarry.wire import http

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Never, Self

    import httpx
    import httpx2

    from tarry.adapters.http.hand_off import AsyncHandOff, SyncHandOff
    from tarry.adapters.http.messages import KeyOption
    from tarry.adapters.http.send import DownstreamArgument
    from tarry.core.hedging import Hedging
    from tarry.core.policy import Policy

    # Base classes for type checkers only: at run time, neither httpx nor httpx2 requires them.
    class _BaseTransport(httpx.BaseTransport, httpx2.BaseTransport):
        def handle_request(self, request: Any) -> Any: ...

    class _AsyncBaseTransport(httpx.AsyncBaseTransport, httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any: ...

else:
    _BaseTransport = _AsyncBaseTransport = object

__all__ = ["AsyncRetryTransport", "RetryTransport"]

H = TypeVar("H", "SyncHandOff", "AsyncHandOff")
"""The client of the retry service to which failed requests are handed off."""

_CacheKey: TypeAlias = "tuple[str, str, str, int | None, type[Any]]"
"""Method, scheme, host and port of requests, and the class of their bodies."""

_BYTES_CLASS_NAME = "ByteStream"
"""The class name of bodies that are bytes, including empty bodies."""
_TIMEOUT_PHASES = ("connect", "read", "write", "pool")
_CONNECT_SHARE = 0.9
"""The share of an attempt's time limit that is available for connecting. Connecting thus times out
before the attempt is cancelled: unlike a cancellation, the timeout shows that nothing was sent."""
_NOT_SENT_ERRORS = frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout"})
_MAYBE_SENT_ERRORS = {"TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError"}
"""The class names of errors after which the server may have read the request."""

_get_scope = scopes.current_scope.get


def _checked_transport(transport: Any, class_name: str, method: str) -> Any:
    """Return the user's transport, or a new one; raise if it retries itself or lacks `method`."""
    if transport is None:
        for package in ("httpx", "httpx2"):
            try:
                module = import_module(package)
            except ImportError:
                continue
            return getattr(module, class_name)()
        raise errors.MissingExtra("tarry.adapters.httpx needs httpx: pip install 'tarry[httpx]'")
    retries: Any = getattr(getattr(transport, "_pool", None), "_retries", 0)
    if retries or hasattr(transport, "is_tarry_transport"):
        raise errors.ConfigurationError(
            f"the inner transport must not retry, got {transport!r}: the attempts of two layers "
            f"multiply; leave retries= of {class_name} at 0, and use "
            "policy=tarry.Policy(max_attempts=4)"
        )
    if isinstance(transport, type) or not hasattr(transport, method):
        raise errors.ConfigurationTypeError(
            f"the inner transport must be {class_name}() or similar, got {transport!r}"
        )
    return transport


def _package_name(httpx_object: object) -> str:
    """Return "httpx" or "httpx2"."""
    return type(httpx_object).__module__.partition(".")[0]


class _AttemptTimeouts(dict[str, Any]):
    """The timeouts of one attempt: a copy of the user's, which `_release_connection` may change."""


def _can_resend_body(request: Any, *, in_parallel: bool = False) -> bool:
    """Return whether the body can be sent a second time: bytes can, an iterator cannot.

    httpx rewinds the files of a form. But hedged attempts cannot read one file in parallel.
    """
    stream_type = type(request.stream).__name__
    if stream_type == _BYTES_CLASS_NAME:
        return True
    if stream_type != "MultipartStream":
        return False
    for field in request.stream.fields:
        file: Any = getattr(field, "file", b"")
        is_seekable: bool = hasattr(file, "seekable") and file.seekable()
        if not isinstance(file, (bytes, str)) and (in_parallel or not is_seekable):
            return False
    return True


def _copy_for_attempt(request: Any, attempt_number: int, attempt_timeout: float | None) -> Any:
    """Return a copy of the request, with the headers and timeouts of one attempt."""
    time_limit = messages.limit_by_deadline(attempt_timeout)
    timeouts = _AttemptTimeouts(request.extensions.get("timeout") or {})
    if time_limit is not None:
        limit = max(time_limit, messages.MIN_TIMEOUT_S)
        for phase in _TIMEOUT_PHASES:
            phase_limit = limit * _CONNECT_SHARE if phase in ("connect", "pool") else limit
            timeouts[phase] = min(phase_limit, timeouts.get(phase) or phase_limit)
    request_copy = type(request)(
        request.method,
        request.url,
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "timeout": timeouts},
    )
    messages.set_attempt_headers(request_copy.headers, attempt_number, time_limit)
    return request_copy


def _snapshot(request: Any) -> RequestSnapshot:
    is_bytes = type(request.stream).__name__ == _BYTES_CLASS_NAME
    body = b"".join(request.stream) if is_bytes else None
    return RequestSnapshot(request.method, str(request.url), request.headers.multi_items(), body)


def _classify_error(error: Exception, repeatable: bool) -> Outcome:  # noqa: FBT001 - passed by position
    class_names = {base.__name__ for base in type(error).__mro__}
    detail = type(error).__name__
    timeout = "TimeoutException" in class_names
    if class_names & _NOT_SENT_ERRORS:
        if "ConnectError" in class_names and _has_permanent_tls_cause(error):
            return PERMANENT
        local = "PoolTimeout" in class_names  # no connection was free in the client's own pool
        return Outcome(Kind.TRANSIENT, timeout=timeout, local=local, detail=detail)
    if "ProxyError" in class_names and (status := str(error).partition(" ")[0]).isdecimal():
        return messages.classify_proxy_refusal(int(status))
    if class_names & _MAYBE_SENT_ERRORS:
        return Outcome(Kind.TRANSIENT, repeatable=repeatable, timeout=timeout, detail=detail)
    return PERMANENT


def _has_permanent_tls_cause(error: Exception) -> bool:
    """Return whether a permanent TLS error, such as an invalid certificate, is the cause.

    The cause of an httpx error is an httpcore error, or the original error if the transport does
    not use httpcore. The original error is the cause of the httpcore error, or its context if it
    has no cause. The context of the original error is not searched, because it may be an unrelated
    error of the user.
    """
    cause = error.__cause__
    if cause is not None and messages.is_permanent_tls_error(cause):
        return True
    original = None if cause is None else cause.__cause__ or cause.__context__
    while original is not None and not messages.is_permanent_tls_error(original):
        original = original.__cause__
    return original is not None


def _release_connection(response: Any) -> bool:
    """Drain a short body, and release the connection; return whether the whole body was read."""
    stream, is_complete = response.stream, False
    with suppress(Exception):  # if reading fails, the connection is closed
        if messages.is_worth_draining(response.headers):
            body = DrainedBody()
            with suppress(RuntimeError):  # without a copy in `_send`, `response.request` is not set
                timeouts = response.request.extensions.get("timeout")
                if isinstance(timeouts, _AttemptTimeouts):
                    timeouts["read"] = min(timeouts.get("read") or body.timeout, body.timeout)
            is_complete = all(map(body.add, stream)) and _restore_body(response, body)
    stream.close()
    return is_complete


async def _release_connection_async(response: Any) -> bool:
    stream, is_complete = response.stream, False
    with suppress(Exception):
        if messages.is_worth_draining(response.headers):
            body = DrainedBody()
            with event_loops.timeout(body.timeout):
                async for chunk in stream:
                    if not body.add(chunk):
                        break
                else:
                    is_complete = _restore_body(response, body)
    await stream.aclose()
    return is_complete


def _restore_body(response: Any, body: DrainedBody) -> bool:
    """Put the body back into the response, so that the user can read it; return True."""
    response.stream = sys.modules[_package_name(response)].ByteStream(body.content())
    return True


# Not methods of the transport: bound methods in its sender would be a reference cycle, and the
# connections of an unused transport would stay open until the garbage collector breaks the cycle.
def _send(
    transport: Any, request: Any, *, attempt_timeout: float | None, attempt_number: int = 1
) -> Any:
    if attempt_number > 1 or attempt_timeout is not None or _get_scope() is not None:
        request = _copy_for_attempt(request, attempt_number, attempt_timeout)
        response = transport.handle_request(request)
        # For `_release_connection`, which changes the timeouts. The client later replaces this copy
        # with the user's request.
        response.request = request
        return response
    return transport.handle_request(request)


def _send_unchanged(transport: Any, request: Any) -> Any:
    return transport.handle_request(request)  # not bound in advance: tests may patch the method


async def _send_async(
    transport: Any, request: Any, *, attempt_timeout: float | None, attempt_number: int = 1
) -> Any:
    if attempt_number > 1 or attempt_timeout is not None or _get_scope() is not None:
        request = _copy_for_attempt(request, attempt_number, attempt_timeout)
    return await transport.handle_async_request(request)


def _send_unchanged_async(transport: Any, request: Any) -> Any:
    return transport.handle_async_request(request)


_HTTP_FUNCTIONS = HttpClientFunctions(
    is_async=False,
    classify_error=_classify_error,
    classify_response=messages.make_response_classifier(
        lambda response: response.headers.multi_items()
    ),
    release_connection=_release_connection,
    snapshot=_snapshot,
    async_client="an AsyncClient with an AsyncRetryTransport",
)


def _raise_wrong_client(transport: object, *_: object) -> Never:
    """Raise because a sync transport was passed to an async client, or the opposite."""
    raise errors.ConfigurationTypeError(
        "a Client takes a RetryTransport, and an AsyncClient an AsyncRetryTransport; this client "
        f"got the wrong one, {type(transport).__name__}"
    )


class _RetryTransportBase(Generic[H]):
    """The code that both transports share."""

    _http_functions: ClassVar[HttpClientFunctions]
    _attempt_functions: ClassVar[tuple[Callable[..., Any], Callable[..., Any]]]
    """The arguments `send` and `send_unchanged` of the `RequestSender`, before `__init__` binds the
    inner transport."""
    _inner_class_and_method: ClassVar[tuple[str, str]]
    """The class of the default inner transport, and the method of an inner transport that sends."""
    is_tarry_transport: ClassVar[bool] = True
    """Marks a transport that retries, so that `_checked_transport` rejects it."""

    def __init__(
        self,
        transport: Any = None,
        *,
        policy: Policy | None = None,
        hedging: Hedging | None = None,
        downstream: DownstreamArgument = None,
        idempotency_key: KeyOption = None,
        hand_off: H | None = None,
        mark_given_up: bool = True,
        **unknown: Never,
    ) -> None:
        reject_unknown_arguments(self, unknown)
        self._transport: Any = _checked_transport(transport, *self._inner_class_and_method)
        self._sender = RequestSender(
            self._http_functions,
            *(partial(send, self._transport) for send in self._attempt_functions),
            policy=policy,
            hedging=hedging,
            downstream=downstream,
            idempotency_key=idempotency_key,
            hand_off=hand_off,
            mark_given_up=mark_given_up,
        )
        self._send_cache: LRUCache[_CacheKey, Callable[..., Any]] = LRUCache()
        """The functions that send requests with an idempotent method and a body of bytes."""

    def _final_response(self, error: errors.ResultNotAccepted) -> Any:
        response = messages.final_response(error)
        if self._sender.mark_given_up and messages.forbids_more_retries(error):
            response.headers[http.SHOULD_RETRY_HEADER] = "false"
        return response

    def _send_function(self, request: Any, cache_key: _CacheKey) -> Callable[..., Any]:
        """Return the function that sends this request with retries; cache it if possible."""
        sender, (method, scheme, host, port, stream_class) = self._sender, cache_key
        can_cache = method in http.IDEMPOTENT_METHODS and stream_class.__name__ == _BYTES_CLASS_NAME
        repeatable = can_cache or (
            messages.try_make_repeatable(
                method, request.headers, sender.idempotency_key, sender.policy, request, _snapshot
            )
            and _can_resend_body(request, in_parallel=sender.hedging is not None)
        )
        send = sender.send_function((method, scheme, host, port, repeatable))
        return self._send_cache.add(cache_key, send) if can_cache else send

    def _explain_error(self, request: Any, error: Exception) -> None:
        """Raise a clearer error if httpx and httpx2 are mixed; otherwise add a note if it helps."""
        inner, client = _package_name(self._transport), _package_name(request)
        if isinstance(error, AssertionError) and {inner, client} == {"httpx", "httpx2"}:
            raise errors.ConfigurationError(
                f"the inner transport is from {inner}, and the client is from {client}: use a "
                f"transport of the client's package, {client}.{type(self._transport).__name__}()"
            ) from error
        messages.add_not_repeatable_note(error, can_resend_body=_can_resend_body(request))


class RetryTransport(_RetryTransportBase["SyncHandOff"], _BaseTransport):
    """Retries or hedges the requests of an `httpx.Client`.

    Args:
        transport: the inner transport, which sends; by default an `HTTPTransport()`.
        policy: the retry policy; by default `tarry.Policy()`.
        hedging: a hedging policy instead of `policy`: a repeatable request is sent a second time
            when the first response takes too long.
        downstream: one `tarry.Downstream` for all origins, or a function that returns one for an
            origin. By default each origin gets its own, with a breaker and a retry budget.
        idempotency_key: "auto" or a function of the request adds an Idempotency-Key to requests
            that are not idempotent, which makes them repeatable. All attempts send the same key.
            In a handler behind `IdempotencyMiddleware`, "auto" derives the key from the key of the
            request that is being handled; otherwise it is random.
        hand_off: a `tarry.Client` or `tarry.HandOff`. A repeatable request that cannot succeed now
            is enqueued there, and `HandedOff` is raised.
        mark_given_up: whether a response that is returned after the last attempt gets the header
            `x-should-retry: false`, so that an SDK that obeys it does not retry again.
    """

    _http_functions = _HTTP_FUNCTIONS
    _attempt_functions = _send, _send_unchanged
    _inner_class_and_method = "HTTPTransport", "handle_request"

    def handle_request(self, request: Any) -> Any:
        """Send a request and retry it; return the last response."""
        try:
            # Reading `_uri_reference` directly saves a call for each property of the httpx URL.
            url = request.url
            url = getattr(url, "_uri_reference", url)
            key = request.method, url.scheme, url.host, url.port, request.stream.__class__
            return (self._send_cache.get(key) or self._send_function(request, key))(request)
        except errors.ResultNotAccepted as error:  # given up: the last response is a failure
            self._sender.hand_off.try_hand_off(request, error)
            return self._final_response(error)
        except errors.BlockingWait as error:  # given up: a wait would block the event loop
            return messages.last_response_or_raise(error)
        except Exception as error:
            self._explain_error(request, error)
            self._sender.hand_off.try_hand_off(request, error)
            raise

    if not TYPE_CHECKING:  # hidden from type checkers, so that they report the wrong client
        handle_async_request = __aenter__ = _raise_wrong_client

    def close(self) -> None:
        """Close the inner transport."""
        self._transport.close()

    def __enter__(self) -> Self:
        self._transport.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._transport.__exit__(*exc_info)


class AsyncRetryTransport(_RetryTransportBase["AsyncHandOff"], _AsyncBaseTransport):
    """Retries or hedges the requests of an `httpx.AsyncClient`.

    The arguments are those of `RetryTransport`, but `hand_off` is a `tarry.AsyncClient`.
    """

    _http_functions = _HTTP_FUNCTIONS._replace(
        is_async=True, release_connection=_release_connection_async
    )
    _attempt_functions = _send_async, _send_unchanged_async
    _inner_class_and_method = "AsyncHTTPTransport", "handle_async_request"

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request and retry it; return the last response."""
        try:
            url = request.url
            url = getattr(url, "_uri_reference", url)
            key = request.method, url.scheme, url.host, url.port, request.stream.__class__
            return await (self._send_cache.get(key) or self._send_function(request, key))(request)
        except errors.ResultNotAccepted as error:
            await self._sender.hand_off.async_try_hand_off(request, error)
            return self._final_response(error)
        except Exception as error:
            self._explain_error(request, error)
            await self._sender.hand_off.async_try_hand_off(request, error)
            raise

    if not TYPE_CHECKING:  # see `RetryTransport`
        handle_request = __enter__ = _raise_wrong_client

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._transport.__aexit__(*exc_info)
