from __future__ import annotations

import asyncio

from tarry.errors import MissingExtra
from tarry.service.delivery.dispatch import DeliveryDispatcher
from tarry.service.delivery.messages import Delivery, DeliveryRequest, DeliveryResult, Fault
from tests.service.delivery.harness import request


class Named:
    """A delivery that answers with its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False

    async def send(self, request: DeliveryRequest) -> DeliveryResult:
        """Answer."""
        return DeliveryResult(status=self.name)

    async def close(self) -> None:
        """Remember it."""
        self.is_closed = True


def test_the_scheme_decides() -> None:
    """The one for gRPC is made when it is first needed, and once; both are closed."""
    made: list[Named] = []
    http = Named("http")

    def grpc() -> Delivery:
        made.append(Named("grpc"))
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


def test_a_missing_extra_charges_nobody() -> None:
    """It is said, and HTTP goes on."""

    def grpc() -> Delivery:
        msg = "gRPC targets need grpcio: pip install 'tarry[grpc]'"
        raise MissingExtra(msg)

    async def run() -> list[DeliveryResult]:
        deliveries = DeliveryDispatcher(Named("http"), grpc)
        urls = ["grpc://h:1/S/M", "http://h/"]
        result = [await deliveries.send(request(url)) for url in urls]
        await deliveries.close()
        return result

    first, second = asyncio.run(run())
    assert Fault.INTERNAL is first.fault
    assert "tarry[grpc]" in (first.error or "")
    assert "http" == second.status
