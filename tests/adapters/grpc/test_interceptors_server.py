"""The server interceptors, with each type of handler on sync and `grpc.aio` servers."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

import tarry
from tarry import Reason
from tarry.adapters.grpc import AsyncOneRetryLayerInterceptor, OneRetryLayerInterceptor
from tarry.runtime.scopes import Scope, current_scope
from tests.adapters.grpc.fake_service import (
    CHARGE,
    PUSHBACK_KEY,
    SEPARATE_CONNECTION,
    WATCH,
    give_up_reason,
    grpc,
    open_channel,
)

Status = grpc.StatusCode


async def _fail() -> None:
    raise ConnectionError("down")


@dataclass
class Handler:
    """A handler that makes a call, which fails, and then runs `end`."""

    end: Callable[[Any], Any] = lambda _: None
    """Takes the context of the server; aborts, sets a code or raises."""
    makes_call: bool = True
    catches_error: bool = True
    remaining: list[float | None] = field(default_factory=list[float | None])
    """The time in seconds until the deadline, in each run of the handler."""

    def call_sync(self, context: Any) -> None:
        """Make the call in a thread, then run `end`."""
        self.remaining.append(tarry.remaining())
        asyncio.run(self._call())
        self.end(context)

    async def call_async(self, context: Any) -> None:
        """Make the call on the event loop, then run `end`."""
        self.remaining.append(tarry.remaining())
        await self._call()
        result = self.end(context)
        if inspect.isawaitable(result):
            await result

    async def _call(self) -> None:
        if self.makes_call:
            try:
                await tarry.acall(_fail, on=ConnectionError)
            except ConnectionError:
                if not self.catches_error:
                    raise


def unary_handler(handler: Handler) -> Any:
    """Return the RPC handler of a function that returns one response."""

    def charge(_request: bytes, context: Any) -> bytes:
        handler.call_sync(context)
        return b"paid"

    return grpc.unary_unary_rpc_method_handler(charge)


def generator_handler(handler: Handler) -> Any:
    """Return the RPC handler of a generator that sends a message before it fails."""

    def watch(_request: bytes, context: Any) -> Iterator[bytes]:
        yield b"paid"
        handler.call_sync(context)

    return grpc.unary_stream_rpc_method_handler(watch)


def coroutine_handler(handler: Handler) -> Any:
    """Return the RPC handler of a coroutine that returns one response."""

    async def charge(_request: bytes, context: Any) -> bytes:
        await handler.call_async(context)
        return b"paid"

    return grpc.unary_unary_rpc_method_handler(charge)


def writer_handler(handler: Handler) -> Any:
    """Return the RPC handler of a coroutine that writes its messages."""

    async def watch(_request: bytes, context: Any) -> None:
        await context.write(b"paid")
        await handler.call_async(context)

    return grpc.unary_stream_rpc_method_handler(watch)


def async_generator_handler(handler: Handler) -> Any:
    """Return the RPC handler of an async generator that reads a request stream."""

    async def watch(requests: Any, context: Any) -> AsyncIterator[bytes]:
        assert [b""] == [request async for request in requests]
        yield b"paid"
        await handler.call_async(context)

    return grpc.stream_stream_rpc_method_handler(watch)


SYNC_HANDLERS: list[Any] = [unary_handler, generator_handler]
ASYNC_HANDLERS: list[Any] = [
    unary_handler,
    coroutine_handler,
    writer_handler,
    async_generator_handler,
]
SERVERS_AND_HANDLERS = [("sync", factory) for factory in SYNC_HANDLERS] + [
    ("aio", factory) for factory in ASYNC_HANDLERS
]


@contextmanager
def sync_server(handlers: Any) -> Iterator[str]:
    """Run a sync server with a single thread."""
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads, interceptors=[OneRetryLayerInterceptor()])
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


@contextmanager
def aio_server(handlers: Any) -> Iterator[str]:
    """Run a `grpc.aio` server in a thread."""
    ports: list[int] = []
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        threads = ThreadPoolExecutor(1)
        server = grpc.aio.server(threads, interceptors=[AsyncOneRetryLayerInterceptor()])
        server.add_generic_rpc_handlers((handlers,))
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        started.set()
        await stop.wait()
        await server.stop(None)
        threads.shutdown()
        # Aborted calls end a little later. Tasks that are destroyed while pending log an error.
        if pending := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(pending, timeout=30)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    started.wait()
    yield f"127.0.0.1:{ports[0]}"
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@pytest.fixture(params=SERVERS_AND_HANDLERS, ids=lambda pair: f"{pair[0]}-{pair[1].__name__}")
def call_handler(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Return a function that calls a handler and returns its code, trailers and messages."""
    server_type, handler_factory = request.param
    with ExitStack() as stack:

        def call_handler(
            handler: Handler, **options: Any
        ) -> tuple[Any, dict[str, str], list[bytes]]:
            rpc_handler = handler_factory(handler)
            name = WATCH if rpc_handler.response_streaming else CHARGE
            serve = sync_server if server_type == "sync" else aio_server
            handlers = {name.rpartition("/")[2]: rpc_handler}
            target = stack.enter_context(
                serve(grpc.method_handlers_generic_handler("shop.Payments", handlers))
            )
            with grpc.insecure_channel(target, options=SEPARATE_CONNECTION) as channel:
                if rpc_handler.request_streaming:
                    call = channel.stream_stream(name)(iter([b""]), **options)
                elif rpc_handler.response_streaming:
                    call = channel.unary_stream(name)(b"", **options)
                else:
                    call = channel.unary_unary(name).future(b"", **options)
                messages: list[bytes] = []
                with suppress(grpc.RpcError):
                    messages += call if rpc_handler.response_streaming else [call.result()]
                return call.code(), dict(call.trailing_metadata()), messages

        yield call_handler


