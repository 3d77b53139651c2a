"""Short ways to send a request in a test."""

from __future__ import annotations

import asyncio
from typing import Any

from tarry.service.delivery.exchange import Delivered, Delivery, Request
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http import HttpDelivery

HERE = Guard(dev=True)
"""Lets attempts go to this machine."""


def request(url: str, **others: Any) -> Request:
    """A request with the usual rest."""
    values: dict[str, Any] = {"method": "POST", "headers": [], "body": b"{}", "timeout": 20.0}
    return Request(url=url, **(values | others))


async def send_all(delivery: Delivery, *requests: Request) -> list[Delivered]:
    """Send one after the other, then close."""
    try:
        return [await delivery.send(each) for each in requests]
    finally:
        await delivery.close()


def send(url: str, guard: Guard = HERE, ca: str | None = None, **others: Any) -> Delivered:
    """Send one request over HTTP, on a connection of its own."""

    async def run() -> list[Delivered]:
        return await send_all(HttpDelivery(guard, ca=ca), request(url, **others))

    return asyncio.run(run())[0]
