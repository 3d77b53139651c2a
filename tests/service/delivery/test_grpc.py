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
from tests.service.delivery.harness import LOOPBACK_GUARD, new_request, send_all

grpc: Any = import_module("grpc")
import_module("grpc.aio")


class FakeServer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A gRPC server; the request message selects its response."""

    def __init__(self) -> None:
        self.received_calls: list[tuple[str, bytes, dict[str, str | bytes]]] = []
        self.authority: list[str] = []
        self.started = asyncio.Event()
        self.port = self.tls_port = 0

    def service(self, details: Any) -> Any:
        """Return a handler for any method."""

        async def handler(message: bytes, context: Any) -> bytes:
            self.received_calls.append(
                (details.method, message, dict(context.invocation_metadata()))
            )
            self.started.set()
            context.set_trailing_metadata((("grpc-retry-pushback-ms", "5"), ("x-bin", b"\1\2")))
            if message == b"never":
                await asyncio.Event().wait()
            if message.startswith(b"0"):
                context.set_compression(grpc.Compression.Gzip)
            if message.isdigit():
                return bytes(int(message))
            if message.startswith(b"exhausted "):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message[10:].decode())
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
    pem = (Path(hostile.ca_file).parent / "good.pem").read_bytes()
    credentials = grpc.ssl_server_credentials([(pem, pem)])
    handler.tls_port = server.add_secure_port("127.0.0.1:0", credentials)
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
    headers = {"Idempotency-Key": '"k"', "X-Bin": "AQI", "Content-Type": "application/json"}

    async def test(server: FakeServer) -> list[DeliveryResult]:
        url = f"grpc://localhost:{server.port}/pkg.Service/Call"
        result = await send_all(
            GrpcDeliveryClient(LOOPBACK_GUARD),
            new_request(url, body=b"\x00\xff", headers=headers),
            new_request(url, body=b"busy"),
            new_request(url, body=b"again", max_excerpt=5),
        )
        method, message, metadata = server.received_calls[0]
        assert ("/pkg.Service/Call", b"\x00\xff") == (method, message)
        assert ('"k"', b"\x01\x02") == (metadata["idempotency-key"], metadata["x-bin"])
        assert "content-type" not in metadata
        assert 3 == len(server.received_calls)
        return result

    first, second, third = with_server(hostile, test)
    assert ("OK", b"got \x00\xff", None) == (first.status, first.excerpt, first.fault)
    assert [("grpc-retry-pushback-ms", "5"), ("x-bin", "AQI=")] == first.headers == second.headers
    assert ("UNAVAILABLE", "not now", None) == (second.status, second.error, second.fault)
    assert ("OK", b"got a", True) == (third.status, third.excerpt, third.truncated)
    assert not first.truncated
    assert "127.0.0.1" == first.remote


def test_oversized_response_is_not_retried(hostile: HostileTargets) -> None:
    """An oversized response is an INVALID fault; RESOURCE_EXHAUSTED of the target is a status."""
    limit = MAX_MESSAGE_BYTES

    async def test(server: FakeServer) -> list[DeliveryResult]:
        url = f"grpc://127.0.0.1:{server.port}/S/M"
        messages = (
            b"%d" % limit,
            b"%d" % (limit + 1),
            b"0%d" % (limit + 1),
            b"exhausted Received message larger than max (2 vs. 1)",
        )
        return await send_all(
            GrpcDeliveryClient(LOOPBACK_GUARD), *(new_request(url, body=each) for each in messages)
        )

    at_limit, too_long, compressed, exhausted = with_server(hostile, test)
    assert ("OK", True, None) == (at_limit.status, at_limit.truncated, at_limit.fault)
    for each in (too_long, compressed):
        assert (None, Fault.INVALID) == (each.status, each.fault)
        assert f"longer than the {limit} bytes" in (each.error or "")
    assert ("RESOURCE_EXHAUSTED", None) == (exhausted.status, exhausted.fault)


def test_error_details_are_bounded_and_printable(hostile: HostileTargets) -> None:
    """The details of a target's error are cut, and control characters are replaced."""

    async def test(server: FakeServer) -> list[DeliveryResult]:
        url = f"grpc://127.0.0.1:{server.port}/S/M"
        details = "\x1b[2J\nü" + "x" * 3000
        return await send_all(
            GrpcDeliveryClient(LOOPBACK_GUARD),
            new_request(url, body=f"exhausted {details}".encode()),
        )

    assert " [2J ü" + "x" * 2042 == with_server(hostile, test)[0].error


