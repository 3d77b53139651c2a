"""A real gRPC server as the target of a running service."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest

from tests.integration.service import Service, service

grpc: Any = import_module("grpc")

QUICK_RETRIES = {"initialDelayMs": 1, "maxDelayMs": 20, "maxAttempts": 3}


@pytest.fixture(scope="module")
def running_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run a service."""
    with service(tmp_path_factory.mktemp("service")) as started:
        yield started


class GrpcTarget(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A gRPC server; the method name lists its codes, or is LONG for an oversized response."""

    def __init__(self) -> None:
        self.received_calls: dict[str, list[tuple[bytes, dict[str, str | bytes]]]] = {}

    def service(self, details: Any) -> Any:
        """Return a handler for any method."""
        codes = details.method.rpartition("/")[2].split("_then_")

        def respond(message: bytes, context: Any) -> bytes:
            calls = self.received_calls.setdefault(details.method, [])
            calls.append((message, dict(context.invocation_metadata())))
            code = codes[min(len(calls), len(codes)) - 1]
            if code == "LONG":
                return bytes(5_000_000)
            if code != "OK":
                context.abort(grpc.StatusCode[code], "not now")
            return b"got " + message

        return grpc.unary_unary_rpc_method_handler(respond)


@pytest.fixture
def grpc_target() -> Iterator[tuple[str, GrpcTarget]]:
    """Run a gRPC server; return its address and its handler."""
    handler = GrpcTarget()
    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"grpc://127.0.0.1:{port}", handler
        server.stop(0).wait()


@pytest.mark.parametrize(
    ("method", "status", "outcomes"),
    [
        ("OK", "SUCCEEDED", ["success"]),
        ("UNAVAILABLE_then_OK", "SUCCEEDED", ["transient", "success"]),
        ("RESOURCE_EXHAUSTED_then_OK", "SUCCEEDED", ["throttled", "success"]),
        ("RESOURCE_EXHAUSTED", "EXHAUSTED", ["throttled"] * 3),
        # EXHAUSTED is the status of every dead letter, also after a permanent failure.
        ("INVALID_ARGUMENT", "EXHAUSTED", ["permanent"]),
    ],
)
def test_grpc_target_is_called_and_its_codes_are_classified(
    running_service: Service,
    grpc_target: tuple[str, GrpcTarget],
    method: str,
    status: str,
    outcomes: list[str],
) -> None:
    """The body is the message, headers are metadata, and the code determines the outcome."""
    address, handler = grpc_target
    path, message = f"/shop.Orders/{method}", b"\0\1\2\xff"
    task = running_service.post(
        targetUrl=address + path,
        bodyBase64=b64encode(message).decode(),
        headers={"X-Tag": "seven"},
        policy=QUICK_RETRIES,
    )
    assert status == running_service.wait_until_finished(task["taskId"])["status"]
    log = running_service.attempts(task["taskId"])
    assert outcomes == [attempt["outcome"] for attempt in log]
    codes = method.split("_then_")
    expected = [codes[min(n, len(codes) - 1)] for n in range(len(log))]
    assert expected == [attempt["responseStatus"] for attempt in log]
    calls = handler.received_calls[path]
    assert [message] * len(log) == [body for body, _ in calls]
    for number, (_, metadata) in enumerate(calls, 1):
        assert (task["taskId"], "seven") == (metadata["idempotency-key"], metadata["x-tag"])
        assert str(number) == metadata["x-retry-attempt"]


def test_oversized_response_ends_the_task(
    running_service: Service, grpc_target: tuple[str, GrpcTarget]
) -> None:
    """The target is called once, because it may have processed the request."""
    address, handler = grpc_target
    task = running_service.post(targetUrl=f"{address}/shop.Orders/LONG", policy=QUICK_RETRIES)
    finished = running_service.wait_until_finished(task["taskId"])
    assert ("EXHAUSTED", "permanent") == (finished["status"], finished["reason"])
    (attempt,) = running_service.attempts(task["taskId"])
    assert ("invalid", None) == (attempt["errorClass"], attempt["responseStatus"])
    assert "4194304 bytes" in attempt["errorMessage"]
    assert 1 == len(handler.received_calls["/shop.Orders/LONG"])
