"""The middleware and a store in trouble: calls that hang, fail or are cut off lose nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tarry.idempotency import IdempotencyMiddleware, lease
from tarry.runtime import event_loops
from tarry.runtime.clocks import system
from tarry.wire.asgi import Receive, Scope, Send
from tests.idempotency.asking import Payments, ask
from tests.idempotency.conftest import Run
from tests.idempotency.wayward import FOR_EVER, Wayward


@pytest.mark.parametrize(("status", "call"), [(201, "finish"), (500, "release")])
def test_an_answer_does_not_wait_for_a_store_that_hangs(run: Run, status: int, call: str) -> None:
    """Its client gets it after five seconds at most."""

    async def main() -> None:
        app = IdempotencyMiddleware(Payments(status), Wayward(before={call: FOR_EVER}))
        begun = system.now()
        assert status == (await ask(app)).status
        assert lease.STORE_TIMEOUT_S == pytest.approx(system.now() - begun)

    run(main)


@pytest.mark.parametrize("trouble", [{"fails": ["finish"]}, {"before": {"finish": FOR_EVER}}])
def test_an_answer_that_could_not_be_written_is_written_later(
    run: Run, trouble: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The client has its answer at once; the store gets it when it is back, and a retry replays."""
    payments = Payments()

    async def main() -> None:
        store = Wayward(*trouble.get("fails", ()), before=trouble.get("before"))
        app = IdempotencyMiddleware(payments, store)
        assert b"run 1" == (await ask(app)).body
        assert 409 == (await ask(app)).status
        store.fails, store.before = (), {}
        await event_loops.sleep(20)
        assert (await ask(app)).replayed

    run(main)
    assert 1 == payments.runs
    assert "store failed, will retry" in caplog.text


def test_an_answer_that_cannot_be_written_is_given_up(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that stays away is not asked for ever, and the log says what was lost."""

    async def main() -> None:
        store = Wayward("finish")
        await ask(IdempotencyMiddleware(Payments(), store))
        await event_loops.sleep(1000)
        assert 5 < len(store.calls) < 30

    run(main)
    assert "store failed, its response is not stored" in caplog.text


def test_only_so_many_answers_wait_for_the_store(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in memory until then: beyond a bound they are not kept, and the log says so."""
    monkeypatch.setattr(lease, "_MAX_PENDING_SETTLEMENTS", 1)

    async def main() -> None:
        store = Wayward("finish")
        app = IdempotencyMiddleware(Payments(), store)
        for key in (b"a", b"b"):
            assert 201 == (await ask(app, key=key)).status
            await event_loops.sleep(0)
        store.fails = ()
        await event_loops.sleep(20)
        assert (await ask(app, key=b"a")).replayed
        assert 409 == (await ask(app, key=b"b")).status
        store.fails = ("finish",)
        await ask(app, key=b"c")
        store.fails = ()
        await event_loops.sleep(20)
        assert (await ask(app, key=b"c")).replayed

    run(main)
    assert 1 == caplog.text.count("store failed, its response is not stored")


def test_a_cancellation_does_not_lose_the_answer(run: Run) -> None:
    """A request that is cut off while its record is written has been done: a retry replays."""
    payments = Payments()

    async def main() -> None:
        store = Wayward(before={"finish": 2})
        app = IdempotencyMiddleware(payments, store, lease=30.0)
        with event_loops.timeout(1) as expiry:
            await ask(app)
        assert expiry.expired
        await event_loops.sleep(60)
        assert (await ask(app)).replayed

    run(main)
    assert 1 == payments.runs


def test_a_cancellation_and_a_store_that_fails_do_not_lose_the_answer(run: Run) -> None:
    """Cut off while a call is made that fails in the end: it is written later."""
    payments = Payments()

    async def main() -> None:
        store = Wayward("finish", before={"finish": 2})
        app = IdempotencyMiddleware(payments, store, lease=30.0)
        with event_loops.timeout(1):
            await ask(app)
        await event_loops.sleep(3)
        store.fails = ()
        await event_loops.sleep(60)
        assert (await ask(app)).replayed

    run(main)
    assert 1 == payments.runs


def test_a_cancellation_does_not_keep_a_key_that_is_given_back(run: Run) -> None:
    """A request that is cut off while its key is given back does give it back."""
    payments = Payments(500)

    async def main() -> None:
        app = IdempotencyMiddleware(payments, Wayward(before={"release": 2}))
        with event_loops.timeout(1):
            await ask(app)
        await event_loops.sleep(2)
        assert 500 == (await ask(app)).status

    run(main)
    assert 2 == payments.runs


def test_a_key_is_given_back_after_its_renewal(run: Run) -> None:
    """A renewal on its way would take again what was given back, so that waits for it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await event_loops.sleep(12)
        await Payments(500)(scope, receive, send)

    async def main() -> None:
        store = Wayward(before={"extend": 4})
        await ask(IdempotencyMiddleware(app, store, lease=30.0))
        await event_loops.sleep(10)
        assert ["claim", "extend", "release"] == store.calls
        assert {} == store._entries

    run(main)


@pytest.mark.parametrize(
    ("call", "words"),
    [("release", "store failed, will retry"), ("sweep", "failed to delete")],
)
def test_troubles_of_the_store_after_the_answer_are_logged(
    call: str,
    words: str,
    run: Run,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not reach the client."""
    monkeypatch.setattr(system, "draw", lambda: 0.0)
    status = 500 if call == "release" else 201

    async def main() -> None:
        app = IdempotencyMiddleware(Payments(status), Wayward(call))
        assert status == (await ask(app)).status

    with caplog.at_level(logging.WARNING, "tarry"):
        run(main)
    assert words in caplog.text
