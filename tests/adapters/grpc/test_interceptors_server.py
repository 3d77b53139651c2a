"""The server interceptors, with each type of handler on sync and async servers."""

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
from tarry.runtime import deadlines
from tests.adapters.grpc.fake_service import (
    CHARGE,
    OWN_CONNECTION,
    PUSHBACK,
    WATCH,
    grpc,
    open_channel,
    reason_of,
)

Status = grpc.StatusCode


async def _fail() -> None:
    raise ConnectionError("down")


@dataclass
class Handler:
    """A handler makes a call, which may fail, and then ends in a given way."""

    end: Callable[[Any], Any] = lambda _: None
    makes_call: bool = True
    catches_error: bool = True
    remaining: list[float | None] = field(default_factory=list[float | None])
    """The remaining time of the deadline in each call."""

    def call_sync(self, context: Any) -> None:
        """Make the call in a thread."""
        self.remaining.append(tarry.remaining())
        asyncio.run(self._call())
        self.end(context)

    async def call_async(self, context: Any) -> None:
        """Make the call on the event loop."""
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
    """A function that returns one response."""

    def charge(_request: bytes, context: Any) -> bytes:
        handler.call_sync(context)
        return b"paid"

    return grpc.unary_unary_rpc_method_handler(charge)


def generator_handler(handler: Handler) -> Any:
    """A generator that has sent a message before it fails."""

    def watch(_request: bytes, context: Any) -> Iterator[bytes]:
        yield b"paid"
        handler.call_sync(context)

    return grpc.unary_stream_rpc_method_handler(watch)


def coroutine_handler(handler: Handler) -> Any:
    """A coroutine that returns one response."""

    async def charge(_request: bytes, context: Any) -> bytes:
        await handler.call_async(context)
        return b"paid"

    return grpc.unary_unary_rpc_method_handler(charge)


def writer_handler(handler: Handler) -> Any:
    """A coroutine that writes its messages."""

    async def watch(_request: bytes, context: Any) -> None:
        await context.write(b"paid")
        await handler.call_async(context)

    return grpc.unary_stream_rpc_method_handler(watch)


def async_generator_handler(handler: Handler) -> Any:
    """An async generator, which also reads a request stream."""

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
    up = threading.Event()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def main() -> None:
        threads = ThreadPoolExecutor(1)
        server = grpc.aio.server(threads, interceptors=[AsyncOneRetryLayerInterceptor()])
        server.add_generic_rpc_handlers((handlers,))
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        up.set()
        await over.wait()
        await server.stop(None)
        threads.shutdown()
        # Aborted calls end a little later; left alone, they would complain when collected.
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=30)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    up.wait()
    yield f"127.0.0.1:{ports[0]}"
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


