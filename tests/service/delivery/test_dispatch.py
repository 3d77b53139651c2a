from __future__ import annotations

import asyncio

from tarry.errors import MissingExtra
from tarry.service.delivery import (
    DeliveryClient,
    DeliveryDispatcher,
    DeliveryRequest,
    DeliveryResult,
    Fault,
)
from tests.service.delivery.harness import request


class NamedDelivery:
    """A delivery that returns its name as the status."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False

    async def send(self, request: DeliveryRequest) -> DeliveryResult:
        """Return the name."""
        return DeliveryResult(status=self.name)

    async def close(self) -> None:
        """Record the call."""
        self.is_closed = True


def test_scheme_selects_the_delivery() -> None:
    """The gRPC delivery is built once, for the first gRPC target; both are closed."""
    made: list[NamedDelivery] = []
    http = NamedDelivery("http")

    def grpc() -> DeliveryClient:
        made.append(NamedDelivery("grpc"))
        return made[-1]

    async def run() -> list[object]:
        deliveries = DeliveryDispatcher(http, grpc)
        urls = ["http://h/", "https://h/", "grpc://h:1/S/M", "grpcs://h:1/S/M", "http://grpc/"]
        statuses: list[object] = [(await deliveries.send(request(url))).status for url in urls]
        await deliveries.close()
        return statuses

    assert ["http", "http", "grpc", "grpc", "http"] == asyncio.run(run())
    assert 1 == len(made)
    assert made[0].is_closed
    assert http.is_closed


def test_missing_extra_is_an_internal_fault() -> None:
    """The error names the extra, and HTTP targets still work."""

    def grpc() -> DeliveryClient:
        msg = "gRPC targets need grpcio: pip install 'tarry[grpc]'"
        raise MissingExtra(msg)

    async def run() -> list[DeliveryResult]:
        deliveries = DeliveryDispatcher(NamedDelivery("http"), grpc)
        urls = ["grpc://h:1/S/M", "http://h/"]
        result = [await deliveries.send(request(url)) for url in urls]
        await deliveries.close()
        return result

    first, second = asyncio.run(run())
    assert Fault.INTERNAL is first.fault
    assert "tarry[grpc]" in (first.error or "")
    assert "http" == second.status
