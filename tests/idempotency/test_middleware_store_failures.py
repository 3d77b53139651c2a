"""Store calls that hang, fail or are cancelled after the handler has run."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tarry import record_calls
from tarry.idempotency import IdempotencyMiddleware, lease
from tarry.runtime import event_loops
from tarry.runtime.effects import effects
from tarry.testing import captured_events
from tarry.wire.http import Receive, Scope, Send
from tests.idempotency.asgi_client import PaymentsApp, send_request
from tests.idempotency.conftest import Run
from tests.idempotency.faulty_store import FOREVER_S, FaultyStore


@pytest.mark.parametrize(("status", "call"), [(201, "finish"), (500, "release")])
@pytest.mark.usefixtures("run_async")
async def test_response_does_not_wait_for_a_hanging_store(status: int, call: str) -> None:
    """If the store hangs, the client gets its response after the store timeout."""
    app = IdempotencyMiddleware(
        PaymentsApp(status), FaultyStore(delays_before_effect={call: FOREVER_S})
    )
    started = effects.now()
    assert status == (await send_request(app)).status
    assert lease.STORE_TIMEOUT_S == pytest.approx(effects.now() - started)


@pytest.mark.parametrize(
    "faults", [{"failing_calls": ["finish"]}, {"delays_before_effect": {"finish": FOREVER_S}}]
)
@pytest.mark.usefixtures("run_async")
async def test_response_is_stored_later(
    faults: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """If the store fails, the client gets its response, which is stored when the store works."""
    payments = PaymentsApp()

    store = FaultyStore(
        *faults.get("failing_calls", ()), delays_before_effect=faults.get("delays_before_effect")
    )
    app = IdempotencyMiddleware(payments, store)
    assert b"run 1" == (await send_request(app)).body
    assert 409 == (await send_request(app)).status
    store.failing_calls, store.delays_before_effect = (), {}
    await event_loops.async_sleep(20)
    assert (await send_request(app)).is_replayed
    assert 1 == payments.runs
    assert "store failed, retrying in the background" in caplog.text


def test_retries_do_not_appear_in_the_telemetry_of_the_program(
    run_async: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """The retries of a store call emit no events, and are logged only by the middleware."""

    async def main() -> None:
        store = FaultyStore("finish")
        await send_request(IdempotencyMiddleware(PaymentsApp(), store))
        await event_loops.async_sleep(1000)

    with captured_events() as events, record_calls() as records:
        run_async(main)

    assert ([], []) == (events, records)
    assert {"tarry.idempotency"} == {record.name for record in caplog.records}


@pytest.mark.usefixtures("run_async")
async def test_storing_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """Storing a response in a store that keeps failing is given up, and that is logged."""
    store = FaultyStore("finish")
    await send_request(IdempotencyMiddleware(PaymentsApp(), store))
    await event_loops.async_sleep(1000)
    assert 5 < len(store.calls) < 30
    assert "store failed, the response is not stored" in caplog.text


@pytest.mark.usefixtures("run_async")
async def test_pending_responses_are_limited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response beyond the limit of pending responses is not stored later; that is logged."""
    monkeypatch.setattr(lease, "_MAX_PENDING_SETTLEMENTS", 1)

    store = FaultyStore("finish")
    app = IdempotencyMiddleware(PaymentsApp(), store)
    for key in (b"a", b"b"):
        assert 201 == (await send_request(app, key=key)).status
        await event_loops.async_sleep(0)
    store.failing_calls = ()
    await event_loops.async_sleep(20)
    assert (await send_request(app, key=b"a")).is_replayed
    assert 409 == (await send_request(app, key=b"b")).status
    store.failing_calls = ("finish",)
    await send_request(app, key=b"c")
    store.failing_calls = ()
    await event_loops.async_sleep(20)
    assert (await send_request(app, key=b"c")).is_replayed
    assert 1 == caplog.text.count("store failed, the response is not stored")
    assert 2 == caplog.text.count("store failed, retrying in the background")


@pytest.mark.usefixtures("run_async")
async def test_cancellation_does_not_lose_the_response() -> None:
    """If a request is cancelled while its response is being stored, the response is stored."""
    payments = PaymentsApp()

    store = FaultyStore(delays_before_effect={"finish": 2})
    app = IdempotencyMiddleware(payments, store, lease=30.0)
    with event_loops.timeout(1):
        await send_request(app)
        pytest.fail("not cancelled")
    await event_loops.async_sleep(60)
    assert (await send_request(app)).is_replayed
    assert 1 == payments.runs


@pytest.mark.usefixtures("run_async")
async def test_cancellation_and_store_failure_do_not_lose_the_response() -> None:
    """If a request is cancelled during a store call that fails, its response is stored later."""
    payments = PaymentsApp()

    store = FaultyStore("finish", delays_before_effect={"finish": 2})
    app = IdempotencyMiddleware(payments, store, lease=30.0)
    with event_loops.timeout(1):
        await send_request(app)
    await event_loops.async_sleep(3)
    store.failing_calls = ()
    await event_loops.async_sleep(60)
    assert (await send_request(app)).is_replayed
    assert 1 == payments.runs


@pytest.mark.usefixtures("run_async")
async def test_cancellation_does_not_stop_the_release() -> None:
    """If a request is cancelled while its key is being released, the key is released."""
    payments = PaymentsApp(500)

    app = IdempotencyMiddleware(payments, FaultyStore(delays_before_effect={"release": 2}))
    with event_loops.timeout(1):
        await send_request(app)
    await event_loops.async_sleep(2)
    assert 500 == (await send_request(app)).status
    assert 2 == payments.runs


@pytest.mark.usefixtures("run_async")
async def test_release_waits_for_a_running_renewal() -> None:
    """A running renewal would claim the released key again, so the release waits for it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await event_loops.async_sleep(12)
        await PaymentsApp(500)(scope, receive, send)

    store = FaultyStore(delays_before_effect={"extend": 4})
    await send_request(IdempotencyMiddleware(app, store, lease=30.0))
    await event_loops.async_sleep(10)
    assert ["claim", "extend", "release"] == store.calls
    assert {} == store._entries


@pytest.mark.parametrize(
    ("call", "message"),
    [("release", "store failed, retrying in the background"), ("sweep", "failed to delete")],
)
def test_store_failures_after_the_response_are_logged(
    call: str,
    message: str,
    run_async: Run,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Failures of `release` and `sweep` are logged, and the client gets its response."""
    monkeypatch.setattr(effects, "draw_random", lambda: 0.0)
    status = 500 if call == "release" else 201

    async def main() -> None:
        app = IdempotencyMiddleware(PaymentsApp(status), FaultyStore(call))
        assert status == (await send_request(app)).status

    with caplog.at_level(logging.WARNING, "tarry"):
        run_async(main)
    assert message in caplog.text
