"""Callers that are not authenticated, and the capacity of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tarry.idempotency import IdempotencyMiddleware, MemoryStore
from tarry.testing import VirtualClock
from tests.idempotency.asgi_client import HeaderPairs, PaymentsApp, send_request

ALICE = [(b"authorization", b"Bearer alice")]


class OtherStore(MemoryStore):
    """A store that the middleware does not treat as a MemoryStore."""


def no_credentials(_number: int) -> HeaderPairs:
    """Return the headers of a caller without credentials."""
    return []


def invented_credentials(number: int) -> HeaderPairs:
    """Return the headers of a caller with invented credentials."""
    return [(b"authorization", b"Bearer %d" % number)]


@pytest.mark.parametrize(
    ("status", "credentials"),
    [(201, no_credentials), (422, no_credentials), (422, invented_credentials)],
)
async def test_unauthenticated_callers_do_not_fill_the_store(
    status: int, credentials: Callable[[int], HeaderPairs], caplog: pytest.LogCaptureFixture
) -> None:
    """Many requests without valid credentials neither block other callers nor fill the log."""
    payments = PaymentsApp(status)

    app = IdempotencyMiddleware(payments, MemoryStore(20))
    for number in range(100):
        await send_request(app, key=b"%d" % number, headers=credentials(number))
    payments.status = 201
    first = await send_request(app, headers=ALICE)
    second = await send_request(app, headers=ALICE)

    assert (201, False) == (first.status, first.is_replayed)
    assert (201, True) == (second.status, second.is_replayed)
    assert len(caplog.records) <= 1
    assert all(line.exc_info is None for line in caplog.records)


@pytest.mark.parametrize("store_class", [MemoryStore, OtherStore])
@pytest.mark.parametrize(
    ("status", "retention", "replayed_after"),
    [
        (201, 86_400.0, [True, True, False]),
        (422, 86_400.0, [True, False, False]),
        (422, 300.0, [False, False, False]),
    ],
)
def test_refused_requests_have_a_short_retention(
    store_class: type[MemoryStore], status: int, retention: float, replayed_after: list[bool]
) -> None:
    """A 4xx is stored for at most 10 minutes, any other response for the whole retention."""

    async def main() -> list[bool]:
        replayed: list[bool] = []
        for seconds in (599, 600, 86_400):
            app = IdempotencyMiddleware(PaymentsApp(status), store_class(), retention=retention)
            await send_request(app)
            await asyncio.sleep(seconds)
            replayed.append((await send_request(app)).is_replayed)
        return replayed

    with VirtualClock() as clock:
        assert replayed_after == clock.run(main)
