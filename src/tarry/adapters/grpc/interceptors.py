"""The interceptors for gRPC clients and servers, and the options of client channels.

The server interceptors prevent a server and its clients from both retrying the same failure:

    server = grpc.server(threads, interceptors=[OneRetryLayerInterceptor()])
    server = grpc.aio.server(interceptors=[AsyncOneRetryLayerInterceptor()])

All calls that a handler makes share the deadline that the client of the server has set. A handler
may fail because one of its calls was given up after retries. The interceptor then adds a pushback,
which forbids a retry by the client: the trailer `grpc-retry-pushback-ms: -1`. There are two cases:

- The handler raises an error that comes from a call that was given up. The status is UNAVAILABLE
  with the pushback. If the handler has set a code, the second case applies instead.
- The handler sets a code that means a failure of the server, or aborts with one, and any call was
  given up. The pushback is added, unless the handler sends its own.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from contextvars import copy_context
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.adapters.grpc.call import (
    MAX_TRAILERS_ONLY_DELAY_S,
    CallFactory,
    RetriedFuture,
    RetriedStream,
    grpc,
)
from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr
from tarry.runtime import drivers, error_record, scopes
from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator
    from types import TracebackType
    from typing import Self

    from tarry.adapters.grpc.call import GrpcCall, Repeatable
    from tarry.adapters.http.send import DownstreamArgument
    from tarry.core.policy import Policy

_RETRIES_OPTION = "grpc.enable_retries"
_SERVICE_CONFIG_OPTION = "grpc.service_config"
# Metadata keys:
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_PREVIOUS_ATTEMPTS_KEY = "grpc-previous-rpc-attempts"
_SERVER_FAILURE_CODES = frozenset(
    getattr(grpc.StatusCode, name)
    for name in ("UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAVAILABLE", "DEADLINE_EXCEEDED")
)
_NO_DEADLINE_S = 1e9
"""For a call without a deadline, a `grpc` server reports that more seconds than this remain."""
_END_OF_STREAM = object()


class _CallDetails(NamedTuple):
    """The call details of an attempt. Some interceptors expect a named tuple, as gRPC passes it."""

    method: Any
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class RetryInterceptor:
    """Retries unary calls, and calls with a response stream until the response headers arrive.

    Args:
        policy: the retry policy; by default `tarry.Policy()`.
        downstream: one `tarry.Downstream` for all calls, or a function that returns one for a
            name. By default each name gets its own, with a breaker and a retry budget.
        repeatable: whether a call may be sent again after the server has read it: True, False, or a
            function that takes the method ("shop.Payments/Charge") and returns a bool.
        target: the address of the channel. It is used as the name of the downstream. Without it,
            the name is that of the gRPC service.
    """

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        downstream: DownstreamArgument = None,
        repeatable: Repeatable = True,
        target: str | None = None,
    ) -> None:
        self._call_factory = CallFactory(policy, downstream, repeatable, target)

    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Make a call and retry it; return a future if the user called `future()`."""
        if _has_expired_timeout(client_call_details):
            return continuation(client_call_details, request)
        timeout = self._call_factory.attempt_timeout
        call, send, first = self._start_call(continuation, client_call_details, request, timeout)
        if _is_future_call(first):
            return RetriedFuture(call, send, first)
        pending_first = [first]

        def make_attempt() -> Any:
            attempt = pending_first.pop() if pending_first else send()
            attempt.result()  # raises the error of a failed attempt
            return attempt

        return drivers.drive(call, make_attempt, (), {})

    def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Start a response stream. It is retried while the user waits for its headers."""
        if _has_expired_timeout(client_call_details):
            return continuation(client_call_details, request)
        # Without the policy's attempt_timeout: gRPC would apply it to the whole stream.
        return RetriedStream(*self._start_call(continuation, client_call_details, request, None))

    def _start_call(
        self, continuation: Any, call_details: Any, request: Any, attempt_timeout: float | None
    ) -> tuple[GrpcCall, Callable[[], Any], Any]:
        """Send the first attempt in the thread of the caller, as gRPC itself does.

        Return the call, a function that sends the next attempt, and gRPC's object for the first.
        """
        call = self._call_factory.new_call(call_details)

        def send() -> Any:
            details = _CallDetails(
                call_details.method,
                call.start_time_limit(attempt_timeout),
                _attempt_metadata(call, call_details),
                call_details.credentials,
                getattr(call_details, "wait_for_ready", None),
                getattr(call_details, "compression", None),
            )
            return continuation(details, request)

        try:
            call.begin_first_attempt()
            return call, send, send()
        except BaseException:
            call.abort()
            raise


def _attempt_metadata(call: GrpcCall, details: Any) -> list[Any]:
    """Return the metadata of an attempt, with the number of the attempts before it."""
    # The metadata may already contain such a number, if a server forwards its client's metadata.
    metadata = [pair for pair in details.metadata or () if pair[0] != _PREVIOUS_ATTEMPTS_KEY]
    retry_count = call.attempts - 1
    return [*metadata, (_PREVIOUS_ATTEMPTS_KEY, str(retry_count))] if retry_count else metadata


def _has_expired_timeout(details: Any) -> bool:
    """Return whether the user's timeout is 0 or negative; gRPC then raises its own error."""
    return details.timeout is not None and details.timeout <= 0


