"""The middleware and its store: leases that are renewed and lost, and a store that fails."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import trio

from tarry.idempotency import IdempotencyMiddleware, MemoryStore, StoredResponse, Taken
from tarry.testing import VirtualClock
from tarry.wire.asgi import Receive, Scope, Send
from tests.idempotency.asking import Payments, ask, slow


class Away(MemoryStore):
    """A store of which some calls fail."""

    def __init__(self, *calls: str) -> None:
        super().__init__()
        self.calls = calls

    def _fail(self, call: str) -> None:
        if call in self.calls:
            raise ConnectionError("the store is away")

    async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> Taken | None:
        """Fail, or claim."""
        self._fail("claim")
        return await super().claim(key, fingerprint, owner, lease)

    async def extend(self, key: str, owner: str, lease: float) -> bool:
        """Fail, or extend."""
        self._fail("extend")
        return await super().extend(key, owner, lease)

    async def finish(self, key: str, owner: str, response: StoredResponse, keep: float) -> bool:
        """Fail, or finish."""
        self._fail("finish")
        return await super().finish(key, owner, response, keep)

    async def release(self, key: str, owner: str) -> None:
        """Fail, or release."""
        self._fail("release")
        await super().release(key, owner)

    async def sweep(self, limit: int) -> int:
        """Fail, or sweep."""
        self._fail("sweep")
        return await super().sweep(limit)


@pytest.mark.parametrize("call", ["extend", "none"])
def test_a_lease_is_renewed_while_the_handler_runs(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler of many leases keeps its key; a store that is away for a moment does no harm."""
    payments = Payments()
    store = Away(call)

    async def main() -> None:
        app = IdempotencyMiddleware(slow(payments, 100), store, lease=30.0)
        first = asyncio.create_task(ask(app))
        await asyncio.sleep(15)
        store.calls = ()
        await asyncio.sleep(80)
        assert 409 == (await ask(app)).status
        assert 201 == (await first).status
        assert (await ask(app)).replayed

    with VirtualClock() as clock:
        clock.run(main)
    assert 1 == payments.runs
    assert (call == "extend") == ("the lease is not renewed" in caplog.text)


def test_a_lease_is_renewed_on_trio() -> None:
    """The same holds on trio."""
    payments = Payments()

    async def sleepy(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(100)
        await payments(scope, receive, send)

    async def main() -> None:
        app = IdempotencyMiddleware(sleepy, lease=30.0)
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
    store = Away("extend")

    async def main() -> None:
        app = IdempotencyMiddleware(slow(payments, 100), store, lease=30.0)
        first = asyncio.create_task(ask(app))
        await asyncio.sleep(50)
        second = asyncio.create_task(ask(app))
        await asyncio.sleep(30)
        store.calls = ()
        assert b"run 1" == (await first).body
        assert b"run 2" == (await second).body
        assert b"run 2" == (await ask(app)).body

    with VirtualClock() as clock:
        clock.run(main)
    assert 2 == caplog.text.count("its lease ran out and another request took the key")
    assert "is not kept; its handler may have run twice" in " ".join(caplog.text.split())


def test_a_store_that_is_away_refuses_and_runs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """What may have run before is not run again."""
    payments = Payments()

    answer = asyncio.run(ask(IdempotencyMiddleware(payments, Away("claim"))))

    assert (503, b"1", 0) == (answer.status, answer.header(b"retry-after"), payments.runs)
    assert "Idempotency-Key cannot be checked" == answer.problem["title"]
    assert "the store is away" in caplog.text


def test_a_full_store_says_when_there_is_room() -> None:
    """The bound of the memory store is a 503 with the time at which a record ends."""

    async def main() -> None:
        app = IdempotencyMiddleware(Payments(), MemoryStore(1, clock=lambda: 0.0), keep=99.5)
        await ask(app, key=b"a")
        answer = await ask(app, key=b"b")
        assert (503, b"100") == (answer.status, answer.header(b"retry-after"))

    asyncio.run(main())


def test_a_response_reaches_its_client_also_when_it_cannot_be_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The handler has run, so its answer is sent; until the lease ends a retry does not run."""
    payments = Payments()

    async def main() -> None:
        app = IdempotencyMiddleware(payments, Away("finish"))
        assert 201 == (await ask(app)).status
        assert 409 == (await ask(app)).status

    asyncio.run(main())
    assert 1 == payments.runs
    assert "the response is not kept" in caplog.text


@pytest.mark.parametrize(
    ("call", "words"), [("release", "the key is held"), ("sweep", "failed to forget")]
)
def test_troubles_of_the_store_after_the_answer_are_logged(
    call: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They do not reach the client."""

    async def main() -> None:
        app = IdempotencyMiddleware(Payments(500 if call == "release" else 201), Away(call))
        for number in range(100):
            await ask(app, key=b"%d" % number)

    with caplog.at_level(logging.WARNING, "tarry"):
        asyncio.run(main())
    assert words in caplog.text


def test_a_request_that_is_cancelled_while_it_claims_holds_nothing() -> None:
    """A claim that the store made after all is given back."""

    class Slow(MemoryStore):
        async def claim(self, *args: Any) -> Taken | None:
            taken = await super().claim(*args)
            await asyncio.sleep(10)
            return taken

    async def main() -> None:
        app = IdempotencyMiddleware(Payments(), Slow())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(app), 5)
        assert b"run 1" == (await ask(app)).body

    with VirtualClock() as clock:
        clock.run(main)
