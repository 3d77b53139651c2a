"""A gRPC service that follows the steps of a test, and the call styles of gRPC clients."""

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
PUSHBACK_KEY = "grpc-retry-pushback-ms"
SEPARATE_CONNECTION = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]

Step: TypeAlias = str | tuple[str, str, str | bytes]
"""A status code, with an optional entry of trailing metadata; "hold" does not respond."""


class FakeService:
    """Takes one step for each attempt, then succeeds; records the metadata of each attempt."""

    def __init__(self) -> None:
        self.target = ""
        self.steps: list[Step] = []
        self.messages_before_step = 0
        """The number of messages that a stream sends before its step."""
        self.messages = [b"one", b"two"]
        self.headers: list[tuple[str, str]] | None = None
        """The initial metadata that a stream sends before its step; None: it sends none."""
        self.before_step: Callable[[], object] = bool
        """Called by a stream before its step."""
        self.hold_started = threading.Event()
        """Set when an attempt reaches a "hold" step."""
        self.hold_ended = threading.Event()
        """Set when the client has ended an attempt at a "hold" step."""
        self.metadata: list[dict[str, str]] = []
        self.remaining: list[float] = []
        """The time in seconds until the deadline of each attempt."""

    @property
    def attempts(self) -> int:
        """The number of attempts that have arrived."""
        return len(self.metadata)

    @property
    def previous_attempts(self) -> list[str | None]:
        """The number of previous attempts that each attempt reports."""
        return [sent.get("grpc-previous-rpc-attempts") for sent in self.metadata]

    def charge(self, _request: bytes, context: Any) -> bytes:
        """Handle a unary call."""
        self._record_attempt(context)
        self._take_step(context)
        return b"paid"

    def watch(self, _request: bytes, context: Any) -> Iterator[bytes]:
        """Handle a call with a response stream."""
        self._record_attempt(context)
        if self.headers is not None:
            context.send_initial_metadata(self.headers)
        yield from self.messages[: self.messages_before_step]
        self.before_step()
        self._take_step(context)
        yield from self.messages[self.messages_before_step :]

    def _record_attempt(self, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining.append(context.time_remaining())

    def _take_step(self, context: Any) -> None:
        step = self.steps.pop(0) if self.steps else "OK"
        code, *entry = (step,) if isinstance(step, str) else step
        if entry:
            context.set_trailing_metadata([tuple(entry)])
        if code == "hold":
            call_ended = threading.Event()
            if context.add_callback(call_ended.set):
                self.hold_started.set()
                call_ended.wait()
                self.hold_ended.set()
        elif code != "OK":
            context.abort(getattr(grpc.StatusCode, code), "not now")


@contextmanager
def run_fake_service() -> Iterator[FakeService]:
    """Run the service on its own port."""
    service = FakeService()
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
def open_channel(target: str, *, inner_interceptors: Any = (), **retries: Any) -> Iterator[Any]:
    """Open a channel with retries; `inner_interceptors` see each attempt."""
    options = channel_options(SEPARATE_CONNECTION)
    with grpc.insecure_channel(target, options=options) as channel:
        yield grpc.intercept_channel(
            channel, RetryInterceptor(target=target, **retries), *inner_interceptors
        )


def open_async_channel(target: str, *, inner_interceptors: Any = (), **retries: Any) -> Any:
    """Open a `grpc.aio` channel with retries; `inner_interceptors` see each attempt."""
    interceptors = [*async_retry_interceptors(target=target, **retries), *inner_interceptors]
    options = channel_options(SEPARATE_CONNECTION)
    return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)


def call_blocking(service: FakeService, call: dict[str, Any], retries: dict[str, Any]) -> Any:
    """Make a blocking call."""
    with open_channel(service.target, **retries) as channel:
        return channel.unary_unary(CHARGE)(b"", **call)


def call_future(service: FakeService, call: dict[str, Any], retries: dict[str, Any]) -> Any:
    """Make a call with `future()`."""
    with open_channel(service.target, **retries) as channel:
        return channel.unary_unary(CHARGE).future(b"", **call).result()


def call_stream(service: FakeService, call: dict[str, Any], retries: dict[str, Any]) -> Any:
    """Read a response stream, and return the same response as a unary call."""
    with open_channel(service.target, **retries) as channel:
        messages = b"".join(channel.unary_stream(WATCH)(b"", **call))
        return messages.replace(b"onetwo", b"paid")


def call_coroutine(service: FakeService, call: dict[str, Any], retries: dict[str, Any]) -> Any:
    """Await a unary call."""

    async def main() -> Any:
        async with open_async_channel(service.target, **retries) as channel:
            return await channel.unary_unary(CHARGE)(b"", **call)

    return asyncio.run(main())


def call_async_stream(service: FakeService, call: dict[str, Any], retries: dict[str, Any]) -> Any:
    """Read a response stream with `grpc.aio`, and return the same response as a unary call."""

    async def main() -> Any:
        async with open_async_channel(service.target, **retries) as channel:
            messages = [message async for message in channel.unary_stream(WATCH)(b"", **call)]
            return b"".join(messages).replace(b"onetwo", b"paid")

    return asyncio.run(main())


CallStyle: TypeAlias = Callable[[FakeService, dict[str, Any], dict[str, Any]], Any]
CALL_STYLES: list[CallStyle] = [
    call_blocking,
    call_future,
    call_stream,
    call_coroutine,
    call_async_stream,
]


def make_failing_call(
    call_style: CallStyle, service: FakeService, *, call: Any = None, **retries: Any
) -> Any:
    """Make a call that fails, and return its error."""
    with pytest.raises(grpc.RpcError) as caught:
        call_style(service, call or {}, retries)
    return caught.value


def give_up_reason(error: BaseException) -> Reason | None:
    """Return the reason why the call was given up."""
    record = tarry.record_of(error)
    assert record is not None
    return record.reason


def retry_delays(events: list[tarry.Event]) -> list[float]:
    """Return the delay before each retry."""
    return [event.delay for event in events if isinstance(event, tarry.WillWait)]


def cancel_on_event(event_type: type[tarry.Event], calls: list[Any]) -> Any:
    """Cancel `calls[0]` before or in its second attempt, once the test has set the returned event.

    Also return the function that removes the listener.
    """
    call_created = threading.Event()

    def listener(event: tarry.Event) -> None:
        if isinstance(event, event_type) and getattr(event, "attempt", 2) == 2:
            call_created.wait()
            calls[0].cancel()

    return call_created, tarry.listen(listener)
