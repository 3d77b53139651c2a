"""The downstream that the HTTP adapters create for an origin, with a breaker and a budget."""

from __future__ import annotations

import asyncio

import httpx
import pytest

import tarry
from tarry import Policy
from tarry.adapters.httpx import AsyncRetryTransport
from tarry.testing import VirtualClock

URL = "http://payments.test"


def build_client(clock: VirtualClock, outage: float) -> httpx.AsyncClient:
    """Return a client of a server that responds with 503 for the first seconds of the clock."""

    def respond(_: httpx.Request) -> httpx.Response:
        return httpx.Response(503 if clock.elapsed < outage else 200)

    policy = Policy(jitter="none")
    transport = AsyncRetryTransport(httpx.MockTransport(respond), policy=policy)
    return httpx.AsyncClient(transport=transport)


@pytest.mark.parametrize("count", [10, 50])
def test_a_blip_does_not_open_the_breaker(count: int) -> None:
    """Calls that start together survive 150 ms of errors, although 20 attempts and more fail."""

    async def main() -> list[int]:
        async with build_client(clock, outage=0.15) as client:
            responses = await asyncio.gather(*(client.get(URL) for _ in range(count)))
        return [response.status_code for response in responses]

    with VirtualClock(start=0.0) as clock:
        assert [200] * count == clock.run(main)


def test_a_restart_does_not_open_the_breaker() -> None:
    """Slow requests survive a restart that resets all of them at the same time."""

    async def main() -> list[int]:
        restarted = asyncio.Event()

        async def respond(request: httpx.Request) -> httpx.Response:
            if not restarted.is_set():
                await restarted.wait()
                raise httpx.RemoteProtocolError("server disconnected", request=request)
            return httpx.Response(200)

        transport = AsyncRetryTransport(httpx.MockTransport(respond))
        async with httpx.AsyncClient(transport=transport) as client:
            requests = []
            for _ in range(30):
                requests.append(asyncio.create_task(client.get(URL)))
                await asyncio.sleep(0.1)
            restarted.set()
            responses = [*await asyncio.gather(*requests), await client.get(URL)]
        return [response.status_code for response in responses]

    with VirtualClock(start=0.0) as clock:
        assert [200] * 31 == clock.run(main)


def test_an_outage_opens_the_breaker() -> None:
    """Errors for more than a second open the breaker, which sends probes after two seconds."""

    async def main() -> float:
        async with build_client(clock, outage=2.5) as client:
            with pytest.raises(tarry.BreakerOpen) as caught:
                while clock.elapsed < 2.5:
                    await asyncio.gather(*(client.get(URL) for _ in range(5)))
            retry_after = caught.value.retry_after
            assert retry_after is not None
            await asyncio.sleep(retry_after)
            assert 200 == (await client.get(URL)).status_code
        return retry_after

    with VirtualClock(start=0.0) as clock:
        assert 1.0 < clock.run(main) <= 2.2
