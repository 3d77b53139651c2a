"""Call objects of `grpc.aio`: status, cancellation, inner interceptors and streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import tarry
from tarry.adapters.grpc import interceptors
from tarry.runtime.effects import effects
from tarry.testing import captured_events
from tests.adapters.grpc.fake_service import CHARGE, WATCH, FakeService, grpc, open_async_channel

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class AsyncService:
    """A service on the event loop of the test that fails a number of times, then succeeds."""

    def __init__(self, failures: int) -> None:
        self.failures_left = failures
        self.hold_started = asyncio.Event()
        self.attempts = 0

    async def charge(self, request: bytes, context: Any) -> bytes:
        """Handle a unary call; do not respond to the request "hold"."""
        self.attempts += 1
        if request == b"hold":
            self.hold_started.set()
            await asyncio.Event().wait()
        if self.failures_left:
            self.failures_left -= 1
            await context.abort(UNAVAILABLE, "not now")
        return b"paid"


def run_with_server(
    failures: int, test: Callable[[AsyncService, Any], Awaitable[None]], *inner_interceptors: Any
) -> int:
    """Run a server and a client on one event loop; return the number of attempts."""

    async def main() -> int:
        service = AsyncService(failures)
        server = grpc.aio.server()
        methods = {"Charge": grpc.unary_unary_rpc_method_handler(service.charge)}
        handler = grpc.method_handlers_generic_handler("shop.Payments", methods)
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with open_async_channel(
                f"127.0.0.1:{port}", inner_interceptors=inner_interceptors
            ) as channel:
                await test(service, channel.unary_unary(CHARGE))
        finally:
            await server.stop(None)
        return service.attempts

    return asyncio.run(main())


def test_call_has_the_status_of_its_last_attempt() -> None:
    """The code, details and metadata of a call are those of the attempt that succeeded."""

    async def make_calls(_: AsyncService, charge: Any) -> None:
        call = charge(b"")

        assert b"paid" == await call
        assert b"paid" == await call
        assert grpc.StatusCode.OK == await call.code()
        assert "" == await call.details()
        assert 0 == len(await call.initial_metadata())
        assert call.done()

    assert 3 == run_with_server(2, make_calls)


def test_failed_call_has_its_status() -> None:
    """The code and details of a failed call can be read without an exception."""

    async def make_calls(_: AsyncService, charge: Any) -> None:
        call = charge(b"")

        assert UNAVAILABLE == await call.code()
        assert "not now" == await call.details()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert "gave up after 4 attempts" in caught.value.__notes__[0]

    assert 4 == run_with_server(9, make_calls)


def test_concurrent_calls() -> None:
    """Concurrent calls share an interceptor and succeed."""

    async def make_calls(_: AsyncService, charge: Any) -> None:
        assert [b"paid"] * 20 == await asyncio.gather(*(charge(b"") for _ in range(20)))

    assert 22 == run_with_server(2, make_calls)


def test_running_call_is_cancelled() -> None:
    """A call that is cancelled during an attempt is neither retried nor counted as a failure."""

    async def make_calls(service: AsyncService, charge: Any) -> None:
        call = charge(b"hold")
        await service.hold_started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert call.cancelled()

    with captured_events() as events:
        assert 1 == run_with_server(0, make_calls)
    assert [tarry.AttemptStarted] == [type(event) for event in events]


def test_waiting_call_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelling a call ends its wait, and no further attempt is made."""
    monkeypatch.setattr(effects, "async_sleep", asyncio.sleep)

    async def make_calls(_: AsyncService, charge: Any) -> None:
        call = charge(b"")
        remove = tarry.listen(
            lambda event: call.cancel() if isinstance(event, tarry.WillWait) else None
        )
        with pytest.raises(asyncio.CancelledError):
            await call
        remove()

    assert 1 == run_with_server(9, make_calls)