def _is_future_call(first_attempt: Any) -> bool:
    """Return whether the user called `future()`; gRPC does not pass this to interceptors.

    The first attempt of a blocking call is already done at this point. That of a future usually is
    not. A future that failed at once is done too. It is an iterator whose `exception()` is itself.
    """
    if not first_attempt.done():
        return True
    return hasattr(first_attempt, "__next__") and first_attempt.exception() is first_attempt


def async_retry_interceptors(
    *,
    policy: Policy | None = None,
    downstream: DownstreamArgument = None,
    repeatable: Repeatable = True,
    target: str | None = None,
) -> list[Any]:
    """Return the interceptors for a `grpc.aio` channel, which needs one for each type of call.

    The arguments are those of `RetryInterceptor`.
    """
    call_factory = CallFactory(policy, downstream, repeatable, target)
    return [_AsyncUnaryUnaryInterceptor(call_factory), _AsyncUnaryStreamInterceptor(call_factory)]


class _AsyncUnaryUnaryInterceptor:
    def __init__(self, call_factory: CallFactory) -> None:
        self._call_factory = call_factory

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        if _has_expired_timeout(client_call_details):
            return await continuation(client_call_details, request)
        call = self._call_factory.new_call(client_call_details)
        timeout = self._call_factory.attempt_timeout

        async def make_attempt() -> Any:
            details = _async_attempt_details(call, client_call_details, timeout)
            attempt = await continuation(details, request)
            await attempt  # raises the error of a failed attempt; gRPC may await it again
            return attempt

        return await drivers.drive_async(call, make_attempt, (), {})


class _AsyncUnaryStreamInterceptor:
    def __init__(self, call_factory: CallFactory) -> None:
        self._call_factory = call_factory

    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        if _has_expired_timeout(client_call_details):
            return await continuation(client_call_details, request)
        call = self._call_factory.new_call(client_call_details)

        async def make_attempt() -> Any:
            # Without the policy's attempt_timeout: gRPC would apply it to the whole stream.
            details = _async_attempt_details(call, client_call_details, None)
            attempt = await continuation(details, request)
            try:
                if await attempt.initial_metadata():
                    return attempt
                stream = _StartedStream(attempt)
                await stream.await_headers()
            except asyncio.CancelledError:
                # Unlike a cancelled read, a cancelled `initial_metadata()` does not end the RPC.
                attempt.cancel()
                raise
            return stream

        return await drivers.drive_async(call, make_attempt, (), {})


class _StartedStream:
    """A response stream whose initial metadata is empty, so that it may have no headers.

    It need not be a call object, because gRPC itself keeps the call object of the last attempt.
    """

    def __init__(self, attempt: Any) -> None:
        self._messages = aiter(attempt)
        self._first: asyncio.Task[Any] | None = asyncio.create_task(self._read_message())
        """Reads the first message; None when the user has read it."""
        self._first.add_done_callback(_mark_as_retrieved)

    async def await_headers(self) -> None:
        """Wait until it is certain that the stream has headers; raise if it fails without them."""
        first = self._first
        if first is None:
            return
        await asyncio.wait([first], timeout=MAX_TRAILERS_ONLY_DELAY_S)
        if first.done():
            first.result()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        first, self._first = self._first, None
        message = await (self._read_message() if first is None else first)
        if message is _END_OF_STREAM:
            raise StopAsyncIteration
        return message

    async def _read_message(self) -> Any:
        return await anext(self._messages, _END_OF_STREAM)


