"""`/healthz`, `/readyz` and `/metrics`."""

from __future__ import annotations

import asyncio

import pytest

from tarry.errors import StoreUnavailable
from tests.service.api.harness import ApiHarness, run_with_api


def test_a_healthy_service_is_live_and_ready() -> None:
    """Liveness and readiness return 200."""

    async def test(api: ApiHarness) -> None:
        for path in ("/healthz", "/readyz"):
            response = await api.request("GET", path)
            assert (200, {"status": "ok"}) == (response.status, response.json)

    run_with_api(test)


def test_readiness_is_503_while_a_component_fails() -> None:
    """The problem names the component; liveness stays 200, and readiness recovers."""

    async def test(api: ApiHarness) -> None:
        api.engine.health.mark_failing("claiming", "no such table")
        response = await api.request("GET", "/readyz")
        assert (503, {"claiming": "no such table"}) == (
            response.status,
            response.problem["failing"],
        )
        assert response.header("retry-after") is not None
        assert 200 == (await api.request("GET", "/healthz")).status
        api.engine.health.mark_healthy("claiming")
        assert 200 == (await api.request("GET", "/readyz")).status

    run_with_api(test)


def test_readiness_pings_the_store() -> None:
    """The store is pinged at most once per second."""

    async def test(api: ApiHarness) -> None:
        pings: list[int] = []

        async def ping() -> int:
            pings.append(1)
            msg = "disk full"
            raise StoreUnavailable(msg)

        api.store.ping = ping  # type: ignore[method-assign]
        for _ in range(3):
            assert {"store": "disk full"} == (await api.request("GET", "/readyz")).problem[
                "failing"
            ]
        assert 1 == len(pings)
        api.time.ms += 1_000
        await api.request("GET", "/readyz")
        assert 2 == len(pings)

    run_with_api(test)


def test_causes_are_hidden_where_keys_are_required() -> None:
    """If keys are required, readiness, which needs no key, does not contain causes."""

    async def test(api: ApiHarness) -> None:
        api.engine.health.mark_failing("store", "db.internal:5432 refused")
        response = await api.request("GET", "/readyz")
        assert (503, {"store": "see the log"}) == (response.status, response.problem["failing"])

    run_with_api(test, keys=True)


def test_metrics_have_their_content_type() -> None:
    """The rendered metrics are returned with their content type."""

    async def test(api: ApiHarness) -> None:
        response = await api.request("GET", "/metrics")
        assert (b"of all\n", "text/plain; version=0.0.4; charset=utf-8") == (
            response.body,
            response.header("content-type"),
        )

    run_with_api(test)


def test_a_store_that_does_not_respond_is_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readiness returns 503 after the timeout of the store check."""
    monkeypatch.setattr("tarry.service.api.monitoring._STORE_CHECK_TIMEOUT_S", 0.0)

    async def test(api: ApiHarness) -> None:
        async def ping() -> int:
            await asyncio.Event().wait()
            return 0

        api.store.ping = ping  # type: ignore[method-assign]
        failing = (await api.request("GET", "/readyz")).problem["failing"]
        assert {"store": "no response for 0 s"} == failing

    run_with_api(test)