def test_inner_interceptor_sees_every_attempt() -> None:
    """An inner interceptor sees every attempt, and may change its details."""
    seen: list[str | None] = []

    class InnerInterceptor:
        async def intercept_unary_unary(
            self, continuation: Any, client_call_details: Any, request: Any
        ) -> Any:
            details = client_call_details._replace(timeout=60)
            seen.append(details.metadata.get("grpc-previous-rpc-attempts"))
            return await continuation(details, request)

    async def make_calls(_: AsyncService, charge: Any) -> None:
        await charge(b"")

    grpc.aio.UnaryUnaryClientInterceptor.register(InnerInterceptor)
    assert 2 == run_with_server(1, make_calls, InnerInterceptor())
    assert [None, "1"] == seen


async def test_stream_error_after_the_first_message(service: FakeService) -> None:
    """An error after the first message is raised at once, without a note."""
    service.steps, service.messages_before_step = ["UNAVAILABLE"], 1

    async with open_async_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        assert b"one" == await stream.read()
        with pytest.raises(grpc.RpcError) as caught:
            await stream.read()
        assert UNAVAILABLE == await stream.code()
        error = caught.value
    assert UNAVAILABLE == error.code()
    assert tarry.record_of(error) is None
    assert 1 == service.attempts


@pytest.mark.parametrize("headers", [[], [("shop", "north")]])
async def test_initial_metadata_before_the_first_message(
    service: FakeService, headers: list[tuple[str, str]]
) -> None:
    """The initial metadata is available when the headers arrive, before the first message."""
    service.steps, service.headers = ["hold"], headers

    async with open_async_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        assert headers == [tuple(pair) for pair in await stream.initial_metadata()]
        stream.cancel()


async def test_stream_cancelled_before_its_headers(service: FakeService) -> None:
    """Cancelling a stream whose headers have not arrived ends the RPC on the server."""
    service.steps = ["hold"]

    async with open_async_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        await asyncio.to_thread(service.hold_started.wait)
        stream.cancel()
        assert await asyncio.to_thread(service.hold_ended.wait, 10)


async def test_stream_cancelled_after_its_headers(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling a stream without metadata, while it may still fail, ends the RPC."""
    service.steps, service.headers = ["hold"], []
    has_headers = asyncio.Event()
    await_headers = interceptors._StartedStream.await_headers

    async def report_headers(stream: Any) -> None:
        has_headers.set()
        await await_headers(stream)

    monkeypatch.setattr(interceptors, "MAX_TRAILERS_ONLY_DELAY_S", 60.0)
    monkeypatch.setattr(interceptors._StartedStream, "await_headers", report_headers)

    async with open_async_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        await has_headers.wait()
        stream.cancel()
        assert await asyncio.to_thread(service.hold_ended.wait, 10)


async def test_messages_after_the_headers(service: FakeService) -> None:
    """A stream whose headers arrive before its messages returns all messages."""
    service.headers = [("shop", "north")]

    async with open_async_channel(service.target) as channel:
        result = [message async for message in channel.unary_stream(WATCH)(b"")]
    assert [b"one", b"two"] == result


@pytest.mark.parametrize("headers", [[], [("shop", "north")]])
async def test_stream_error_after_the_headers(
    service: FakeService, headers: list[tuple[str, str]]
) -> None:
    """An error some time after the headers is raised at once, without a note (gRFC A6)."""
    has_metadata = threading.Event()
    service.steps, service.headers = ["UNAVAILABLE"], headers
    service.before_step = has_metadata.wait

    async with open_async_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        await stream.initial_metadata()
        has_metadata.set()
        with pytest.raises(grpc.RpcError) as caught:
            await stream.read()
        error = caught.value
    assert UNAVAILABLE == error.code()
    assert tarry.record_of(error) is None
    assert 1 == service.attempts


async def test_empty_stream_is_a_success(service: FakeService) -> None:
    """After a failed attempt, a stream that ends without messages is a success."""
    service.steps, service.messages = ["UNAVAILABLE"], []

    async with open_async_channel(service.target) as channel:
        stream = channel.unary_stream(WATCH)(b"")
        assert [] == [message async for message in stream]
        assert grpc.StatusCode.OK == await stream.code()
    assert 2 == service.attempts
