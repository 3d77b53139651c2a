"""Interceptors for `grpc` and `grpc.aio` servers: prevent retries by both server and clients.

    server = grpc.server(threads, interceptors=[OneRetryLayerInterceptor()])
    server = grpc.aio.server(interceptors=[AsyncOneRetryLayerInterceptor()])

Deadlines: all calls that a handler makes share the deadline of the handler's own client.

Retries: a handler may fail because one of its calls was given up after retries. The trailers then
contain `grpc-retry-pushback-ms: -1`, which gRPC and tarry understand as "do not retry". Two cases:

- The handler raises an error. If the error comes from a call that was given up, the status is
  UNAVAILABLE, unless the handler has set another code.
- The handler sets a code or aborts. The code does not show its cause. A code that means a failure
  of the server is attributed to the call that was given up, unless the handler sends a pushback of
  its own.
"""

from __future__ import annotations

import inspect
from contextvars import copy_context
from functools import wraps
from typing import TYPE_CHECKING, Any

from tarry.adapters.grpc.library import grpc
from tarry.runtime import deadlines, error_record
from tarry.runtime.clocks import system

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import TracebackType
    from typing import Self

_PUSHBACK_MS = "grpc-retry-pushback-ms"
_SERVER_FAILURES = frozenset(
    getattr(grpc.StatusCode, name)
    for name in ("UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAVAILABLE", "DEADLINE_EXCEEDED")
)
_NO_DEADLINE_S = 1e9
"""A `grpc` server reports more remaining seconds than this for a call without a deadline."""
_END_OF_STREAM = object()


class OneRetryLayerInterceptor:
    """Passes client deadlines to handlers, and marks failures that were retried here already."""

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the wrapped handler of a method."""
        return _wrap_handler(continuation(handler_call_details))


class AsyncOneRetryLayerInterceptor:
    """The same as `OneRetryLayerInterceptor`, for a `grpc.aio` server."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the wrapped handler of a method."""
        return _wrap_handler(await continuation(handler_call_details))


class _HandlerContext:
    """The context that a handler gets. It records the status and the trailers the handler sets."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._given_up = error_record.GiveUpLog()
        self._deadline_key: deadlines.DeadlineKey | None = None
        self._code: Any = None
        self._trailers: tuple[Any, ...] = ()
        self._aborted = False

    def activate(self) -> None:
        """Set the deadline and the log of given-up calls in the current context."""
        error_record.give_up_log.set(self._given_up)
        remaining = self._context.time_remaining()
        if remaining is not None and remaining < _NO_DEADLINE_S:
            self._deadline_key = deadlines.enter(system.now() + remaining)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if not self._aborted:
            if error is not None and self._code is None and self._given_up.find(error):
                self.set_code(grpc.StatusCode.UNAVAILABLE)
                self._context.set_details("a service behind this one does not answer")
            self._set_trailers(self._code, self._trailers)
        self._given_up.close()
        if self._deadline_key is not None:
            deadlines.end(self._deadline_key)

    def set_code(self, code: Any) -> None:
        """Set the status code."""
        self._code = code
        self._context.set_code(code)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Set the trailing metadata."""
        self._trailers = tuple(trailing_metadata)
        self._context.set_trailing_metadata(trailing_metadata)

    def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> Any:
        """Abort the call; on a `grpc.aio` server the return value must be awaited."""
        self._aborted = True
        self._set_trailers(code, tuple(trailing_metadata or ()) or self._trailers)
        return self._context.abort(code, details)

    def abort_with_status(self, status: Any) -> Any:
        """Abort the call with a `grpc.Status`."""
        return self.abort(status.code, status.details, status.trailing_metadata)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def _set_trailers(self, code: Any, trailers: tuple[Any, ...]) -> None:
        has_pushback = any(key == _PUSHBACK_MS for key, _ in trailers)
        if code in _SERVER_FAILURES and self._given_up and not has_pushback:
            trailers = (*trailers, (_PUSHBACK_MS, "-1"))
        if trailers:
            self._context.set_trailing_metadata(trailers)


def _wrap_handler(handler: Any) -> Any:
    """Return a handler that runs with a `_HandlerContext`; None for an unknown method."""
    if handler is None:
        return None
    request_type = "stream" if handler.request_streaming else "unary"
    response_type = "stream" if handler.response_streaming else "unary"
    call_type = f"{request_type}_{response_type}"
    behavior = getattr(handler, call_type)
    if getattr(behavior, "experimental_non_blocking", False):
        return handler  # it may send its response after it has returned
    if inspect.isasyncgenfunction(behavior):
        wrapped: Callable[..., Any] = _wrap_async_stream(behavior)
    elif inspect.iscoroutinefunction(behavior):
        wrapped = _wrap_coroutine(behavior)
    else:
        wrapped = (_wrap_stream if handler.response_streaming else _wrap_function)(behavior)
    make_handler = getattr(grpc, f"{call_type}_rpc_method_handler")
    return make_handler(
        wraps(behavior)(wrapped), handler.request_deserializer, handler.response_serializer
    )


def _wrap_function(behavior: Callable[..., Any]) -> Callable[..., Any]:
    def handle(request: Any, context: Any) -> Any:
        run = copy_context().run  # a copy, because the thread later serves other calls
        with _HandlerContext(context) as wrapped:
            run(wrapped.activate)
            return run(behavior, request, wrapped)

    return handle


def _wrap_stream(behavior: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def handle(request: Any, context: Any) -> Iterator[Any]:
        run = copy_context().run
        with _HandlerContext(context) as wrapped:
            run(wrapped.activate)
            messages = iter(run(behavior, request, wrapped))
            while (message := run(next, messages, _END_OF_STREAM)) is not _END_OF_STREAM:
                yield message

    return handle


def _wrap_coroutine(behavior: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Any, context: Any) -> Any:
        with _HandlerContext(context) as wrapped:
            wrapped.activate()  # in the context of this call: each call has its own task
            return await behavior(request, wrapped)

    return handle


def _wrap_async_stream(behavior: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
        with _HandlerContext(context) as wrapped:
            wrapped.activate()
            async for message in behavior(request, wrapped):
                yield message

    return handle


# Registered instead of derived: grpcio is untyped, and a class derived from Any is unchecked.
grpc.ServerInterceptor.register(OneRetryLayerInterceptor)
grpc.aio.ServerInterceptor.register(AsyncOneRetryLayerInterceptor)
grpc.ServicerContext.register(_HandlerContext)
grpc.aio.ServicerContext.register(_HandlerContext)
