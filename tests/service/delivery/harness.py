"""Short ways to send a request in a test, on one kind of event loop or the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.client import HttpDelivery
from tarry.service.delivery.messages import Delivery, DeliveryRequest, DeliveryResult

T = TypeVar("T")

HERE = Guard(dev=True)
"""Lets attempts go to this machine."""
LOOPS = ["asyncio", "uvloop"]
"""The service runs on the second where there is one."""
_on = "asyncio"


def use(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `run` run on one of LOOPS in this test."""
    monkeypatch.setattr(f"{__name__}._on", loop)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run on a loop of its own."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if _on == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def request(url: str, **others: Any) -> DeliveryRequest:
    """A request with the usual rest."""
    values: dict[str, Any] = {"method": "POST", "headers": [], "body": b"{}", "timeout": 20.0}
    return DeliveryRequest(url=url, **(values | others))


async def send_all(delivery: Delivery, *requests: DeliveryRequest) -> list[DeliveryResult]:
    """Send one after the other, then close."""
    try:
        return [await delivery.send(each) for each in requests]
    finally:
        await delivery.close()


def send(url: str, guard: Guard = HERE, ca: str | None = None, **others: Any) -> DeliveryResult:
    """Send one request over HTTP, on a connection of its own."""

    async def main() -> list[DeliveryResult]:
        return await send_all(HttpDelivery(guard, ca=ca), request(url, **others))

    return run(main())[0]


async def until(holds: Callable[[], object]) -> None:
    """Wait for something that other tasks or threads bring about."""
    while not holds():  # noqa: ASYNC110 - there is nothing to be woken by
        await asyncio.sleep(0.002)


async def emptied(delivery: HttpDelivery) -> int:
    """Wait until nothing is left in a delivery; return how much room there is then."""
    pools = list(delivery._pools.values())
    await until(lambda: all(pool.is_empty for pool in pools))
    return delivery._limit._free


async def closed(delivery: HttpDelivery) -> int:
    """Close a delivery; return how much room there is when nothing is left in it."""
    pools = list(delivery._pools.values())
    await delivery.close()
    await until(lambda: all(pool.is_empty for pool in pools))
    return delivery._limit._free