def _mark_as_retrieved(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a task; otherwise asyncio logs an error that the user never read."""
    if not task.cancelled():
        task.exception()


def _async_attempt_details(call: GrpcCall, call_details: Any, attempt_timeout: float | None) -> Any:
    return grpc.aio.ClientCallDetails(
        call_details.method,
        call.start_time_limit(attempt_timeout),
        grpc.aio.Metadata(*_attempt_metadata(call, call_details)),
        call_details.credentials,
        call_details.wait_for_ready,
    )


def channel_options(options: Iterable[tuple[str, Any]] | None = None) -> list[tuple[str, Any]]:
    """Return `options` for a channel on which tarry retries, with gRPC's own retries turned off.

    Raises ConfigurationError if `options` enable gRPC's own retries, because the attempts of two
    layers multiply.
    """
    try:
        pairs = [(name, value) for name, value in (() if options is None else options)]
    except (TypeError, ValueError):
        rule = 'must be pairs of a name and a value, as in [("grpc.max_message_length", -1)]'
        raise ConfigurationTypeError("options", rule, options) from None
    for name, value in pairs:
        problem = _find_retry_policy(value) if name == _SERVICE_CONFIG_OPTION else None
        if name == _RETRIES_OPTION and value:
            problem = f"{_RETRIES_OPTION} is {value!r}"
        if problem is not None:
            raise ConfigurationError(
                f"{problem}: the channel would retry beneath tarry, and the attempts of two layers "
                "multiply; remove it (`tarry policy import --from grpc` converts it to a policy), "
                "or do not use tarry on this channel"
            )
    # A resolver may provide another service config, which is not visible here. With this option at
    # 0, the retry policies of that service config have no effect.
    return [*(pair for pair in pairs if pair[0] != _RETRIES_OPTION), (_RETRIES_OPTION, 0)]


def _find_retry_policy(service_config: Any) -> str | None:
    """Return a description of the first retry or hedging policy of a service config, if any."""
    try:
        document = json.loads(service_config)
    except (TypeError, ValueError) as error:
        rule = f"must be a service config as JSON, got {short_repr(service_config)}: {error}"
        raise ConfigurationError(_SERVICE_CONFIG_OPTION, rule) from None
    # A document with another structure has no policies. If it is invalid, gRPC reports that.
    for entry in _get_list(document, "methodConfig"):
        for field in ("retryPolicy", "hedgingPolicy"):
            if _get_value(entry, field) is not None:
                methods = ", ".join(map(_format_method, _get_list(entry, "name")))
                methods = methods or "an entry without a name"
                return f"{_SERVICE_CONFIG_OPTION} has a {field} for {methods}"
    return None


# pyright does not know the types of the items in a JSON document.
def _get_value(json_object: Any, key: str) -> Any:
    return json_object.get(key) if isinstance(json_object, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _get_list(json_object: Any, key: str) -> list[Any]:
    found = _get_value(json_object, key)
    return list(found) if isinstance(found, list) else []  # pyright: ignore[reportUnknownArgumentType]


def _format_method(name: Any) -> str:
    """Format an item of the list "name", an object with a "service" and a "method"."""
    service_and_method = _get_value(name, "service"), _get_value(name, "method")
    return "/".join(str(part) for part in service_and_method if part) or "all methods"


class OneRetryLayerInterceptor:
    """Passes client deadlines to handlers, and forbids clients to retry what was retried here."""

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the wrapped handler of a method."""
        return _wrap_handler(continuation(handler_call_details))


class AsyncOneRetryLayerInterceptor:
    """The same as `OneRetryLayerInterceptor`, for a `grpc.aio` server."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the wrapped handler of a method."""
        return _wrap_handler(await continuation(handler_call_details))


class _HandlerContext:
    """Wraps the `ServicerContext` of a handler; records the code and the trailers that it sets."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._given_up_calls = error_record.GivenUpCalls()
        self._scope_handle: scopes.ScopeHandle | None = None
        self._code: Any = None
        self._trailers: tuple[Any, ...] = ()
        self._was_aborted = False

    def activate(self) -> None:
        """Set the contextvars of the handler: the deadline and `current_given_up_calls`."""
        error_record.current_given_up_calls.set(self._given_up_calls)
        remaining = self._context.time_remaining()
        if remaining is not None and remaining < _NO_DEADLINE_S:
            self._scope_handle = scopes.enter(effects.now() + remaining)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if not self._was_aborted:
            if error is not None and self._code is None and self._given_up_calls.find(error):
                self.set_code(grpc.StatusCode.UNAVAILABLE)
                self._context.set_details("a call to another service failed and was given up")
            self._set_trailers(self._code, self._trailers)
        self._given_up_calls.close()
        if self._scope_handle is not None:
            self._scope_handle.has_ended = True

    def set_code(self, code: Any) -> None:
        self._code = code
        self._context.set_code(code)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailers = tuple(trailing_metadata)
        self._context.set_trailing_metadata(trailing_metadata)

    def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> Any:
        """Abort the call; on a `grpc.aio` server the return value must be awaited."""
        self._was_aborted = True
        self._set_trailers(code, tuple(trailing_metadata or ()) or self._trailers)
        return self._context.abort(code, details)

    def abort_with_status(self, status: Any) -> Any:
        return self.abort(status.code, status.details, status.trailing_metadata)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def _set_trailers(self, code: Any, trailers: tuple[Any, ...]) -> None:
        """Set the trailers, with a pushback if the client must not retry."""
        has_pushback = any(key == _PUSHBACK_KEY for key, _ in trailers)
        if code in _SERVER_FAILURE_CODES and self._given_up_calls and not has_pushback:
            trailers = (*trailers, (_PUSHBACK_KEY, "-1"))
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
        return handler  # unchanged: it may send its response after it has returned
    handle: Callable[..., Any] = _handle_stream if handler.response_streaming else _handle_unary
    if inspect.isasyncgenfunction(behavior):
        handle = _handle_stream_async
    elif inspect.iscoroutinefunction(behavior):
        handle = _handle_unary_async
    make_handler = getattr(grpc, f"{call_type}_rpc_method_handler")
    wrapped = wraps(behavior)(partial(handle, behavior))
    return make_handler(wrapped, handler.request_deserializer, handler.response_serializer)


def _handle_unary(behavior: Callable[..., Any], request: Any, context: Any) -> Any:
    run = copy_context().run  # a copy, because the thread later serves other calls
    with _HandlerContext(context) as handler_context:
        run(handler_context.activate)
        return run(behavior, request, handler_context)


def _handle_stream(behavior: Callable[..., Any], request: Any, context: Any) -> Iterator[Any]:
    run = copy_context().run
    with _HandlerContext(context) as handler_context:
        run(handler_context.activate)
        messages = iter(run(behavior, request, handler_context))
        while (message := run(next, messages, _END_OF_STREAM)) is not _END_OF_STREAM:
            yield message


async def _handle_unary_async(behavior: Callable[..., Any], request: Any, context: Any) -> Any:
    with _HandlerContext(context) as handler_context:
        handler_context.activate()  # each call has its own asyncio task, and thus its own context
        return await behavior(request, handler_context)


async def _handle_stream_async(
    behavior: Callable[..., Any], request: Any, context: Any
) -> AsyncIterator[Any]:
    with _HandlerContext(context) as handler_context:
        handler_context.activate()
        async for message in behavior(request, handler_context):
            yield message


# Registered instead of derived: grpcio is untyped, and a class derived from Any is unchecked.
grpc.ClientCallDetails.register(_CallDetails)
grpc.UnaryUnaryClientInterceptor.register(RetryInterceptor)
grpc.UnaryStreamClientInterceptor.register(RetryInterceptor)
grpc.aio.UnaryUnaryClientInterceptor.register(_AsyncUnaryUnaryInterceptor)
grpc.aio.UnaryStreamClientInterceptor.register(_AsyncUnaryStreamInterceptor)
grpc.ServerInterceptor.register(OneRetryLayerInterceptor)
grpc.aio.ServerInterceptor.register(AsyncOneRetryLayerInterceptor)
grpc.ServicerContext.register(_HandlerContext)
grpc.aio.ServicerContext.register(_HandlerContext)
