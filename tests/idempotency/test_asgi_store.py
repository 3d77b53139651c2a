"""The middleware and its store: leases that are renewed and lost, and a store that fails."""

from __future__ import annotations

import asyncio

import pytest
import trio

from tarry.idempotency import IdempotencyMiddleware, MemoryStore
from tarry.testing import VirtualClock
from tarry.wire.asgi import Receive, Scope, Send
from tests.idempotency.asking import Payments, ask, slow
from tests.idempotency.wayward import FOR_EVER, Wayward


@pytest.mark.parametrize("call", ["extend", "none"])
def test_a_lease_is_renewed_while_the_handler_runs(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler of many leases keeps its key; a store that is away for a moment does no harm."""
    payments = Payments()
    store = Wayward(call)

    async def main() -> None:
        app = IdempotencyMiddleware(slow(payments, 100), store, lease=30.0)
        first = asyncio.create_task(ask(app))
        await asyncio.sleep(15)
        store.fails = ()
        await asyncio.sleep(80)
        assert 409 == (await ask(app)).status
        assert 201 == (await first).status
        assert (await ask(app)).replayed

    with VirtualClock() as clock:
        clock.run(main)
    assert 1 == payments.runs
    assert (call == "extend") == ("lease not renewed because the store failed" in caplog.text)


def test_a_lease_is_renewed_on_trio() -> None:
    """The same holds on trio."""
    payments = Payments()

    async def sleepy(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(100)
        await payments(scope, receive, send)

    async def main() -> None:
        app = IdempotencyMiddleware(sleepy, Wayward(), lease=30.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, app)
            await trio.sleep(95)
            assert 409 == (await ask(app)).status
        assert (await ask(app)).replayed

    with VirtualClock() as clock:
        clock.run_trio(main)


def test_a_lease_that_was_lost_keeps_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Its client gets its answer, the key stays with who took it, and the log says so."""
    payments = Payments()
    store = Wayward("extend")

    async def main() -> None:
        app = IdempotencyMiddleware(slow(payments, 100), store, lease=30.0)
        first = asyncio.create_task(ask(app))
        await asyncio.sleep(50)
        second = asyncio.create_task(ask(app))
        await asyncio.sleep(30)
        store.fails = ()
        assert b"run 1" == (await first).body
        assert b"run 2" == (await second).body
        assert b"run 2" == (await ask(app)).body

    with VirtualClock() as clock:
        clock.run(main)
    assert 2 == caplog.text.count("lease expired and another request claimed the key")
    assert "claimed the key; the handler may have run twice" in " ".join(caplog.text.split())


def test_a_store_that_is_away_refuses_and_runs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """What may have run before is not run again."""
    payments = Payments()

    answer = asyncio.run(ask(IdempotencyMiddleware(payments, Wayward("claim"))))

    assert (503, b"1", 0) == (answer.status, answer.header(b"retry-after"), payments.runs)
    assert "Idempotency-Key cannot be checked" == answer.problem["title"]
    assert "the store is away" in caplog.text


def test_a_full_store_says_when_there_is_room() -> None:
    """The bound of the memory store is a 503 with the time at which a record ends."""

    async def main() -> None:
        app = IdempotencyMiddleware(Payments(), MemoryStore(1, clock=lambda: 0.0), retention=99.5)
        await ask(app, key=b"a")
        answer = await ask(app, key=b"b")
        assert (503, b"100") == (answer.status, answer.header(b"retry-after"))

    asyncio.run(main())


def test_one_slow_renewal_does_not_lose_the_lease(caplog: pytest.LogCaptureFixture) -> None:
    """A call that hangs is cut off within a part of the lease, and tried again a second later."""
    payments = Payments()

    async def main() -> None:
        store = Wayward(before={"extend": FOR_EVER})
        app = IdempotencyMiddleware(slow(payments, 100), store, lease=30.0)
        first = asyncio.create_task(ask(app))
        await asyncio.sleep(15.5)
        assert ["claim", "extend"] == store.calls
        store.before = {}
        await asyncio.sleep(1)
        assert ["claim", "extend", "extend"] == store.calls
        await asyncio.sleep(20)
        assert 409 == (await ask(app)).status
        assert 201 == (await first).status

    with VirtualClock() as clock:
        clock.run(main)
    assert 1 == payments.runs
    assert "another request claimed the key" not in caplog.text


@pytest.mark.parametrize(
    ("seconds", "retry_after"), [(5, b"1"), (19, b"1"), (21, b"9"), (29, b"1")]
)
def test_a_holder_that_is_silent_may_be_dead(seconds: float, retry_after: bytes) -> None:
    """A lease that should have been renewed long ago is worth waiting for, until it ends."""

    async def main() -> None:
        app = IdempotencyMiddleware(slow(Payments(), 1000), Wayward(), lease=30.0)
        dead = asyncio.create_task(ask(app))
        await asyncio.sleep(0.1)
        app._renewer._loop_leases.due.clear()  # type: ignore[union-attr]
        await asyncio.sleep(seconds - 0.1)
        answer = await ask(app)
        assert (409, retry_after) == (answer.status, answer.header(b"retry-after"))
        dead.cancel()

    with VirtualClock() as clock:
        clock.run(main)


def test_a_key_in_memory_is_held_without_a_lease() -> None:
    """Who shares the store's memory is not dead: nothing is renewed, and nothing runs out."""
    payments = Payments()

    async def main() -> None:
        app = IdempotencyMiddleware(slow(payments, 1000), MemoryStore(), lease=30.0)
        first = asyncio.create_task(ask(app))
        await asyncio.sleep(500)
        answer = await ask(app)
        assert (409, b"1") == (answer.status, answer.header(b"retry-after"))
        assert "the key is free in 30 s" in answer.problem["detail"]
        assert app._renewer._loop_leases is None
        assert 201 == (await first).status
        assert (await ask(app)).replayed

    with VirtualClock() as clock:
        clock.run(main)
    assert 1 == payments.runs


def test_a_step_that_fails_in_memory_leaves_the_key_to_its_lease() -> None:
    """Even a clock may fail: the key is not held for ever."""
    payments = Payments()
    now, broken = 1000.0, False

    def clock() -> float:
        if broken:
            raise OSError("no clock")
        return now

    async def breaking(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal broken
        broken = payments.runs == 0
        try:
            await payments(scope, receive, send)
        finally:
            broken = False

    async def main() -> None:
        nonlocal now
        app = IdempotencyMiddleware(breaking, MemoryStore(clock=clock), lease=30.0)
        with pytest.raises(OSError, match="no clock"):
            await ask(app)
        now += 31
        assert 201 == (await ask(app)).status

    asyncio.run(main())
