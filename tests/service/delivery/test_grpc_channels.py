from __future__ import annotations

import pytest

from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.delivery import grpc as grpc_delivery
from tarry.service.delivery.grpc import GrpcDeliveryClient
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.targets import Target
from tests.integration.hostile import HostileTargets
from tests.service.delivery.harness import LOOPBACK_GUARD, new_request, send_all
from tests.service.delivery.scripted_server import run_proxy
from tests.service.delivery.test_grpc import FakeServer, with_server


class AddressGuard(Guard):
    """A guard that checks only the resolved addresses."""

    def check_host(self, target: Target) -> None:
        """Allow every URL."""


def test_guard_checks_url_and_addresses(hostile: HostileTargets) -> None:
    """The URL and the resolved addresses are checked; a closed port is UNAVAILABLE."""

    async def test(server: FakeServer) -> list[DeliveryResult]:
        by_url = await send_all(
            GrpcDeliveryClient(Guard()), new_request(f"grpc://127.0.0.1:{server.port}/S/M")
        )
        guarded = GrpcDeliveryClient(AddressGuard())
        by_name = await send_all(guarded, new_request(f"grpc://localhost:{server.port}/S/M"))
        assert [] == server.received_calls
        unknown = await send_all(
            GrpcDeliveryClient(LOOPBACK_GUARD), new_request("grpc://nowhere.invalid:1/S/M")
        )
        closed_port = await send_all(
            GrpcDeliveryClient(LOOPBACK_GUARD), new_request("grpc://127.0.0.1:1/S/M")
        )
        return [*by_url, *by_name, *unknown, *closed_port]

    by_url, by_name, unknown, closed_port = with_server(hostile, test)
    assert [Fault.BLOCKED, Fault.BLOCKED, Fault.DNS] == [
        result.fault for result in (by_url, by_name, unknown)
    ]
    assert "UNAVAILABLE" == closed_port.status


def test_channels_are_bounded(hostile: HostileTargets, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used channel is closed; a channel to an unreachable server is dropped."""
    monkeypatch.setattr(grpc_delivery, "MAX_CHANNELS", 1)

    async def test(server: FakeServer) -> list[DeliveryResult]:
        delivery = GrpcDeliveryClient(LOOPBACK_GUARD)
        urls = [f"grpc://{host}:{server.port}/S/M" for host in ("127.0.0.1", "localhost")]
        result = [await delivery.send(new_request(url)) for url in [*urls, *urls, urls[1]]]
        assert [("default", f"grpc:localhost:{server.port}")] == list(delivery._channels)
        result.append(await delivery.send(new_request("grpc://127.0.0.1:1/S/M")))
        assert [] == [*delivery._channels, *delivery._draining_channels]
        await delivery.close()
        return result

    assert ["OK"] * 5 + ["UNAVAILABLE"] == [each.status for each in with_server(hostile, test)]


def test_egress_proxy_is_always_used(hostile: HostileTargets) -> None:
    """Attempts go through the proxy, which also resolves the host name."""

    async def test(server: FakeServer) -> list[DeliveryResult]:
        async with run_proxy(port=server.port) as (proxy, heads):
            delivery = GrpcDeliveryClient(Guard(), proxy=proxy.url)
            result = await send_all(delivery, new_request("grpc://known-to-proxy.invalid:7/S/M"))
            assert ["CONNECT known-to-proxy.invalid:7 HTTP/1.1"] == [
                head.splitlines()[0] for head in heads
            ]
            return result

    assert "OK" == with_server(hostile, test)[0].status


def test_tenants_do_not_share_channels(hostile: HostileTargets) -> None:
    """Each tenant has its own channel to a target."""

    async def test(server: FakeServer) -> list[DeliveryResult]:
        delivery = GrpcDeliveryClient(LOOPBACK_GUARD)
        url = f"grpc://127.0.0.1:{server.port}/S/M"
        result = [
            await delivery.send(new_request(url, tenant=tenant)) for tenant in ("a", "b", "a")
        ]
        assert 2 == len({id(channel.grpc_channel) for channel in delivery._channels.values()})
        await delivery.close()
        return result

    assert ["OK"] * 3 == [each.status for each in with_server(hostile, test)]
