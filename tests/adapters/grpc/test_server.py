"""The interceptors of servers: one claim, every kind of handler on plain and asyncio servers."""

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
from tests.adapters.grpc.service import (
    CHARGE,
    OWN_CONNECTION,
    PUSHBACK,
    WATCH,
    channel,
    grpc,
    reason_of,
)

Status = grpc.StatusCode


async def _fail() -> None:
    raise ConnectionError("down")


@dataclass
class Handler:
    """What a handler does: a call below, which may fail, and then its own end."""

    end: Callable[[Any], Any] = lambda _: None
    below: bool = True
    tolerates: bool = True
    left: list[float | None] = field(default_factory=list[float | None])
    """What it saw of the deadline."""

    def plain(self, context: Any) -> None:
        """Do it in a thread."""
        self.left.append(tarry.remaining())
        asyncio.run(self._call())
        self.end(context)

    async def coroutine(self, context: Any) -> None:
        """Do it on the loop."""
        self.left.append(tarry.remaining())
        await self._call()
        ended = self.end(context)
        if inspect.isawaitable(ended):
            await ended

    async def _call(self) -> None:
        if self.below:
            try:
                await tarry.acall(_fail, on=ConnectionError)
            except ConnectionError:
                if not self.tolerates:
                    raise


def function(handler: Handler) -> Any:
    """A function that answers once."""

    def charge(_request: bytes, context: Any) -> bytes:
        handler.plain(context)
        return b"paid"

    return grpc.unary_unary_rpc_method_handler(charge)


def generator(handler: Handler) -> Any:
    """A generator, which has sent a message before it fails."""

    def watch(_request: bytes, context: Any) -> Iterator[bytes]:
        yield b"paid"
        handler.plain(context)

    return grpc.unary_stream_rpc_method_handler(watch)


def coroutine(handler: Handler) -> Any:
    """A coroutine that answers once."""

    async def charge(_request: bytes, context: Any) -> bytes:
        await handler.coroutine(context)
        return b"paid"

    return grpc.unary_unary_rpc_method_handler(charge)


def writer(handler: Handler) -> Any:
    """A coroutine that writes its messages."""

    async def watch(_request: bytes, context: Any) -> None:
        await context.write(b"paid")
        await handler.coroutine(context)

    return grpc.unary_stream_rpc_method_handler(watch)


def async_generator(handler: Handler) -> Any:
    """A generator on the loop; it reads a stream of requests, too."""

    async def watch(requests: Any, context: Any) -> AsyncIterator[bytes]:
        assert [b""] == [request async for request in requests]
        yield b"paid"
        await handler.coroutine(context)

    return grpc.stream_stream_rpc_method_handler(watch)


PLAIN: list[Any] = [function, generator]
AIO: list[Any] = [function, coroutine, writer, async_generator]
KINDS = [("plain", kind) for kind in PLAIN] + [("aio", kind) for kind in AIO]


@contextmanager
def plain_server(handlers: Any) -> Iterator[str]:
    """Run a plain server whose one thread serves all."""
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads, interceptors=[OneRetryLayerInterceptor()])
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


