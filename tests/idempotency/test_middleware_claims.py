"""Claims that find a record, and claims that hang, fail or succeed too late."""

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
    lease,
)
from tarry.runtime import clocks
from tarry.runtime.clocks import environment
from tarry.testing import VirtualClock
from tests.idempotency.asgi_client import PaymentsApp, Response, send_request
from tests.idempotency.conftest import Run
from tests.idempotency.faulty_store import FOREVER_S, FaultyStore

RESPONSE = StoredResponse(201, ((b"a", b"b"),), b"body")


class StoreWithRecord(MemoryStore):
    """A store that has a record for every key, which becomes free at 10 s on its clock."""

    def __init__(self, now: float, response: StoredResponse | None, *, same: bool = True) -> None:
        super().__init__()
        self.now, self.response, self.same = now, response, same

    async def claim(
        self, key: str, fingerprint: str, owner: str, lease: float
    ) -> ExistingRecord | None:
        """Return the record, of the same or of another request."""
        fingerprint = fingerprint if self.same else "other"
        return ExistingRecord(Record(fingerprint, 10.0, self.response), self.now)


def response_for(store: StoreWithRecord) -> Response:
    """Return the response of the middleware; the application must not run."""
    payments = PaymentsApp()
    response = asyncio.run(send_request(IdempotencyMiddleware(payments, store)))
    assert 0 == payments.runs
    return response


@pytest.mark.parametrize("response", [None, RESPONSE])
def test_other_fingerprint_is_a_mismatch(response: StoredResponse | None) -> None:
    """The same key must not be used for a different request, running or finished."""
    assert 422 == response_for(StoreWithRecord(0.0, response, same=False)).status


def test_finished_record_returns_its_response() -> None:
    """A repeated request gets the stored response."""
    response = response_for(StoreWithRecord(0.0, RESPONSE))

    assert (201, b"body", True) == (response.status, response.body, response.replayed)


@pytest.mark.parametrize(("now", "left"), [(0.0, 10), (9.5, 1), (10.0, 0), (11.0, 0)])
def test_running_record_is_in_progress(now: float, left: int) -> None:
    """While the first request runs, the others get the remaining time of its lease, at least 0."""
    response = response_for(StoreWithRecord(now, None))

    assert 409 == response.status
    assert response.problem["detail"].endswith(f"the key is free in {left} s.")


def test_hanging_claim_rejects_the_request(run: Run) -> None:
    """A claim that takes more than five seconds rejects the request, which does not run."""
    payments = PaymentsApp()

    async def main() -> None:
        app = IdempotencyMiddleware(payments, FaultyStore(before={"claim": FOREVER_S}))
        started = environment.now()
        assert 503 == (await send_request(app)).status
        assert lease.STORE_TIMEOUT_S == pytest.approx(environment.now() - started)

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
        started = environment.now()
        responded = False
        with clocks.timeout(patience):
            assert 503 == (await send_request(app)).status
            responded = True
        assert responded == (patience != 1)
        assert min(patience, lease.STORE_TIMEOUT_S) == pytest.approx(environment.now() - started)
        await clocks.async_sleep(10)
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
        await clocks.async_sleep(1)
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
