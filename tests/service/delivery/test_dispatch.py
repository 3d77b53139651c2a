from __future__ import annotations

import asyncio
from typing import Any

from tarry.errors import MissingExtra
from tarry.service.delivery import (
    DeliveryClient,
    DeliveryDispatcher,
    DeliveryRequest,
    DeliveryResult,
    Fault,
    start_function,
)
from tests.service.delivery.harness import new_request


class FakeDeliveryClient:
    """A client that returns its name as the status of each delivery."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False

    async def send(self, request: DeliveryRequest) -> DeliveryResult:
        """Return a result whose status is the name."""
        return DeliveryResult(status=self.name)

    async def close(self) -> None:
        """Record that the client is closed."""
        self.is_closed = True


async def test_scheme_selects_the_client() -> None:
    """The gRPC client is built once, for the first gRPC target, and both clients are closed."""
    grpc_clients: list[FakeDeliveryClient] = []
    http = FakeDeliveryClient("http")

    def build_grpc_client() -> DeliveryClient:
        grpc_clients.append(FakeDeliveryClient("grpc"))
        return grpc_clients[-1]

    dispatcher = DeliveryDispatcher(http, build_grpc_client)
    urls = ["http://h/", "https://h/", "grpc://h:1/S/M", "grpcs://h:1/S/M", "http://grpc/"]
    statuses: list[object] = [(await dispatcher.send(new_request(url))).status for url in urls]
    for url in urls:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        dispatcher.start(new_request(url), done.set_result)
        statuses.append((await done).status)
    await dispatcher.close()
    assert ["http", "http", "grpc", "grpc", "http"] * 2 == statuses
    assert 1 == len(grpc_clients)
    assert grpc_clients[0].is_closed
    assert http.is_closed


async def test_missing_extra_is_an_internal_fault() -> None:
    """A gRPC target fails with an error that names the extra, and HTTP targets still work."""

    def build_grpc_client() -> DeliveryClient:
        msg = "gRPC targets need grpcio: pip install 'tarry[grpc]'"
        raise MissingExtra(msg)

    dispatcher = DeliveryDispatcher(FakeDeliveryClient("http"), build_grpc_client)
    urls = ["grpc://h:1/S/M", "http://h/"]
    result = [await dispatcher.send(new_request(url)) for url in urls]
    await dispatcher.close()
    first, second = result
    assert Fault.INTERNAL is first.fault
    assert "tarry[grpc]" in (first.error or "")
    assert "http" == second.status


async def test_coroutines_call_back() -> None:
    """A client that has only coroutines calls back with the result, the error or a cancellation."""

    class FailingClient(FakeDeliveryClient):
        async def send(self, request: DeliveryRequest) -> DeliveryResult:
            raise ZeroDivisionError

    done: list[Any] = []
    start = start_function(FakeDeliveryClient("coroutine"))
    start(new_request("http://h/"), done.append)
    start(new_request("http://h/"), done.append).cancel()
    start_function(FailingClient("failing"))(new_request("http://h/"), done.append)
    assert not done
    await asyncio.sleep(0.01)
    result, cancelled, error = done
    assert ["coroutine", asyncio.CancelledError, ZeroDivisionError] == (
        [result.status, type(cancelled), type(error)]
    )
