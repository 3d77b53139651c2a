from __future__ import annotations

import asyncio

import pytest

from tarry.errors import StoreUnavailable
from tests.service.api.harness import Rig, with_rig


def test_a_service_that_is_well() -> None:
    """200 for both questions."""

    async def test(rig: Rig) -> None:
        for path in ("/healthz", "/readyz"):
            reply = await rig.ask("GET", path)
            assert (200, {"status": "ok"}) == (reply.status, reply.json)

    with_rig(test)


def test_readiness_is_red_while_a_part_is_out_of_order() -> None:
    """503 with the part, and green again when it works; the process is alive all the while."""

    async def test(rig: Rig) -> None:
        rig.engine.health.failed("claiming", "no such table")
        reply = await rig.ask("GET", "/readyz")
        assert (503, {"claiming": "no such table"}) == (reply.status, reply.problem["failing"])
        assert reply.header("retry-after") is not None
        assert 200 == (await rig.ask("GET", "/healthz")).status
        rig.engine.health.worked("claiming")
        assert 200 == (await rig.ask("GET", "/readyz")).status

    with_rig(test)


def test_readiness_asks_the_store() -> None:
    """Once a second at most, however often it is asked itself."""

    async def test(rig: Rig) -> None:
        pings: list[int] = []

        async def ping() -> int:
            pings.append(1)
            msg = "disk full"
            raise StoreUnavailable(msg)

        rig.store.ping = ping  # type: ignore[method-assign]
        for _ in range(3):
            assert {"store": "disk full"} == (await rig.ask("GET", "/readyz")).problem["failing"]
        assert 1 == len(pings)
        rig.time.ms += 1_000
        await rig.ask("GET", "/readyz")
        assert 2 == len(pings)

    with_rig(test)


def test_strangers_are_not_told_why() -> None:
    """Where keys are demanded, the reason is in the log only."""

    async def test(rig: Rig) -> None:
        rig.engine.health.failed("store", "db.internal:5432 refused")
        reply = await rig.ask("GET", "/readyz")
        assert (503, {"store": "see the log"}) == (reply.status, reply.problem["failing"])

    with_rig(test, keys=True)


def test_metrics_are_passed_on() -> None:
    """With the content type of their format."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask("GET", "/metrics")
        assert (b"of all\n", "text/plain; version=0.0.4; charset=utf-8") == (
            reply.body,
            reply.header("content-type"),
        )

    with_rig(test)


def test_a_store_that_does_not_answer_is_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks does not wait for ever."""
    monkeypatch.setattr("tarry.service.api.health._STORE_TIMEOUT_S", 0.0)

    async def test(rig: Rig) -> None:
        async def ping() -> int:
            await asyncio.Event().wait()
            return 0

        rig.store.ping = ping  # type: ignore[method-assign]
        failing = (await rig.ask("GET", "/readyz")).problem["failing"]
        assert {"store": "no response for 0 s"} == failing

    with_rig(test)
