"""The interceptors for grpc.aio, which takes one for each kind of call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.adapters.grpc.calls import Calls, has_no_time, metadata_of
from tarry.adapters.grpc.library import grpc
from tarry.runtime import async_driver

if TYPE_CHECKING:
    from typing import Self

    from tarry.adapters.grpc.calls import GrpcCall, Repeatable
    from tarry.adapters.http.origins import Downstreams
    from tarry.core.policy import Policy


def async_retry_interceptors(
    *,
    policy: Policy | None = None,
    downstream: Downstreams = None,
    repeatable: Repeatable = True,
    target: str | None = None,
) -> list[Any]:
    """Return the interceptors of a `grpc.aio` channel; the arguments are of `RetryInterceptor`."""
    calls = Calls(policy, downstream, repeatable, target)
    return [_UnaryUnary(calls), _UnaryStream(calls)]


class _UnaryUnary:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        if has_no_time(client_call_details):
            return await continuation(client_call_details, request)
        call, limit = self._calls.new(client_call_details), self._calls.attempt_timeout

        async def attempt() -> Any:
            details = _details(call, client_call_details, limit)
            answer = await continuation(details, request)
            await answer  # raises what it failed with; it may be awaited again
            return answer

        return await async_driver.drive(call, attempt, (), {})


class _UnaryStream:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        if has_no_time(client_call_details):
            return await continuation(client_call_details, request)
        call = self._calls.new(client_call_details)

        async def attempt() -> _Messages:
            # Without the policy's attempt_timeout: gRPC would end the whole stream by it.
            details = _details(call, client_call_details, None)
            messages = aiter(await continuation(details, request))
            try:
                return _Messages([await anext(messages)], messages)
            except StopAsyncIteration:
                return _Messages([], messages)

        return await async_driver.drive(call, attempt, (), {})


class _Messages:
    """A stream whose first message was read already. Its call, gRPC knows: the last one made."""

    def __init__(self, first: list[Any], rest: Any) -> None:
        self._first = first
        self._rest = rest

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return self._first.pop() if self._first else await anext(self._rest)


def _details(call: GrpcCall, given: Any, attempt_timeout: float | None) -> Any:
    return grpc.aio.ClientCallDetails(
        given.method,
        call.limit(attempt_timeout),
        grpc.aio.Metadata(*metadata_of(call, given)),
        given.credentials,
        given.wait_for_ready,
    )


# Registered and not derived: the package has no types, and what derives from it would have none.
grpc.aio.UnaryUnaryClientInterceptor.register(_UnaryUnary)
grpc.aio.UnaryStreamClientInterceptor.register(_UnaryStream)
