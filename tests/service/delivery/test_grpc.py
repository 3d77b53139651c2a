from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError, MissingExtra
from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.delivery.grpc import MAX_MESSAGE_BYTES, GrpcDeliveryClient, is_installed
from tests.integration.hostile import HostileTargets
from tests.service.delivery.harness import LOOPBACK_GUARD, request, send_all

grpc: Any = import_module("grpc")
import_module("grpc.aio")


class FakeServer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A gRPC server that does what the request message says."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes, dict[str, str | bytes]]] = []
        self.authority: list[str] = []
        self.started = asyncio.Event()
        self.port = self.secure = 0

    def service(self, details: Any) -> Any:
        """Return a handler for any method."""

        async def handler(message: bytes, context: Any) -> bytes:
            self.seen.append((details.method, message, dict(context.invocation_metadata())))
            self.started.set()
            context.set_trailing_metadata((("grpc-retry-pushback-ms", "5"), ("x-bin", b"\1\2")))
            if message == b"never":
                await asyncio.Event().wait()
            if message.startswith(b"0"):
                context.set_compression(grpc.Compression.Gzip)
            if message.isdigit():
                return bytes(int(message))
            if message.startswith(b"say "):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message[4:].decode())
            if message == b"busy":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
            return b"got " + message

        return grpc.unary_unary_rpc_method_handler(handler)


@asynccontextmanager
async def run_server(hostile: HostileTargets) -> AsyncIterator[FakeServer]:
    """Run a server with and without TLS."""
    handler = FakeServer()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    handler.port = server.add_insecure_port("127.0.0.1:0")
    pem = (Path(hostile.ca).parent / "good.pem").read_bytes()
    credentials = grpc.ssl_server_credentials([(pem, pem)])
    handler.secure = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield handler
    finally:
        await server.stop(0)


def with_server(
    hostile: HostileTargets, test: Callable[[FakeServer], Coroutine[Any, Any, list[DeliveryResult]]]
) -> list[DeliveryResult]:
    """Run a test with a server."""

    async def run() -> list[DeliveryResult]:
        async with run_server(hostile) as server:
            return await test(server)

    return asyncio.run(run())


def test_call_is_sent_unchanged(hostile: HostileTargets) -> None:
    """Body, headers, status code and trailing metadata are mapped to gRPC and back."""
    headers = [("Idempotency-Key", '"k"'), ("X-Bin", "AQI"), ("Content-Type", "application/json")]

    async def test(server: FakeServer) -> list[DeliveryResult]:
        url = f"grpc://localhost:{server.port}/pkg.Service/Call"
        result = await send_all(
            GrpcDeliveryClient(LOOPBACK_GUARD),
            request(url, body=b"\x00\xff", headers=headers),
            request(url, body=b"busy"),
            request(url, body=b"again", max_excerpt=5),
        )
        method, message, metadata = server.seen[0]
        assert ("/pkg.Service/Call", b"\x00\xff") == (method, message)
        assert ('"k"', b"\x01\x02") == (metadata["idempotency-key"], metadata["x-bin"])
        assert "content-type" not in metadata
        assert 3 == len(server.seen)
        return result

    first, second, third = with_server(hostile, test)
    assert ("OK", b"got \x00\xff", None) == (first.status, first.excerpt, first.fault)
    assert [("grpc-retry-pushback-ms", "5"), ("x-bin", "AQI=")] == first.headers == second.headers
    assert ("UNAVAILABLE", "not now", None) == (second.status, second.error, second.fault)
    assert ("OK", b"got a", True) == (third.status, third.excerpt, third.truncated)
    assert not first.truncated
    assert "127.0.0.1" == first.remote


def test_oversized_response_is_not_retried(hostile: HostileTargets) -> None:
    """An oversized message is no throttling, but RESOURCE_EXHAUSTED of the target is."""
    most = MAX_MESSAGE_BYTES

    async def test(server: FakeServer) -> list[DeliveryResult]:
        url = f"grpc://127.0.0.1:{server.port}/S/M"
        messages = (
            b"%d" % most,
            b"%d" % (most + 1),
            b"0%d" % (most + 1),
            b"say Received message larger than max (2 vs. 1)",
        )
        return await send_all(
            GrpcDeliveryClient(LOOPBACK_GUARD), *(request(url, body=each) for each in messages)
        )

    fits, too_long, zipped, busy = with_server(hostile, test)
    assert ("OK", True, None) == (fits.status, fits.truncated, fits.fault)
    for each in (too_long, zipped):
        assert (None, Fault.INVALID) == (each.status, each.fault)
        assert f"longer than the {most} bytes" in (each.error or "")
    assert ("RESOURCE_EXHAUSTED", None) == (busy.status, busy.fault)


