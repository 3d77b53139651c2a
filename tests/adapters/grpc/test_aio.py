"""Calls of grpc.aio: what their user can do with them, on a server of grpc.aio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import tarry
from tarry.runtime.clocks import system
from tarry.testing import captured_events
from tests.adapters.grpc.service import CHARGE, WATCH, Service, async_channel, grpc

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Asyncio:
    """A service on the loop of the test: it fails so many times, then it answers."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.arrived = asyncio.Event()
        self.attempts = 0

    async def charge(self, request: bytes, context: Any) -> bytes:
        """Answer once; hold back what asks for it."""
        self.attempts += 1
        if request == b"hold":
            self.arrived.set()
            await asyncio.Event().wait()
        if self.left:
            self.left -= 1
            await context.abort(UNAVAILABLE, "not now")
        return b"paid"


def served(failures: int, use: Callable[[Asyncio, Any], Awaitable[None]], *behind: Any) -> int:
    """Run a server and a client of it on one loop; return how many attempts arrived."""

    async def main() -> int:
        service = Asyncio(failures)
        server = grpc.aio.server()
        methods = {"Charge": grpc.unary_unary_rpc_method_handler(service.charge)}
        handler = grpc.method_handlers_generic_handler("shop.Payments", methods)
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with async_channel(f"127.0.0.1:{port}", behind=behind) as opened:
                await use(service, opened.unary_unary(CHARGE))
        finally:
            await server.stop(None)
        return service.attempts

    return asyncio.run(main())


def test_a_call_tells_of_its_last_attempt() -> None:
    """Code, details and metadata are those of the attempt that succeeded."""

    async def use(_: Asyncio, charge: Any) -> None:
        call = charge(b"")

        assert b"paid" == await call
        assert b"paid" == await call
        assert grpc.StatusCode.OK == await call.code()
        assert "" == await call.details()
        assert 0 == len(await call.initial_metadata())
        assert call.done()

    assert 3 == served(2, use)


def test_a_call_that_fails_is_grpcs() -> None:
    """The status can be asked for without an exception."""

    async def use(_: Asyncio, charge: Any) -> None:
        call = charge(b"")

        assert UNAVAILABLE == await call.code()
        assert "not now" == await call.details()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert "gave up after 4 attempts" in caught.value.__notes__[0]

    assert 4 == served(9, use)


def test_calls_run_side_by_side() -> None:
    """One interceptor serves many calls at once."""

    async def use(_: Asyncio, charge: Any) -> None:
        assert [b"paid"] * 20 == await asyncio.gather(*(charge(b"") for _ in range(20)))

    assert 22 == served(2, use)


def test_a_running_call_is_cancelled() -> None:
    """It is not retried, and not told as a failure."""

    async def use(service: Asyncio, charge: Any) -> None:
        call = charge(b"hold")
        await service.arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert call.cancelled()

    with captured_events() as events:
        assert 1 == served(0, use)
    assert [tarry.AttemptStarted] == [type(event) for event in events]


def test_a_waiting_call_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends, and no further attempt is made."""
    monkeypatch.setattr(system, "async_sleep", asyncio.sleep)

    async def use(_: Asyncio, charge: Any) -> None:
        call = charge(b"")
        remove = tarry.listen(
            lambda event: call.cancel() if isinstance(event, tarry.WillWait) else None
        )
        with pytest.raises(asyncio.CancelledError):
            await call
        remove()

    assert 1 == served(9, use)


def test_interceptors_of_others_go_with_ours() -> None:
    """Those behind see every attempt, and may change its details."""
    seen: list[str | None] = []

    class Others:
        async def intercept_unary_unary(
            self, continuation: Any, client_call_details: Any, request: Any
        ) -> Any:
            details = client_call_details._replace(timeout=60)
            seen.append(details.metadata.get("grpc-previous-rpc-attempts"))
            return await continuation(details, request)

    async def use(_: Asyncio, charge: Any) -> None:
        await charge(b"")

    grpc.aio.UnaryUnaryClientInterceptor.register(Others)
    assert 2 == served(1, use, Others())
    assert [None, "1"] == seen


def test_a_stream_is_the_callers_after_its_first_message(service: Service) -> None:
    """An error behind the first message is raised at once, without a word of tarry's."""
    service.steps, service.fails_after = ["UNAVAILABLE"], 1

    async def main() -> Any:
        async with async_channel(service.target) as opened:
            stream = opened.unary_stream(WATCH)(b"")
            assert b"one" == await stream.read()
            with pytest.raises(grpc.RpcError) as caught:
                await stream.read()
            assert UNAVAILABLE == await stream.code()
            return caught.value

    error = asyncio.run(main())

    assert UNAVAILABLE == error.code()
    assert tarry.record_of(error) is None
    assert 1 == service.attempts


def test_an_empty_stream_is_a_success(service: Service) -> None:
    """There is nothing to retry where the server has nothing to say."""
    service.steps, service.messages = ["UNAVAILABLE"], []

    async def main() -> None:
        async with async_channel(service.target) as opened:
            stream = opened.unary_stream(WATCH)(b"")
            assert [] == [message async for message in stream]
            assert grpc.StatusCode.OK == await stream.code()

    asyncio.run(main())

    assert 2 == service.attempts