def test_certificate_is_checked_against_the_name(hostile: HostileTargets) -> None:
    """The certificate must be trusted and match the host of the URL."""

    async def test(server: FakeServer) -> list[DeliveryResult]:
        good = f"grpcs://localhost:{server.tls_port}/S/M"
        wrong_host = f"grpcs://other.example:{server.tls_port}/S/M"
        trusting = GrpcDeliveryClient(LOOPBACK_GUARD, ca_file=hostile.ca_file)
        resolve = trusting._resolve_grpc_target

        async def resolve_to_loopback(tenant: str, target: Any) -> str:
            if target.host == "other.example":
                return f"ipv4:127.0.0.1:{target.port}"
            return await resolve(tenant, target)

        trusting._resolve_grpc_target = resolve_to_loopback  # type: ignore[method-assign]
        return [
            *await send_all(trusting, new_request(good), new_request(wrong_host)),
            *await send_all(GrpcDeliveryClient(LOOPBACK_GUARD), new_request(good)),
        ]

    assert ["OK", "UNAVAILABLE", "UNAVAILABLE"] == [
        result.status for result in with_server(hostile, test)
    ]


def test_deadline_ends_a_call(hostile: HostileTargets) -> None:
    """A call that exceeds its timeout ends with a TIMEOUT fault."""

    async def test(server: FakeServer) -> list[DeliveryResult]:
        url = f"grpc://127.0.0.1:{server.port}/S/M"
        return await send_all(
            GrpcDeliveryClient(LOOPBACK_GUARD), new_request(url, body=b"never", timeout=0.3)
        )

    assert Fault.TIMEOUT is with_server(hostile, test)[0].fault


def test_cancelling_and_closing_end_a_call(hostile: HostileTargets) -> None:
    """A cancelled call raises CancelledError; closing the client fails a call as INTERNAL."""

    async def test(server: FakeServer) -> list[DeliveryResult]:
        delivery = GrpcDeliveryClient(LOOPBACK_GUARD)
        never = new_request(f"grpc://127.0.0.1:{server.port}/S/M", body=b"never")
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
    "headers", [{"X-A": "1\r\nX-B: 2"}, {"X A": "1"}, {"X-Bin": "?"}, {"X-A": "ü"}, {"grpc-a": "1"}]
)
async def test_invalid_metadata_is_not_sent(headers: dict[str, str]) -> None:
    """A request with headers that gRPC cannot send fails with INVALID."""
    assert (
        Fault.INVALID
        is (
            await send_all(
                GrpcDeliveryClient(LOOPBACK_GUARD),
                new_request("grpc://127.0.0.1:1/S/M", headers=headers),
            )
        )[0].fault
    )


def test_unusable_proxy_and_missing_extra_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that gRPC cannot use is rejected; without grpcio the error names the extra."""
    assert is_installed()
    with pytest.raises(ConfigurationError, match="proxy must be http://"):
        GrpcDeliveryClient(LOOPBACK_GUARD, proxy="socks5h://127.0.0.1:1")
    monkeypatch.setitem(__import__("sys").modules, "grpc", None)
    with pytest.raises(MissingExtra, match=r"pip install 'tarry\[grpc\]'"):
        GrpcDeliveryClient(LOOPBACK_GUARD)
