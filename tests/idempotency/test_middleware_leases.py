"""Renewed, lost and expired leases of the middleware, and stores that reject claims."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import trio

from tarry.idempotency import IdempotencyMiddleware, MemoryStore
from tarry.testing import VirtualClock
from tarry.wire.http import Receive, Scope, Send
from tests.idempotency.asgi_client import PaymentsApp, delay_first_run, send_request
from tests.idempotency.faulty_store import FOREVER_S, FaultyStore


@pytest.mark.parametrize("failing_call", ["extend", "none"])
def test_lease_is_renewed_while_the_handler_runs(
    failing_call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that runs longer than its lease keeps its key, also if a renewal fails."""
    payments = PaymentsApp()
    store = FaultyStore(failing_call)

    async def main() -> None:
        app = IdempotencyMiddleware(delay_first_run(payments, 100), store, lease=30.0)
        first = asyncio.create_task(send_request(app))
        await asyncio.sleep(15)
        store.failing_calls = ()
        await asyncio.sleep(80)
        assert 409 == (await send_request(app)).status
        assert 201 == (await first).status
        assert (await send_request(app)).is_replayed

    with VirtualClock() as clock:
        clock.run(main)
    assert 1 == payments.runs
    assert (failing_call == "extend") == (
        "lease not renewed because the store failed" in caplog.text
    )


def test_lease_is_renewed_on_trio() -> None:
    """On trio, too, a handler that runs longer than its lease keeps its key."""
    payments = PaymentsApp()

    async def sleep_and_pay(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(100)
        await payments(scope, receive, send)

    async def main() -> None:
        app = IdempotencyMiddleware(sleep_and_pay, FaultyStore(), lease=30.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_request, app)
            await trio.sleep(95)
            assert 409 == (await send_request(app)).status
        assert (await send_request(app)).is_replayed

    with VirtualClock() as clock:
        clock.run_trio(main)


def test_response_of_a_lost_lease_is_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    """The response of a request that lost its lease is sent but not stored; a warning is logged."""
    payments = PaymentsApp()
    store = FaultyStore("extend")

    async def main() -> None:
        app = IdempotencyMiddleware(delay_first_run(payments, 100), store, lease=30.0)
        first = asyncio.create_task(send_request(app))
        await asyncio.sleep(50)
        second = asyncio.create_task(send_request(app))
        await asyncio.sleep(30)
        store.failing_calls = ()
        assert b"run 1" == (await first).body
        assert b"run 2" == (await second).body
        assert b"run 2" == (await send_request(app)).body

    with VirtualClock() as clock:
        clock.run(main)
    assert 2 == caplog.text.count("lease expired and another request claimed the key")
    assert "claimed the key; the handler may have run twice" in " ".join(caplog.text.split())


def test_failing_store_rejects_the_request(caplog: pytest.LogCaptureFixture) -> None:
    """If the claim fails, the request gets a 503, and the handler does not run."""
    payments = PaymentsApp()

    response = asyncio.run(send_request(IdempotencyMiddleware(payments, FaultyStore("claim"))))

    assert (503, b"1", 0) == (response.status, response.header(b"retry-after"), payments.runs)
    assert "Idempotency-Key cannot be checked" == response.problem["title"]
    assert "the store is unreachable" in caplog.text


@pytest.mark.parametrize("retention", [99.5, timedelta(seconds=99.5)], ids=repr)
async def test_full_store_rejects_the_request(retention: float | timedelta) -> None:
    """A full memory store causes a 503 with the time until a record expires as Retry-After."""
    app = IdempotencyMiddleware(
        PaymentsApp(), MemoryStore(1, clock=lambda: 0.0), retention=retention
    )
    await send_request(app, key=b"a")
    response = await send_request(app, key=b"b")
    assert (503, b"100") == (response.status, response.header(b"retry-after"))


def test_slow_renewal_does_not_lose_the_lease(caplog: pytest.LogCaptureFixture) -> None:
    """A renewal that hangs is cancelled before the lease expires, and retried after a second."""
    payments = PaymentsApp()

    async def main() -> None:
        store = FaultyStore(delays_before_effect={"extend": FOREVER_S})
        app = IdempotencyMiddleware(
            delay_first_run(payments, 100), store, lease=timedelta(seconds=30)
        )
        first = asyncio.create_task(send_request(app))
        await asyncio.sleep(15.5)
        assert ["claim", "extend"] == store.calls
        store.delays_before_effect = {}
        await asyncio.sleep(1)
        assert ["claim", "extend", "extend"] == store.calls
        await asyncio.sleep(20)
        assert 409 == (await send_request(app)).status
        assert 201 == (await first).status

    with VirtualClock() as clock:
        clock.run(main)
    assert 1 == payments.runs
    assert "another request claimed the key" not in caplog.text


@pytest.mark.parametrize(
    ("seconds", "retry_after"), [(5, b"1"), (19, b"1"), (21, b"9"), (29, b"1")]
)
def test_retry_after_of_a_lease_without_renewal(seconds: float, retry_after: bytes) -> None:
    """If a lease was not renewed in time, Retry-After is the time until its expiry."""

    async def main() -> None:
        app = IdempotencyMiddleware(delay_first_run(PaymentsApp(), 1000), FaultyStore(), lease=30.0)
        first = asyncio.create_task(send_request(app))
        await asyncio.sleep(0.1)
        app._renewer._loop_leases.next_renewals.clear()  # type: ignore[union-attr]
        await asyncio.sleep(seconds - 0.1)
        response = await send_request(app)
        assert (409, retry_after) == (response.status, response.header(b"retry-after"))
        first.cancel()

    with VirtualClock() as clock:
        clock.run(main)


def test_claim_in_the_memory_store_is_not_renewed() -> None:
    """A claim in the memory store is not renewed and does not expire while its request runs."""
    payments = PaymentsApp()

    async def main() -> None:
        app = IdempotencyMiddleware(delay_first_run(payments, 1000), MemoryStore(), lease=30.0)
        first = asyncio.create_task(send_request(app))
        await asyncio.sleep(500)
        response = await send_request(app)
        assert (409, b"1") == (response.status, response.header(b"retry-after"))
        assert "the key is free in 30 s" in response.problem["detail"]
        assert app._renewer._loop_leases is None
        assert 201 == (await first).status
        assert (await send_request(app)).is_replayed

    with VirtualClock() as clock:
        clock.run(main)
    assert 1 == payments.runs


async def test_lease_expires_after_the_memory_store_failed() -> None:
    """If the memory store fails to store the response, the key is free after the lease."""
    payments = PaymentsApp()
    now, clock_fails = 1000.0, False

    def clock() -> float:
        if clock_fails:
            raise OSError("no clock")
        return now

    async def break_clock_in_first_run(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal clock_fails
        clock_fails = payments.runs == 0
        try:
            await payments(scope, receive, send)
        finally:
            clock_fails = False

    app = IdempotencyMiddleware(break_clock_in_first_run, MemoryStore(clock=clock), lease=30.0)
    with pytest.raises(OSError, match="no clock"):
        await send_request(app)
    now += 31
    assert 201 == (await send_request(app)).status
