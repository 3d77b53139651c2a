"""Claims of a key that already has a record, and claims that hang, fail or succeed too late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.idempotency import (
    ExistingRecord,
    IdempotencyMiddleware,
    MemoryStore,
    Record,
    StoredResponse,
)
from tarry.idempotency import (
    lease as lease_module,
)
from tarry.runtime import event_loops
from tarry.runtime.effects import effects
from tarry.testing import VirtualClock
from tests.idempotency.asgi_client import PaymentsApp, Response, send_request
from tests.idempotency.faulty_store import FOREVER_S, FaultyStore

RESPONSE = StoredResponse(201, ((b"a", b"b"),), b"body")


class StoreWithRecord(MemoryStore):
    """A store that has a record for every key; the records expire at 10 s on its clock."""

    def __init__(
        self, now: float, response: StoredResponse | None, *, same_request: bool = True
    ) -> None:
        super().__init__()
        self.now, self.response, self.same_request = now, response, same_request

    async def claim(
        self, key: str, fingerprint: str, owner: str, lease: float
    ) -> ExistingRecord | None:
        """Return the record of the same or of another request."""
        fingerprint = fingerprint if self.same_request else "other"
        return ExistingRecord(Record(fingerprint, 10.0, self.response), self.now)


def send_with_store(store: StoreWithRecord) -> Response:
    """Send a request to a middleware with this store; check that the handler does not run."""
    payments = PaymentsApp()
    response = asyncio.run(send_request(IdempotencyMiddleware(payments, store)))
    assert 0 == payments.runs
    return response


@pytest.mark.parametrize("response", [None, RESPONSE])
def test_other_fingerprint_is_422(response: StoredResponse | None) -> None:
    """A key of a different request, running or finished, is rejected with 422."""
    assert 422 == send_with_store(StoreWithRecord(0.0, response, same_request=False)).status


def test_record_of_a_finished_request_returns_its_response() -> None:
    """A request whose key belongs to a finished request gets the stored response."""
    response = send_with_store(StoreWithRecord(0.0, RESPONSE))

    assert (201, b"body", True) == (response.status, response.body, response.is_replayed)


@pytest.mark.parametrize(("now", "remaining_s"), [(0.0, 10), (9.5, 1), (10.0, 0), (11.0, 0)])
def test_record_of_a_running_request_is_409(now: float, remaining_s: int) -> None:
    """While the first request runs, another gets a 409 with the remaining time of the lease."""
    response = send_with_store(StoreWithRecord(now, None))

    assert 409 == response.status
    assert response.problem["detail"].endswith(f"the key is free in {remaining_s} s.")


@pytest.mark.usefixtures("run_async")
async def test_hanging_claim_rejects_the_request() -> None:
    """A claim that exceeds the store timeout causes a 503, and the handler does not run."""
    payments = PaymentsApp()

    app = IdempotencyMiddleware(payments, FaultyStore(delays_before_effect={"claim": FOREVER_S}))
    started = effects.now()
    assert 503 == (await send_request(app)).status
    assert lease_module.STORE_TIMEOUT_S == pytest.approx(effects.now() - started)
    assert 0 == payments.runs


@pytest.mark.parametrize(
    "delays", [{"delays_before_effect": {"claim": 8}}, {"delays_after_effect": {"claim": 8}}]
)
@pytest.mark.parametrize("request_timeout_s", [1, 60])
@pytest.mark.usefixtures("run_async")
async def test_late_claim_is_released(delays: dict[str, Any], request_timeout_s: float) -> None:
    """A claim that is granted after the request was cancelled or after its timeout is released."""
    payments = PaymentsApp()

    store = FaultyStore(**delays)
    app = IdempotencyMiddleware(payments, store)
    started = effects.now()
    responded = False
    with event_loops.timeout(request_timeout_s):
        assert 503 == (await send_request(app)).status
        responded = True
    assert responded == (request_timeout_s != 1)
    assert min(request_timeout_s, lease_module.STORE_TIMEOUT_S) == pytest.approx(
        effects.now() - started
    )
    await event_loops.async_sleep(10)
    store.delays_before_effect, store.delays_after_effect = {}, {}
    assert 201 == (await send_request(app)).status
    assert 1 == payments.runs


@pytest.mark.usefixtures("run_async")
async def test_claim_that_raises_is_released() -> None:
    """If `claim` raises, the key is released, because the store may have granted the claim."""

    class StoreWithLostReplies(FaultyStore):
        async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> None:
            await super().claim(key, fingerprint, owner, lease)
            raise ConnectionError("reset by peer")

    store = StoreWithLostReplies()
    assert 503 == (await send_request(IdempotencyMiddleware(PaymentsApp(), store))).status
    await event_loops.async_sleep(1)
    assert ["claim", "release"] == store.calls
    assert {} == store._entries


def test_claim_granted_after_its_release_is_released_again() -> None:
    """If the store grants a timed-out claim only after its release, the claim is released again."""

    class StoreWithLateClaim(FaultyStore):
        async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> None:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                await asyncio.sleep(1)
                await super().claim(key, fingerprint, owner, lease)
                raise

    async def main() -> None:
        store = StoreWithLateClaim()
        assert 503 == (await send_request(IdempotencyMiddleware(PaymentsApp(), store))).status
        await asyncio.sleep(2)
        assert ["release", "claim", "release"] == store.calls
        assert {} == store._entries

    with VirtualClock() as clock:
        clock.run(main)
