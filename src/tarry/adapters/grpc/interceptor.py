"""The client interceptors: one for `grpc` channels, two for `grpc.aio` channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.adapters.grpc.call import CallFactory, attempt_metadata, is_timeout_over
from tarry.adapters.grpc.library import grpc
from tarry.adapters.grpc.stream_call import RetriedStream
from tarry.adapters.grpc.unary_call import RetriedFuture
from tarry.runtime import drivers

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from tarry.adapters.grpc.call import GrpcCall, Repeatable
    from tarry.adapters.http.origins import Downstreams
    from tarry.core.policy import Policy


class _CallDetails(NamedTuple):
    """The call details of an attempt. Some interceptors expect a named tuple, as gRPC's own is."""

    method: Any
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class RetryInterceptor:
    """Retries unary calls, and response streams until their first message has arrived.

    Args:
        policy: the retry policy; by default `tarry.Policy()`.
        downstream: one `tarry.Downstream` for all calls, or a function that returns one for a
            target. By default each target gets its own, with a breaker and a retry budget.
        repeatable: whether a call may be repeated after the server may have read it: True, False,
            or a function of the method ("shop.Payments/Charge").
        target: the address of the channel, which names the downstream. Without it there is one
            downstream for each gRPC service.
    """

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        downstream: Downstreams = None,
        repeatable: Repeatable = True,
        target: str | None = None,
    ) -> None:
        self._calls = CallFactory(policy, downstream, repeatable, target)

    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Make a call and retry it; return a future if the user called `future()`."""
        if is_timeout_over(client_call_details):
            return continuation(client_call_details, request)
        call, timeout = self._calls.new_call(client_call_details), self._calls.attempt_timeout

        def send() -> Any:
            return continuation(_attempt_details(call, client_call_details, timeout), request)

        first = _send_first_attempt(call, send)
        if _is_future_call(first):
            return RetriedFuture(call, send, first)
        started = [first]

        def attempt() -> Any:
            response = started.pop() if started else send()
            response.result()  # raises the error of a failed attempt
            return response

        return drivers.drive(call, attempt, (), {})

    def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Start a response stream; it is retried when its first message is requested."""
        if is_timeout_over(client_call_details):
            return continuation(client_call_details, request)
        call = self._calls.new_call(client_call_details)

        def send() -> Any:
            # Without the policy's attempt_timeout: gRPC would apply it to the whole stream.
            return continuation(_attempt_details(call, client_call_details, None), request)

        return RetriedStream(call, send, _send_first_attempt(call, send))


def _send_first_attempt(call: GrpcCall, send: Callable[[], Any]) -> Any:
    """Send the first attempt in the thread of the caller, as gRPC does."""
    try:
        call.start_first_attempt()
        return send()
    except BaseException:
        call.abort()
        raise


def _is_future_call(response: Any) -> bool:
    """Return whether the user called `future()`; gRPC does not tell interceptors.

    A blocking call is done when its response is available here, a future usually is not. A future
    that failed at once is done too, but unlike the error of a blocking call it can be iterated.
    """
    return not response.done() or (
        hasattr(response, "__next__") and response.exception() is response
    )


def _attempt_details(
    call: GrpcCall, call_details: Any, attempt_timeout: float | None
) -> _CallDetails:
    return _CallDetails(
        call_details.method,
        call.time_limit(attempt_timeout),
        attempt_metadata(call, call_details),
        call_details.credentials,
        getattr(call_details, "wait_for_ready", None),
        getattr(call_details, "compression", None),
    )


# --- grpc.aio -------------------------------------------------------------------------------------


def async_retry_interceptors(
    *,
    policy: Policy | None = None,
    downstream: Downstreams = None,
    repeatable: Repeatable = True,
    target: str | None = None,
) -> list[Any]:
    """Return the interceptors for a `grpc.aio` channel, which needs one for each type of call.

    The arguments are those of `RetryInterceptor`.
    """
    calls = CallFactory(policy, downstream, repeatable, target)
    return [_AsyncUnaryUnaryInterceptor(calls), _AsyncUnaryStreamInterceptor(calls)]


class _AsyncUnaryUnaryInterceptor:
    def __init__(self, calls: CallFactory) -> None:
        self._calls = calls

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        if is_timeout_over(client_call_details):
            return await continuation(client_call_details, request)
        call, timeout = self._calls.new_call(client_call_details), self._calls.attempt_timeout

        async def attempt() -> Any:
            details = _async_attempt_details(call, client_call_details, timeout)
            response = await continuation(details, request)
            await response  # raises the error of a failed attempt; gRPC may await it again
            return response

        return await drivers.drive_async(call, attempt, (), {})


class _AsyncUnaryStreamInterceptor:
    def __init__(self, calls: CallFactory) -> None:
        self._calls = calls

    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        if is_timeout_over(client_call_details):
            return await continuation(client_call_details, request)
        call = self._calls.new_call(client_call_details)

        async def attempt() -> _StartedStream:
            # Without the policy's attempt_timeout: gRPC would apply it to the whole stream.
            details = _async_attempt_details(call, client_call_details, None)
            messages = aiter(await continuation(details, request))
            try:
                return _StartedStream([await anext(messages)], messages)
            except StopAsyncIteration:
                return _StartedStream([], messages)

        return await drivers.drive_async(call, attempt, (), {})


class _StartedStream:
    """A response stream whose first message has been read.

    An iterator suffices, because gRPC itself keeps the call object of the last attempt.
    """

    def __init__(self, first_message: list[Any], messages: Any) -> None:
        self._first_message = first_message
        self._messages = messages

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return self._first_message.pop() if self._first_message else await anext(self._messages)


def _async_attempt_details(call: GrpcCall, call_details: Any, attempt_timeout: float | None) -> Any:
    return grpc.aio.ClientCallDetails(
        call_details.method,
        call.time_limit(attempt_timeout),
        grpc.aio.Metadata(*attempt_metadata(call, call_details)),
        call_details.credentials,
        call_details.wait_for_ready,
    )


# Registered instead of derived: grpcio is untyped, and a class derived from Any is unchecked.
grpc.ClientCallDetails.register(_CallDetails)
grpc.UnaryUnaryClientInterceptor.register(RetryInterceptor)
grpc.UnaryStreamClientInterceptor.register(RetryInterceptor)
grpc.aio.UnaryUnaryClientInterceptor.register(_AsyncUnaryUnaryInterceptor)
grpc.aio.UnaryStreamClientInterceptor.register(_AsyncUnaryStreamInterceptor)
