"""Claims that hang, fail or succeed too late do not keep their key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.idempotency import IdempotencyMiddleware, lease
from tarry.runtime import clocks
from tarry.runtime.clocks import system
from tarry.testing import VirtualClock
from tests.idempotency.asgi_client import PaymentsApp, send_request
from tests.idempotency.conftest import Run
from tests.idempotency.faulty_store import FOREVER_S, FaultyStore


def test_hanging_claim_rejects_the_request(run: Run) -> None:
    """A claim that takes more than five seconds rejects the request, which does not run."""
    payments = PaymentsApp()

    async def main() -> None:
        app = IdempotencyMiddleware(payments, FaultyStore(before={"claim": FOREVER_S}))
        started = system.now()
        assert 503 == (await send_request(app)).status
        assert lease.STORE_TIMEOUT_S == pytest.approx(system.now() - started)

    run(main)
    assert 0 == payments.runs


@pytest.mark.parametrize("wait", [{"before": {"claim": 8}}, {"after": {"claim": 8}}])
@pytest.mark.parametrize("patience", [1, 60])
def test_late_claim_is_released(run: Run, wait: dict[str, Any], patience: float) -> None:
    """A claim that the store makes after a cancellation or timeout is released."""
    payments = PaymentsApp()

    async def main() -> None:
        store = FaultyStore(**wait)
        app = IdempotencyMiddleware(payments, store)
        started = system.now()
        with clocks.timeout(patience) as expiry:
            assert 503 == (await send_request(app)).status
        assert expiry.expired == (patience == 1)
        assert min(patience, lease.STORE_TIMEOUT_S) == pytest.approx(system.now() - started)
        await clocks.sleep(10)
        store.before, store.after = {}, {}
        assert 201 == (await send_request(app)).status

    run(main)
    assert 1 == payments.runs


def test_claim_with_lost_answer_is_released(run: Run) -> None:
    """A claim that raises may have been made, so it is released."""

    class Lossy(FaultyStore):
        async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> None:
            await super().claim(key, fingerprint, owner, lease)
            raise ConnectionError("reset by peer")

    async def main() -> None:
        store = Lossy()
        assert 503 == (await send_request(IdempotencyMiddleware(PaymentsApp(), store))).status
        await clocks.sleep(1)
        assert ["claim", "release"] == store.calls
        assert {} == store._entries

    run(main)


def test_claim_made_after_the_release_is_released_again() -> None:
    """A database may make the claim after the request was cancelled and after a release."""

    class Stubborn(FaultyStore):
        async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> None:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                await asyncio.sleep(1)
                await super().claim(key, fingerprint, owner, lease)
                raise

    async def main() -> None:
        store = Stubborn()
        assert 503 == (await send_request(IdempotencyMiddleware(PaymentsApp(), store))).status
        await asyncio.sleep(2)
        assert ["release", "claim", "release"] == store.calls
        assert {} == store._entries

    with VirtualClock() as clock:
        clock.run(main)