def abort_with(code: str) -> Callable[[Any], Any]:
    """Return an `end` that aborts with this code."""
    return lambda context: context.abort(getattr(Status, code), "not now")


def set_code_to(code: str) -> Callable[[Any], Any]:
    """Return an `end` that sets this code and returns."""
    return lambda context: context.set_code(getattr(Status, code))


def send_trailers(pushback: str) -> Callable[[Any], Any]:
    """Return an `end` that sets trailers, with a pushback unless it is empty, and aborts."""

    def end(context: Any) -> Any:
        context.set_trailing_metadata(
            [("shop", "north"), *([(PUSHBACK_KEY, pushback)] if pushback else [])]
        )
        return context.abort(Status.UNAVAILABLE, "not now")

    return end


def raise_error(_context: Any) -> None:
    """Raise an error that is unrelated to the call."""
    raise ValueError("a bug")


def set_code_and_raise(context: Any) -> None:
    """Set UNAVAILABLE, then raise an error that is unrelated to the call."""
    context.set_code(Status.UNAVAILABLE)
    raise ValueError("a bug")


@pytest.mark.parametrize(
    ("handler", "code", "pushback"),
    [
        (Handler(catches_error=False), "UNAVAILABLE", "-1"),
        (Handler(abort_with("UNAVAILABLE")), "UNAVAILABLE", "-1"),
        (Handler(set_code_to("INTERNAL")), "INTERNAL", "-1"),
        (Handler(set_code_and_raise), "UNAVAILABLE", "-1"),
        (Handler(send_trailers("")), "UNAVAILABLE", "-1"),
        (Handler(send_trailers("7")), "UNAVAILABLE", "7"),
        (Handler(abort_with("NOT_FOUND")), "NOT_FOUND", None),
        (Handler(raise_error), "UNKNOWN", None),
        (Handler(), "OK", None),
        (Handler(abort_with("UNAVAILABLE"), makes_call=False), "UNAVAILABLE", None),
        (Handler(send_trailers(""), makes_call=False), "UNAVAILABLE", None),
    ],
)
def test_failure_after_retries_has_the_pushback(
    call_handler: Callable[..., Any], handler: Handler, code: str, pushback: str | None
) -> None:
    """UNAVAILABLE and INTERNAL get a pushback of -1 if a call of the handler was given up."""
    status, trailers, _ = call_handler(handler)

    assert (getattr(Status, code), pushback) == (status, trailers.get(PUSHBACK_KEY))
    assert (handler.end.__qualname__.startswith("send_trailers")) == ("shop" in trailers)


def test_client_deadline_is_shared(call_handler: Callable[..., Any]) -> None:
    """The client's deadline applies to calls of the handler."""
    handler = Handler(makes_call=False)

    codes = [call_handler(handler, timeout=60)[0], call_handler(handler)[0]]

    assert [Status.OK] * 2 == codes
    assert handler.remaining[1:] == [None]
    assert 50 < (handler.remaining[0] or 0) < 70  # gRPC rounds the deadline


