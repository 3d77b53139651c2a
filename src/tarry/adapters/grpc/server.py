"""The server's side of retrying at one layer, for gRPC servers, plain and asyncio.

    server = grpc.server(threads, interceptors=[OneLayerInterceptor()])
    server = grpc.aio.server(interceptors=[AsyncOneLayerInterceptor()])

A call shares the deadline of its client with every call its handler makes. And where a handler
failed because a call below it was given up on, the trailers say `grpc-retry-pushback-ms: -1`, which
gRPC and tarry take for "do not retry". An error that leaves the handler is UNAVAILABLE then, unless
the handler has set another code. A handler that sets a code or aborts does not say why: a code that
is the server's fault is taken for the consequence of a call that was given up on before, unless the
handler sends a pushback of its own.
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

_PUSHBACK = "grpc-retry-pushback-ms"
_FAULTS = frozenset(
    getattr(grpc.StatusCode, name)
    for name in ("UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAVAILABLE", "DEADLINE_EXCEEDED")
)
_FOR_EVER = 1e9
"""Seconds: a plain server gives the end of all days for a call without a deadline."""
_END = object()


class OneLayerInterceptor:
    """Carries deadlines in, and tells clients when not to retry."""

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the handler of a method, in our care."""
        return _guarded(continuation(handler_call_details))


class AsyncOneLayerInterceptor:
    """Carries deadlines in, and tells clients when not to retry, on a server of `grpc.aio`."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the handler of a method, in our care."""
        return _guarded(await continuation(handler_call_details))


class _Handling:
    """One call of a handler: the context that it is given, which hears what it says of its end."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._given_up = error_record.Ends()
        self._key: deadlines.Key | None = None
        self._code: Any = None
        self._trailers: tuple[Any, ...] = ()
        self._aborted = False

    def begin(self) -> None:
        """Let what runs in this context share the deadline, and hear how its calls end."""
        error_record.ends.set(self._given_up)
        left = self._context.time_remaining()
        if left is not None and left < _FOR_EVER:
            self._key = deadlines.enter(system.now() + left)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if not self._aborted:
            if error is not None and self._code is None and self._given_up.behind(error):
                self.set_code(grpc.StatusCode.UNAVAILABLE)
                self._context.set_details("a service behind this one does not answer")
            self._close_with(self._code, self._trailers)
        self._given_up.close()
        if self._key is not None:
            deadlines.end(self._key)

    def set_code(self, code: Any) -> None:
        """Set the code of the status."""
        self._code = code
        self._context.set_code(code)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Set what is sent with the status."""
        self._trailers = tuple(trailing_metadata)
        self._context.set_trailing_metadata(trailing_metadata)

    def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> Any:
        """End the call; on a server of `grpc.aio` this is awaited."""
        self._aborted = True
        self._close_with(code, tuple(trailing_metadata or ()) or self._trailers)
        return self._context.abort(code, details)

    def abort_with_status(self, status: Any) -> Any:
        """End the call with a status of the user's making."""
        return self.abort(status.code, status.details, status.trailing_metadata)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def _close_with(self, code: Any, trailers: tuple[Any, ...]) -> None:
        if code in _FAULTS and self._given_up and all(key != _PUSHBACK for key, _ in trailers):
            trailers = (*trailers, (_PUSHBACK, "-1"))
        if trailers:
            self._context.set_trailing_metadata(trailers)


def _guarded(handler: Any) -> Any:
    """Return the same handler with our word on its failures; None: there is no such method."""
    if handler is None:
        return None
    requests = "stream" if handler.request_streaming else "unary"
    kind = f"{requests}_{'stream' if handler.response_streaming else 'unary'}"
    behavior = getattr(handler, kind)
    if getattr(behavior, "experimental_non_blocking", False):  # it answers when it likes
        return handler
    if inspect.isasyncgenfunction(behavior):
        guarded: Callable[..., Any] = _async_stream(behavior)
    elif inspect.iscoroutinefunction(behavior):
        guarded = _coroutine(behavior)
    else:
        guarded = (_stream if handler.response_streaming else _function)(behavior)
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(wraps(behavior)(guarded), handler.request_deserializer, handler.response_serializer)


def _function(behavior: Callable[..., Any]) -> Callable[..., Any]:
    def handle(request: Any, context: Any) -> Any:
        run = copy_context().run  # the thread serves others after this
        with _Handling(context) as handling:
            run(handling.begin)
            return run(behavior, request, handling)

    return handle


def _stream(behavior: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def handle(request: Any, context: Any) -> Iterator[Any]:
        run = copy_context().run
        with _Handling(context) as handling:
            run(handling.begin)
            messages = iter(run(behavior, request, handling))
            while (message := run(next, messages, _END)) is not _END:
                yield message

    return handle


def _coroutine(behavior: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Any, context: Any) -> Any:
        with _Handling(context) as handling:
            handling.begin()  # each call has a task of its own
            return await behavior(request, handling)

    return handle


def _async_stream(behavior: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
        with _Handling(context) as handling:
            handling.begin()
            async for message in behavior(request, handling):
                yield message

    return handle


# Registered and not derived: the package has no types, and what derives from it would have none.
grpc.ServerInterceptor.register(OneLayerInterceptor)
grpc.aio.ServerInterceptor.register(AsyncOneLayerInterceptor)
grpc.ServicerContext.register(_Handling)
grpc.aio.ServicerContext.register(_Handling)