def test_error_details_are_bounded_and_printable(hostile: HostileTargets) -> None:
    """The details of a target's error are cut, and control characters are replaced."""

    async def test(server: FakeServer) -> list[DeliveryResult]:
        url = f"grpc://127.0.0.1:{server.port}/S/M"
        said = "\x1b[2J\nü" + "x" * 3000
        return await send_all(
            GrpcDeliveryClient(LOOPBACK_GUARD), request(url, body=f"say {said}".encode())
        )

    assert " [2J ü" + "x" * 506 == with_server(hostile, test)[0].error


def test_certificate_is_checked_against_the_name(hostile: HostileTargets) -> None:
    """The certificate is checked against the host of the URL, not the address."""

    async def test(server: FakeServer) -> list[DeliveryResult]:
        good = f"grpcs://localhost:{server.secure}/S/M"
        elsewhere = f"grpcs://elsewhere.example:{server.secure}/S/M"
        trusting = GrpcDeliveryClient(LOOPBACK_GUARD, ca_file=hostile.ca)
        real = trusting._resolve_grpc_target

        async def address_of(target: Any) -> str:
            if target.host == "elsewhere.example":
                return f"ipv4:127.0.0.1:{target.port}"
            return await real(target)

        trusting._resolve_grpc_target = address_of  # type: ignore[method-assign]
        return [
            *await send_all(trusting, request(good), request(elsewhere)),
            *await send_all(GrpcDeliveryClient(LOOPBACK_GUARD), request(good)),
        ]

    assert ["OK", "UNAVAILABLE", "UNAVAILABLE"] == [
        result.status for result in with_server(hostile, test)
    ]


def test_deadline_ends_a_call(hostile: HostileTargets) -> None:
    """A call that exceeds its timeout is a timeout fault."""

    async def test(server: FakeServer) -> list[DeliveryResult]:
        url = f"grpc://127.0.0.1:{server.port}/S/M"
        return await send_all(
            GrpcDeliveryClient(LOOPBACK_GUARD), request(url, body=b"never", timeout=0.3)
        )

    assert Fault.TIMEOUT is with_server(hostile, test)[0].fault


def test_cancelling_and_closing_end_a_call(hostile: HostileTargets) -> None:
    """Cancelling raises CancelledError, closing is an internal fault."""

    async def test(server: FakeServer) -> list[DeliveryResult]:
        delivery = GrpcDeliveryClient(LOOPBACK_GUARD)
        never = request(f"grpc://127.0.0.1:{server.port}/S/M", body=b"never")
        cancelled = asyncio.create_task(delivery.send(never))
        await server.started.wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert [0] == [channel.attempt_count for channel in delivery._channels.values()]
        server.started.clear()
        closed = asyncio.create_task(delivery.send(never))
        await server.started.wait()
        await delivery.close()
        return [await closed]

    assert Fault.INTERNAL is with_server(hostile, test)[0].fault


@pytest.mark.parametrize(
    "headers",
    [[("X-A", "1\r\nX-B: 2")], [("X A", "1")], [("X-Bin", "?")], [("X-A", "ü")], [("grpc-a", "1")]],
)
def test_invalid_metadata_is_not_sent(headers: list[tuple[str, str]]) -> None:
    """Headers that gRPC cannot send are a fault of the request."""

    async def run() -> list[DeliveryResult]:
        return await send_all(
            GrpcDeliveryClient(LOOPBACK_GUARD), request("grpc://127.0.0.1:1/S/M", headers=headers)
        )

    assert Fault.INVALID is asyncio.run(run())[0].fault


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the install line; a proxy that gRPC cannot use is rejected, too."""
    assert is_installed()
    with pytest.raises(ConfigurationError, match="proxy must be http://"):
        GrpcDeliveryClient(LOOPBACK_GUARD, proxy="socks5h://127.0.0.1:1")
    monkeypatch.setitem(__import__("sys").modules, "grpc", None)
    with pytest.raises(MissingExtra, match=r"pip install 'tarry\[grpc\]'"):
        GrpcDeliveryClient(LOOPBACK_GUARD)