@pytest.mark.parametrize("serve", [sync_server, aio_server])
def test_thread_does_not_keep_the_deadline(serve: Any) -> None:
    """A thread that has handled a request does not keep its deadline for the next request."""
    scopes: list[Scope | None] = []

    def charge(_request: bytes, _context: Any) -> bytes:
        scopes.append(current_scope.get())
        return b"paid"

    methods = {"Charge": grpc.unary_unary_rpc_method_handler(charge)}
    handlers = grpc.method_handlers_generic_handler("shop.Payments", methods)
    with (
        serve(handlers) as target,
        grpc.insecure_channel(target, options=SEPARATE_CONNECTION) as channel,
    ):
        channel.unary_unary(CHARGE)(b"", timeout=60)
        channel.unary_unary(CHARGE)(b"")

    assert [True, False] == [scope is not None for scope in scopes]


async def test_deadline_ends_with_the_response() -> None:
    """A background task of a handler has no deadline after the response."""
    remaining: list[Any] = []
    background_tasks: list[asyncio.Task[None]] = []

    async def run_in_background(responded: asyncio.Event) -> None:
        await responded.wait()
        remaining.append(tarry.remaining())

    responded = asyncio.Event()

    async def charge(_request: bytes, _context: Any) -> bytes:
        background_tasks.append(asyncio.create_task(run_in_background(responded)))
        remaining.append(tarry.remaining())
        return b"paid"

    server = grpc.aio.server(interceptors=[AsyncOneRetryLayerInterceptor()])
    methods = {"Charge": grpc.unary_unary_rpc_method_handler(charge)}
    handlers = grpc.method_handlers_generic_handler("shop.Payments", methods)
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.unary_unary(CHARGE)(b"", timeout=60)
    responded.set()
    await background_tasks[0]
    await server.stop(None)
    assert [True, False] == [seconds is not None for seconds in remaining]


def test_client_does_not_retry_after_the_server_gave_up() -> None:
    """The client of a server that gave up a call makes one attempt, and records OVERLOADED."""
    handler = Handler(catches_error=False)
    methods = {"Charge": unary_handler(handler)}
    handlers = grpc.method_handlers_generic_handler("shop.Payments", methods)

    with (
        sync_server(handlers) as target,
        open_channel(target) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(CHARGE)(b"")

    assert Reason.OVERLOADED == give_up_reason(caught.value)
    assert 1 == len(handler.remaining)
    assert "a call to another service failed and was given up" == caught.value.details()


def test_trailers_of_an_abort_are_kept() -> None:
    """The trailers of `abort` and of `abort_with_status` are sent."""

    @dataclass
    class AbortStatus:
        code: Any = Status.UNAVAILABLE
        details: str = "not now"
        trailing_metadata: Any = (("shop", "north"),)

    def abort_with_status(context: Any) -> Any:
        return context.abort_with_status(AbortStatus())

    def abort_with_trailers(context: Any) -> Any:
        return context.abort(Status.UNAVAILABLE, "not now", (("shop", "north"),))

    seen: list[dict[str, str]] = []
    for serve, make_handler, end in (
        (sync_server, unary_handler, abort_with_status),
        (aio_server, coroutine_handler, abort_with_status),
        (aio_server, coroutine_handler, abort_with_trailers),
    ):
        methods = {"Charge": make_handler(Handler(end))}
        handlers = grpc.method_handlers_generic_handler("shop.Payments", methods)
        with (
            serve(handlers) as target,
            grpc.insecure_channel(target, options=SEPARATE_CONNECTION) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            channel.unary_unary(CHARGE)(b"")
        seen.append(dict(caught.value.trailing_metadata()))

    assert [{"shop": "north", PUSHBACK_KEY: "-1"}] * 3 == seen


def test_unknown_method_is_unimplemented() -> None:
    """A call of a method that the server does not have fails with UNIMPLEMENTED."""
    no_methods = grpc.method_handlers_generic_handler("shop.Payments", {})
    codes: list[Any] = []
    for serve in (sync_server, aio_server):
        with (
            serve(no_methods) as target,
            grpc.insecure_channel(target, options=SEPARATE_CONNECTION) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            channel.unary_unary(CHARGE)(b"")
        codes.append(caught.value.code())

    assert [Status.UNIMPLEMENTED] * 2 == codes
