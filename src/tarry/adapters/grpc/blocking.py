"""The interceptor for plain channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.adapters.grpc.calls import Calls, has_no_time, metadata_of
from tarry.adapters.grpc.futures import RetriedFuture
from tarry.adapters.grpc.library import grpc
from tarry.adapters.grpc.streams import RetriedStream
from tarry.runtime import sync_driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.adapters.grpc.calls import GrpcCall, Repeatable
    from tarry.adapters.http.origins import Downstreams
    from tarry.core.policy import Policy


class _Details(NamedTuple):
    """What gRPC is told of an attempt; a named tuple as gRPC's own, which interceptors rely on."""

    method: Any
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class RetryInterceptor:
    """Retries the unary calls of a channel, and its streams until their first message.

    `downstream`: one for all, a function that makes one for a target, or None for a breaker and a
    budget each. `repeatable`: False, or a function of the method ("shop.Payments/Charge") that
    answers False, where a call may not be repeated once the server may have read it. `target`: the
    channel's address, to name the downstream; without it there is one for each service.
    """

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        downstream: Downstreams = None,
        repeatable: Repeatable = True,
        target: str | None = None,
    ) -> None:
        self._calls = Calls(policy, downstream, repeatable, target)

    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Make a call until it is answered for good."""
        if has_no_time(client_call_details):
            return continuation(client_call_details, request)
        call, limit = self._calls.new(client_call_details), self._calls.attempt_timeout

        def send() -> Any:
            return continuation(_details(call, client_call_details, limit), request)

        answer = _first(call, send)
        if _is_live(answer):
            return RetriedFuture(call, send, answer)
        answers = [answer]

        def attempt() -> Any:
            last = answers.pop() if answers else send()
            last.result()  # raises what it failed with
            return last

        return sync_driver.drive(call, attempt, (), {})

    def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Begin a stream; it is retried when its first message is asked for."""
        if has_no_time(client_call_details):
            return continuation(client_call_details, request)
        call = self._calls.new(client_call_details)

        def send() -> Any:
            # Without the policy's attempt_timeout: gRPC would end the whole stream by it.
            return continuation(_details(call, client_call_details, None), request)

        return RetriedStream(call, send, _first(call, send))


def _first(call: GrpcCall, send: Callable[[], Any]) -> Any:
    """Send the first attempt, in the thread of the caller as gRPC does."""
    try:
        call.go_ahead()
        return send()
    except BaseException:
        call.drop()
        raise


def _is_live(answer: Any) -> bool:
    """Say whether the user asked for a future: gRPC does not tell.

    One that has failed at once can be iterated, as the error of a call that blocked cannot.
    """
    return not answer.done() or (hasattr(answer, "__next__") and answer.exception() is answer)


def _details(call: GrpcCall, given: Any, attempt_timeout: float | None) -> _Details:
    return _Details(
        given.method,
        call.limit(attempt_timeout),
        metadata_of(call, given),
        given.credentials,
        getattr(given, "wait_for_ready", None),
        getattr(given, "compression", None),
    )


# Registered and not derived: the package has no types, and what derives from it would have none.
grpc.ClientCallDetails.register(_Details)
grpc.UnaryUnaryClientInterceptor.register(RetryInterceptor)
grpc.UnaryStreamClientInterceptor.register(RetryInterceptor)
