"""Helpers that send requests in a test, on asyncio or on uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from tarry.service.delivery import DeliveryClient, DeliveryRequest, DeliveryResult
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.client import HttpDeliveryClient

T = TypeVar("T")

LOOPBACK_GUARD = Guard(dev=True)
"""Allows connections to loopback addresses."""
LOOPS = ["asyncio", "uvloop"]
"""Event loops to test with: the service uses uvloop where it is available."""
_loop_name = "asyncio"


def use_loop(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `run` use one of LOOPS in this test."""
    monkeypatch.setattr(f"{__name__}._loop_name", loop)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if _loop_name == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def new_request(url: str, **fields: Any) -> DeliveryRequest:
    """Return a request with default values for the other fields."""
    values: dict[str, Any] = {"method": "POST", "headers": {}, "body": b"{}", "timeout": 20.0}
    return DeliveryRequest(**({"tenant": "default", "url": url} | values | fields))


async def send_all(delivery: DeliveryClient, *requests: DeliveryRequest) -> list[DeliveryResult]:
    """Send requests one after the other, then close the client."""
    try:
        return [await delivery.send(each) for each in requests]
    finally:
        await delivery.close()


def send(
    url: str, guard: Guard = LOOPBACK_GUARD, ca_file: str | None = None, **fields: Any
) -> DeliveryResult:
    """Send one request over HTTP with a new client."""

    async def main() -> list[DeliveryResult]:
        return await send_all(
            HttpDeliveryClient(guard, ca_file=ca_file), new_request(url, **fields)
        )

    return run(main())[0]


async def wait_for(condition: Callable[[], object]) -> None:
    """Wait until other tasks or threads have made a condition true."""
    while not condition():  # noqa: ASYNC110 - threads change the condition without an event
        await asyncio.sleep(0.002)


async def wait_until_empty(delivery: HttpDeliveryClient) -> int:
    """Wait until all pools are empty; return the number of free connection slots."""
    pools = list(delivery._pools.values())
    await wait_for(lambda: all(pool.is_empty for pool in pools))
    return delivery._limit._free_slots


async def close_and_wait(delivery: HttpDeliveryClient) -> int:
    """Close a client; return the number of free connection slots once all pools are empty."""
    pools = list(delivery._pools.values())
    await delivery.close()
    await wait_for(lambda: all(pool.is_empty for pool in pools))
    return delivery._limit._free_slots