@pytest.fixture(params=SERVERS_AND_HANDLERS, ids=lambda pair: f"{pair[0]}-{pair[1].__name__}")
def call_handler(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Return a function that serves a handler and calls it: code, trailers, messages."""
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
            with grpc.insecure_channel(target, options=OWN_CONNECTION) as channel:
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


def aborts(code: str) -> Callable[[Any], Any]:
    """End with `abort`."""
    return lambda context: context.abort(getattr(Status, code), "not now")


def sets_code(code: str) -> Callable[[Any], Any]:
    """Set a code and return."""
    return lambda context: context.set_code(getattr(Status, code))


def sends_trailers(text: str) -> Callable[[Any], Any]:
    """Set trailers, then abort."""

    def end(context: Any) -> Any:
        context.set_trailing_metadata([("shop", "north"), *([(PUSHBACK, text)] if text else [])])
        return context.abort(Status.UNAVAILABLE, "not now")

    return end


def fails(_context: Any) -> None:
    """Raise an unrelated error."""
    raise ValueError("a bug")


def fails_as_unavailable(context: Any) -> None:
    """Set a code, then raise."""
    context.set_code(Status.UNAVAILABLE)
    raise ValueError("a bug")


@pytest.mark.parametrize(
    ("handler", "code", "pushback"),
    [
        (Handler(catches_error=False), "UNAVAILABLE", "-1"),
        (Handler(aborts("UNAVAILABLE")), "UNAVAILABLE", "-1"),
        (Handler(sets_code("INTERNAL")), "INTERNAL", "-1"),
        (Handler(fails_as_unavailable), "UNAVAILABLE", "-1"),
        (Handler(sends_trailers("")), "UNAVAILABLE", "-1"),
        (Handler(sends_trailers("7")), "UNAVAILABLE", "7"),
        (Handler(aborts("NOT_FOUND")), "NOT_FOUND", None),
        (Handler(fails), "UNKNOWN", None),
        (Handler(), "OK", None),
        (Handler(aborts("UNAVAILABLE"), makes_call=False), "UNAVAILABLE", None),
        (Handler(sends_trailers(""), makes_call=False), "UNAVAILABLE", None),
    ],
)
def test_failure_after_retries_has_the_pushback(
    call_handler: Callable[..., Any], handler: Handler, code: str, pushback: str | None
) -> None:
    """Only a failure caused by a call that was given up has the pushback by default."""
    status, trailers, _ = call_handler(handler)

    assert (getattr(Status, code), pushback) == (status, trailers.get(PUSHBACK))
    assert (handler.end.__qualname__.startswith("sends_trailers")) == ("shop" in trailers)


def test_client_deadline_is_shared(call_handler: Callable[..., Any]) -> None:
    """Calls of the handler have the deadline of their client."""
    handler = Handler(makes_call=False)

    codes = [call_handler(handler, timeout=60)[0], call_handler(handler)[0]]

    assert [Status.OK] * 2 == codes
    assert handler.remaining[1:] == [None]
    assert 50 < (handler.remaining[0] or 0) < 70  # gRPC rounds it


@pytest.mark.parametrize("serve", [sync_server, aio_server])
def test_thread_does_not_keep_the_deadline(serve: Any) -> None:
    """A thread that served one client does not keep its deadline for the next."""
    remaining: list[deadlines.DeadlineScope | None] = []

    def charge(_request: bytes, _context: Any) -> bytes:
        remaining.append(deadlines.current_scope.get())
        return b"paid"

    methods = {"Charge": grpc.unary_unary_rpc_method_handler(charge)}
    handlers = grpc.method_handlers_generic_handler("shop.Payments", methods)
    with (
        serve(handlers) as target,
        grpc.insecure_channel(target, options=OWN_CONNECTION) as channel,
    ):
        channel.unary_unary(CHARGE)(b"", timeout=60)
        channel.unary_unary(CHARGE)(b"")

    assert [True, False] == [scope is not None for scope in remaining]


def test_deadline_ends_with_the_response() -> None:
    """Background work of a handler is not cut off by the client's deadline."""
    remaining: list[Any] = []
    behind: list[asyncio.Task[None]] = []

    async def later(answered: asyncio.Event) -> None:
        await answered.wait()
        remaining.append(tarry.remaining())

    async def main() -> None:
        answered = asyncio.Event()

        async def charge(_request: bytes, _context: Any) -> bytes:
            behind.append(asyncio.create_task(later(answered)))
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
        answered.set()
        await behind[0]
        await server.stop(None)

    asyncio.run(main())

    assert [True, False] == [moment is not None for moment in remaining]


def test_chain_retries_at_one_layer() -> None:
    """The client of a server that gave up makes one attempt, and its record has the reason."""
    handler = Handler(catches_error=False)
    methods = {"Charge": unary_handler(handler)}
    handlers = grpc.method_handlers_generic_handler("shop.Payments", methods)

    with (
        sync_server(handlers) as target,
        open_channel(target) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(CHARGE)(b"")

    assert Reason.OVERLOADED == reason_of(caught.value)
    assert 1 == len(handler.remaining)
    assert "a call to another service failed and was given up" == caught.value.details()


def test_trailers_of_an_abort_are_kept() -> None:
    """The trailers of `abort` and of `abort_with_status` are sent."""

    @dataclass
    class Refused:
        code: Any = Status.UNAVAILABLE
        details: str = "not now"
        trailing_metadata: Any = (("shop", "north"),)

    def with_status(context: Any) -> Any:
        return context.abort_with_status(Refused())

    def with_trailers(context: Any) -> Any:
        return context.abort(Status.UNAVAILABLE, "not now", (("shop", "north"),))

    seen: list[dict[str, str]] = []
    for serve, make_handler, end in (
        (sync_server, unary_handler, with_status),
        (aio_server, coroutine_handler, with_status),
        (aio_server, coroutine_handler, with_trailers),
    ):
        methods = {"Charge": make_handler(Handler(end))}
        handlers = grpc.method_handlers_generic_handler("shop.Payments", methods)
        with (
            serve(handlers) as target,
            grpc.insecure_channel(target, options=OWN_CONNECTION) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            channel.unary_unary(CHARGE)(b"")
        seen.append(dict(caught.value.trailing_metadata()))

    assert [{"shop": "north", PUSHBACK: "-1"}] * 3 == seen


def test_unknown_method() -> None:
    """A method that the server does not have is UNIMPLEMENTED."""
    nothing = grpc.method_handlers_generic_handler("shop.Payments", {})
    codes: list[Any] = []
    for serve in (sync_server, aio_server):
        with (
            serve(nothing) as target,
            grpc.insecure_channel(target, options=OWN_CONNECTION) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            channel.unary_unary(CHARGE)(b"")
        codes.append(caught.value.code())

    assert [Status.UNIMPLEMENTED] * 2 == codes
