"""Lanes whose target refuses the first attempt of each task ("processing, ask again")."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tarry.service.delivery import DeliveryResult
from tarry.service.engine.lanes import build_breaker
from tests.service.engine.harness import OK, EngineHarness

if TYPE_CHECKING:
    from tarry.service.delivery import DeliveryRequest

HOUR_S = 3600


class AskAgainTarget:
    """A target that answers the first attempt of each task, or all attempts, with a status."""

    def __init__(self, status: int, *, is_dead: bool = False) -> None:
        self.status = status
        self.is_dead = is_dead
        self.requests: Counter[str] = Counter()
        self.succeeded_count = 0

    async def send(self, request: DeliveryRequest) -> DeliveryResult:
        """Answer a request."""
        self.requests[request.url] += 1
        await asyncio.sleep(0.02)
        if self.is_dead or self.requests[request.url] == 1:
            return DeliveryResult(status=self.status, duration_ms=20.0)
        self.succeeded_count += 1
        return OK

    async def close(self) -> None:
        """Do nothing."""


async def start(target: AskAgainTarget, count: int) -> EngineHarness:
    """Return a running engine with tasks for the target."""
    harness = EngineHarness(target, build_breaker=build_breaker)
    await harness.engine.start()
    await harness.add(
        *(harness.new_task(f"http://a.example:80/{number}") for number in range(count))
    )
    return harness


@pytest.mark.parametrize("status", [425, 503])
async def test_a_target_that_refuses_first_attempts_gets_all_tasks(status: int) -> None:
    """2,000 tasks are delivered within 25 s, each with two requests."""
    target = AskAgainTarget(status)
    harness = await start(target, 2000)
    await asyncio.sleep(25)

    assert 2000 == target.succeeded_count
    assert {2} == set(target.requests.values())
    await harness.engine.stop(1)


@pytest.mark.parametrize("rate", [7.3, 61.0])
async def test_new_tasks_do_not_wait_long_for_a_target_that_refuses_first_attempts(
    rate: float,
) -> None:
    """Tasks that arrive one after the other are delivered within 8 s, from the beginning."""

    class TimedTarget(AskAgainTarget):
        """A target that records when it has accepted each task."""

        def __init__(self) -> None:
            super().__init__(503)
            self.accepted_at: dict[str, float] = {}

        async def send(self, request: DeliveryRequest) -> DeliveryResult:
            """Answer a request."""
            result = await super().send(request)
            if result is OK:
                self.accepted_at[request.url] = asyncio.get_running_loop().time()
            return result

    target, loop, rng = TimedTarget(), asyncio.get_running_loop(), random.Random(7)
    harness = await start(target, 0)
    added_at: dict[str, float] = {}
    end = loop.time() + 40
    while loop.time() < end:
        url = f"http://a.example:80/{len(added_at)}"
        added_at[url] = loop.time()
        await harness.add(harness.new_task(url))
        await asyncio.sleep(rng.expovariate(rate))
    await asyncio.sleep(10)

    assert added_at.keys() == target.accepted_at.keys()
    assert max(target.accepted_at[url] - added_at[url] for url in added_at) <= 8
    assert {2} == set(target.requests.values())
    await harness.engine.stop(1)


async def test_a_dead_target_gets_only_probes() -> None:
    """Retries among the probes do not add requests: 380 an hour, as with first attempts alone."""
    target = AskAgainTarget(503, is_dead=True)
    harness = await start(target, 2000)
    await asyncio.sleep(HOUR_S)

    assert sum(target.requests.values()) <= 380
    await harness.engine.stop(1)
