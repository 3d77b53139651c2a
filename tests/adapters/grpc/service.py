"""A gRPC service that does what a test tells it to, and the ways to call it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeAlias

import pytest

import tarry
from tarry import Reason
from tarry.adapters.grpc import RetryInterceptor, async_retry_interceptors, channel_options

grpc = import_module("grpc")

CHARGE = "/shop.Payments/Charge"
WATCH = "/shop.Payments/Watch"
PUSHBACK = "grpc-retry-pushback-ms"
OWN_CONNECTION = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]

Step: TypeAlias = str | tuple[str, str, str | bytes]
"""A code, perhaps with an entry of trailing metadata; "hold" never answers."""


class Service:
    """Takes one step for each attempt, then answers; remembers what it was sent."""

    def __init__(self) -> None:
        self.target = ""
        self.steps: list[Step] = []
        self.fails_after = 0
        """How many messages a stream has before its step is taken."""
        self.messages = [b"one", b"two"]
        self.held = threading.Event()
        self.metadata: list[dict[str, str]] = []
        self.remaining: list[float] = []

    @property
    def attempts(self) -> int:
        """Attempts that have arrived."""
        return len(self.metadata)

    @property
    def previous(self) -> list[str | None]:
        """How many attempts each says were before it."""
        return [sent.get("grpc-previous-rpc-attempts") for sent in self.metadata]

    def charge(self, _request: bytes, context: Any) -> bytes:
        """Answer once."""
        self._arrived(context)
        self._step(context)
        return b"paid"

    def watch(self, _request: bytes, context: Any) -> Iterator[bytes]:
        """Answer with messages."""
        self._arrived(context)
        yield from self.messages[: self.fails_after]
        self._step(context)
        yield from self.messages[self.fails_after :]

    def _arrived(self, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining.append(context.time_remaining())

    def _step(self, context: Any) -> None:
        step = self.steps.pop(0) if self.steps else "OK"
        code, *entry = (step,) if isinstance(step, str) else step
        if entry:
            context.set_trailing_metadata([tuple(entry)])
        if code == "hold":
            over = threading.Event()
            if context.add_callback(over.set):
                self.held.set()
                over.wait()
        elif code != "OK":
            context.abort(getattr(grpc.StatusCode, code), "not now")


@contextmanager
def serving() -> Iterator[Service]:
    """Run the service on a port of its own."""
    service = Service()
    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads)
        methods = {
            "Charge": grpc.unary_unary_rpc_method_handler(service.charge),
            "Watch": grpc.unary_stream_rpc_method_handler(service.watch),
        }
        handler = grpc.method_handlers_generic_handler("shop.Payments", methods)
        server.add_generic_rpc_handlers((handler,))
        service.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield service
        server.stop(0).wait()


@contextmanager
def channel(target: str, *, behind: Any = (), **retries: Any) -> Iterator[Any]:
    """Open a plain channel with retries, and the interceptors of others behind them."""
    options = channel_options(OWN_CONNECTION)
    with grpc.insecure_channel(target, options=options) as opened:
        yield grpc.intercept_channel(opened, RetryInterceptor(target=target, **retries), *behind)


def async_channel(target: str, *, behind: Any = (), **retries: Any) -> Any:
    """Open a channel of grpc.aio with retries, and the interceptors of others behind them."""
    interceptors = [*async_retry_interceptors(target=target, **retries), *behind]
    options = channel_options(OWN_CONNECTION)
    return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)


def plain(service: Service, call: dict[str, Any], retries: dict[str, Any]) -> Any:
    """Make a call that blocks."""
    with channel(service.target, **retries) as opened:
        return opened.unary_unary(CHARGE)(b"", **call)


def future(service: Service, call: dict[str, Any], retries: dict[str, Any]) -> Any:
    """Make a call by its future."""
    with channel(service.target, **retries) as opened:
        return opened.unary_unary(CHARGE).future(b"", **call).result()


def stream(service: Service, call: dict[str, Any], retries: dict[str, Any]) -> Any:
    """Read a stream that blocks; its messages are joined."""
    with channel(service.target, **retries) as opened:
        messages = b"".join(opened.unary_stream(WATCH)(b"", **call))
        return messages.replace(b"onetwo", b"paid")


def coroutine(service: Service, call: dict[str, Any], retries: dict[str, Any]) -> Any:
    """Await a call."""

    async def main() -> Any:
        async with async_channel(service.target, **retries) as opened:
            return await opened.unary_unary(CHARGE)(b"", **call)

    return asyncio.run(main())


def async_stream(service: Service, call: dict[str, Any], retries: dict[str, Any]) -> Any:
    """Read a stream on an event loop; its messages are joined."""

    async def main() -> Any:
        async with async_channel(service.target, **retries) as opened:
            messages = [one async for one in opened.unary_stream(WATCH)(b"", **call)]
            return b"".join(messages).replace(b"onetwo", b"paid")

    return asyncio.run(main())


Way: TypeAlias = Callable[[Service, dict[str, Any], dict[str, Any]], Any]
WAYS: list[Way] = [plain, future, stream, coroutine, async_stream]


def failure(way: Way, service: Service, *, call: Any = None, **retries: Any) -> Any:
    """Make a call that fails, and return its error."""
    with pytest.raises(grpc.RpcError) as caught:
        way(service, call or {}, retries)
    return caught.value


def reason_of(error: BaseException) -> Reason:
    """Why the call ended."""
    record = tarry.record_of(error)
    assert record is not None
    return record.reason


def waits(events: list[tarry.Event]) -> list[float]:
    """The delays that were decided."""
    return [event.delay for event in events if isinstance(event, tarry.WillWait)]


def cancel_at(kind: type[tarry.Event], calls: list[Any]) -> Any:
    """Cancel a call as soon as it waits for its second attempt, or begins it."""
    made = threading.Event()

    def listener(event: tarry.Event) -> None:
        if isinstance(event, kind) and getattr(event, "attempt", 2) == 2:
            made.wait()
            calls[0].cancel()

    return made, tarry.listen(listener)