@contextmanager
def aio_server(handlers: Any) -> Iterator[str]:
    """Run a server of grpc.aio in a thread."""
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


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1].__name__}")
def ask(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Return a function that serves a handler and asks it: the code, the trailers, the messages."""
    where, kind = request.param
    with ExitStack() as stack:

        def ask(handler: Handler, **options: Any) -> tuple[Any, dict[str, str], list[bytes]]:
            made = kind(handler)
            name = WATCH if made.response_streaming else CHARGE
            serve = plain_server if where == "plain" else aio_server
            handlers = {name.rpartition("/")[2]: made}
            target = stack.enter_context(
                serve(grpc.method_handlers_generic_handler("shop.Payments", handlers))
            )
            with grpc.insecure_channel(target, options=OWN_CONNECTION) as opened:
                if made.request_streaming:
                    call = opened.stream_stream(name)(iter([b""]), **options)
                elif made.response_streaming:
                    call = opened.unary_stream(name)(b"", **options)
                else:
                    call = opened.unary_unary(name).future(b"", **options)
                messages: list[bytes] = []
                with suppress(grpc.RpcError):
                    messages += call if made.response_streaming else [call.result()]
                return call.code(), dict(call.trailing_metadata()), messages

        yield ask


def aborts(code: str) -> Callable[[Any], Any]:
    """End by `abort`."""
    return lambda context: context.abort(getattr(Status, code), "not now")


def sets(code: str) -> Callable[[Any], Any]:
    """End by a code and a usual return."""
    return lambda context: context.set_code(getattr(Status, code))


def trails(text: str) -> Callable[[Any], Any]:
    """Send trailers of one's own, then abort."""

    def end(context: Any) -> Any:
        context.set_trailing_metadata([("shop", "north"), *([(PUSHBACK, text)] if text else [])])
        return context.abort(Status.UNAVAILABLE, "not now")

    return end


def fails(_context: Any) -> None:
    """End by a bug."""
    raise ValueError("a bug")


def fails_as_unavailable(context: Any) -> None:
    """Set a code, and then raise."""
    context.set_code(Status.UNAVAILABLE)
    raise ValueError("a bug")


@pytest.mark.parametrize(
    ("handler", "code", "pushback"),
    [
        (Handler(tolerates=False), "UNAVAILABLE", "-1"),
        (Handler(aborts("UNAVAILABLE")), "UNAVAILABLE", "-1"),
        (Handler(sets("INTERNAL")), "INTERNAL", "-1"),
        (Handler(fails_as_unavailable), "UNAVAILABLE", "-1"),
        (Handler(trails("")), "UNAVAILABLE", "-1"),
        (Handler(trails("7")), "UNAVAILABLE", "7"),
        (Handler(aborts("NOT_FOUND")), "NOT_FOUND", None),
        (Handler(fails), "UNKNOWN", None),
        (Handler(), "OK", None),
        (Handler(aborts("UNAVAILABLE"), below=False), "UNAVAILABLE", None),
        (Handler(trails(""), below=False), "UNAVAILABLE", None),
    ],
)
def test_what_was_retried_below_is_told(
    ask: Callable[..., Any], handler: Handler, code: str, pushback: str | None
) -> None:
    """A failure that comes from a call below says so; others do not, nor do handlers that know."""
    ended, trailers, _ = ask(handler)

    assert (getattr(Status, code), pushback) == (ended, trailers.get(PUSHBACK))
    assert (handler.end.__qualname__.startswith("trails")) == ("shop" in trailers)


def test_the_clients_deadline_is_shared(ask: Callable[..., Any]) -> None:
    """Calls of the handler have the time that the client has, and the next client has its own."""
    handler = Handler(below=False)

    codes = [ask(handler, timeout=60)[0], ask(handler)[0]]

    assert [Status.OK] * 2 == codes
    assert handler.left[1:] == [None]
    assert 50 < (handler.left[0] or 0) < 70  # gRPC rounds it


@pytest.mark.parametrize("serve", [plain_server, aio_server])
def test_threads_are_left_without_a_deadline(serve: Any) -> None:
    """The thread that served one client does not take its deadline to the next."""
    left: list[deadlines.DeadlineScope | None] = []

    def charge(_request: bytes, _context: Any) -> bytes:
        left.append(deadlines.scope.get())
        return b"paid"

    methods = {"Charge": grpc.unary_unary_rpc_method_handler(charge)}
    handlers = grpc.method_handlers_generic_handler("shop.Payments", methods)
    with (
        serve(handlers) as target,
        grpc.insecure_channel(target, options=OWN_CONNECTION) as opened,
    ):
        opened.unary_unary(CHARGE)(b"", timeout=60)
        opened.unary_unary(CHARGE)(b"")

    assert [True, False] == [scope is not None for scope in left]


def test_the_deadline_ends_with_the_answer() -> None:
    """What a handler leaves behind is not cut off by the time of a client that has its answer."""
    left: list[Any] = []
    behind: list[asyncio.Task[None]] = []

    async def later(answered: asyncio.Event) -> None:
        await answered.wait()
        left.append(tarry.remaining())

    async def main() -> None:
        answered = asyncio.Event()

        async def charge(_request: bytes, _context: Any) -> bytes:
            behind.append(asyncio.create_task(later(answered)))
            left.append(tarry.remaining())
            return b"paid"

        server = grpc.aio.server(interceptors=[AsyncOneRetryLayerInterceptor()])
        methods = {"Charge": grpc.unary_unary_rpc_method_handler(charge)}
        handlers = grpc.method_handlers_generic_handler("shop.Payments", methods)
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
            await opened.unary_unary(CHARGE)(b"", timeout=60)
        answered.set()
        await behind[0]
        await server.stop(None)

    asyncio.run(main())

    assert [True, False] == [moment is not None for moment in left]


def test_a_chain_retries_at_one_layer() -> None:
    """The client of a server that gave up makes one attempt, and knows why."""
    handler = Handler(tolerates=False)
    methods = {"Charge": function(handler)}
    handlers = grpc.method_handlers_generic_handler("shop.Payments", methods)

    with (
        plain_server(handlers) as target,
        channel(target) as opened,
        pytest.raises(grpc.RpcError) as caught,
    ):
        opened.unary_unary(CHARGE)(b"")

    assert Reason.OVERLOADED == reason_of(caught.value)
    assert 1 == len(handler.left)
    assert "a service behind this one does not answer" == caught.value.details()


def test_trailers_of_an_abort_are_kept() -> None:
    """grpc.aio takes them with the abort, and a status brings its own."""

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
    for serve, kind, end in (
        (plain_server, function, with_status),
        (aio_server, coroutine, with_status),
        (aio_server, coroutine, with_trailers),
    ):
        methods = {"Charge": kind(Handler(end))}
        handlers = grpc.method_handlers_generic_handler("shop.Payments", methods)
        with (
            serve(handlers) as target,
            grpc.insecure_channel(target, options=OWN_CONNECTION) as opened,
            pytest.raises(grpc.RpcError) as caught,
        ):
            opened.unary_unary(CHARGE)(b"")
        seen.append(dict(caught.value.trailing_metadata()))

    assert [{"shop": "north", PUSHBACK: "-1"}] * 3 == seen


def test_other_methods_are_still_unknown() -> None:
    """A method that the server does not have is as unknown as without an interceptor."""
    nothing = grpc.method_handlers_generic_handler("shop.Payments", {})
    codes: list[Any] = []
    for serve in (plain_server, aio_server):
        with (
            serve(nothing) as target,
            grpc.insecure_channel(target, options=OWN_CONNECTION) as opened,
            pytest.raises(grpc.RpcError) as caught,
        ):
            opened.unary_unary(CHARGE)(b"")
        codes.append(caught.value.code())

    assert [Status.UNIMPLEMENTED] * 2 == codes
