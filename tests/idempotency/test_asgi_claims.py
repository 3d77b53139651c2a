"""The middleware and claims that hang, fail or come too late: they hold nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.idempotency import IdempotencyMiddleware, lease
from tarry.runtime import event_loops
from tarry.runtime.clocks import system
from tarry.testing import VirtualClock
from tests.idempotency.asking import Payments, ask
from tests.idempotency.conftest import Run
from tests.idempotency.wayward import FOR_EVER, Wayward


def test_a_store_that_hangs_refuses_in_time(run: Run) -> None:
    """A claim gets five seconds; then the request is refused, and has not run."""
    payments = Payments()

    async def main() -> None:
        app = IdempotencyMiddleware(payments, Wayward(before={"claim": FOR_EVER}))
        begun = system.now()
        assert 503 == (await ask(app)).status
        assert lease.STORE_TIMEOUT_S == pytest.approx(system.now() - begun)

    run(main)
    assert 0 == payments.runs


@pytest.mark.parametrize("wait", [{"before": {"claim": 8}}, {"after": {"claim": 8}}])
@pytest.mark.parametrize("patience", [1, 60])
def test_a_claim_that_came_too_late_is_given_back(
    run: Run, wait: dict[str, Any], patience: float
) -> None:
    """Cancelled or out of time: a claim that the store made after all holds nothing."""
    payments = Payments()

    async def main() -> None:
        store = Wayward(**wait)
        app = IdempotencyMiddleware(payments, store)
        begun = system.now()
        with event_loops.timeout(patience) as expiry:
            assert 503 == (await ask(app)).status
        assert expiry.expired == (patience == 1)
        assert min(patience, lease.STORE_TIMEOUT_S) == pytest.approx(system.now() - begun)
        await event_loops.sleep(10)
        store.before, store.after = {}, {}
        assert 201 == (await ask(app)).status

    run(main)
    assert 1 == payments.runs


def test_a_claim_that_failed_after_it_was_made_is_given_back(run: Run) -> None:
    """An error says nothing about whether the store did it: the next request does not wait."""

    class Lossy(Wayward):
        async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> None:
            await super().claim(key, fingerprint, owner, lease)
            raise ConnectionError("reset by peer")

    async def main() -> None:
        store = Lossy()
        assert 503 == (await ask(IdempotencyMiddleware(Payments(), store))).status
        await event_loops.sleep(1)
        assert ["claim", "release"] == store.calls
        assert {} == store._entries

    run(main)


def test_a_claim_that_is_made_after_all_is_given_back() -> None:
    """A database may do what it was asked after the request was cut off, and after a release."""

    class Stubborn(Wayward):
        async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> None:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                await asyncio.sleep(1)
                await super().claim(key, fingerprint, owner, lease)
                raise

    async def main() -> None:
        store = Stubborn()
        assert 503 == (await ask(IdempotencyMiddleware(Payments(), store))).status
        await asyncio.sleep(2)
        assert ["release", "claim", "release"] == store.calls
        assert {} == store._entries

    with VirtualClock() as clock:
        clock.run(main)
