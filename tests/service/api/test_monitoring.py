"""`/healthz`, `/readyz` and `/metrics`."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.payloads import BodyStoreUnavailable
from tests.service.api.harness import ApiHarness, FakePayloads
from tests.service.stores.reference_store import ReferenceStore


async def test_a_healthy_service_is_live_and_ready(api: ApiHarness) -> None:
    """Liveness and readiness return 200."""
    for path in ("/healthz", "/readyz"):
        response = await api.request("GET", path)
        assert (200, {"status": "ok"}) == (response.status, response.json)


async def test_readiness_is_503_while_a_component_fails(api: ApiHarness) -> None:
    """The problem names the component; liveness stays 200, and readiness recovers."""
    api.engine.health.mark_failing("claiming", "no such table")
    response = await api.request("GET", "/readyz")
    assert (503, {"claiming": "no such table"}) == (response.status, response.problem["failing"])
    assert response.header("retry-after") is not None
    assert 200 == (await api.request("GET", "/healthz")).status
    api.time.ms += 3_000
    api.engine.health.mark_healthy("claiming")
    assert 200 == (await api.request("GET", "/readyz")).status


async def test_readiness_pings_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is pinged at most once per second."""
    pings: list[int] = []

    async def ping(_store: ReferenceStore) -> int:
        pings.append(1)
        msg = "disk full"
        raise StoreUnavailable(msg)

    monkeypatch.setattr(ReferenceStore, "ping", ping)
    api = ApiHarness()
    for _ in range(3):
        assert {"adding": "disk full"} == (await api.request("GET", "/readyz")).problem["failing"]
    assert 1 == len(pings)
    api.time.ms += 1_000
    await api.request("GET", "/readyz")
    assert 2 == len(pings)


async def test_causes_are_hidden_where_keys_are_required() -> None:
    """If keys are required, readiness, which needs no key, does not contain causes."""
    api = ApiHarness(keys=True)
    api.engine.health.mark_failing("delivery", "proxy.internal:3128 refused")
    response = await api.request("GET", "/readyz")
    assert (503, {"delivery": "see the log"}) == (response.status, response.problem["failing"])


async def test_metrics_have_their_content_type(api: ApiHarness) -> None:
    """The rendered metrics are returned with their content type, which the client may choose."""
    response = await api.request("GET", "/metrics")
    assert b"of all\n" == response.body
    assert "text/plain; version=0.0.4" == response.header("content-type")
    accept = {"Accept": "application/openmetrics-text"}
    response = await api.request("GET", "/metrics", headers=accept)
    assert "application/openmetrics-text" == response.header("content-type")


async def test_a_store_that_does_not_respond_is_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readiness returns 503 after the timeout of the store check."""
    monkeypatch.setattr("tarry.service.engine.context._CHECK_TIMEOUT_S", 0.0)

    async def ping(_store: ReferenceStore) -> int:
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr(ReferenceStore, "ping", ping)
    api = ApiHarness()

    failing = (await api.request("GET", "/readyz")).problem["failing"]
    assert {"adding": "no response for 0 s"} == failing


async def test_readiness_checks_the_body_store(caplog: pytest.LogCaptureFixture) -> None:
    """The body store is checked every 30 s, or 5 s while it fails; a change is logged once."""
    api = ApiHarness()
    with caplog.at_level(logging.WARNING, "tarry.service"):
        payloads = api.payloads
        assert 200 == (await api.request("GET", "/readyz")).status
        payloads.error = BodyStoreUnavailable("wrong secret")
        api.time.ms += 29_000
        assert 200 == (await api.request("GET", "/readyz")).status
        api.time.ms += 1_000
        for _ in range(3):
            response = await api.request("GET", "/readyz")
            assert (503, {"bodies": "wrong secret"}) == (
                response.status,
                response.problem["failing"],
            )
        assert 2 == payloads.check_count
        api.time.ms += 5_000
        assert 503 == (await api.request("GET", "/readyz")).status

        payloads.error = None
        api.time.ms += 5_000
        assert 200 == (await api.request("GET", "/readyz")).status
        assert 4 == payloads.check_count
    assert [
        (logging.ERROR, "bodies is failing: wrong secret"),
        (logging.WARNING, "bodies has recovered"),
    ] == [(record.levelno, record.message) for record in caplog.records]


async def test_concurrent_requests_wait_for_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request returns 200 while the first check of the body store still runs."""
    checks: list[asyncio.Event] = []

    async def check_slowly(_payloads: FakePayloads) -> None:
        checks.append(asyncio.Event())
        await checks[-1].wait()
        msg = "wrong secret"
        raise BodyStoreUnavailable(msg)

    monkeypatch.setattr(FakePayloads, "check", check_slowly)
    api = ApiHarness()
    requests = [asyncio.create_task(api.request("GET", "/readyz")) for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(0)
    (check,) = checks
    check.set()

    assert [503, 503] == [(await request).status for request in requests]
    assert 1 == len(checks)


async def test_body_that_cannot_be_stored_is_logged_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A POST that cannot store its body gets a 503 that says so; the log has the error once."""
    api = ApiHarness()
    with caplog.at_level(logging.ERROR, "tarry.service"):
        assert 200 == (await api.request("GET", "/readyz")).status
        api.payloads.error = BodyStoreUnavailable("wrong secret")
        document = {"targetUrl": "https://example.com/hook", "body": "x" * 100_000}
        detail = (
            "The storage of large bodies is unavailable. This task was not stored: send it again."
        )
        for _ in range(3):
            response = await api.request("POST", "/retry-tasks", document)
            assert (503, detail) == (response.status, response.problem["detail"])
        response = await api.request("POST", "/retry-tasks/batch", {"tasks": [document]})
        assert detail == response.json["results"][0]["problem"]["detail"]
        response = await api.request("GET", "/readyz")
        assert {"bodies": "wrong secret"} == response.problem["failing"]
    assert ["bodies is failing: wrong secret"] == [record.message for record in caplog.records]


async def test_failing_store_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that refuses writes is an error in the log, once until it accepts them for 3 s."""
    errors = [StoreUnavailable("disk full")] * 3

    async def ping(_store: ReferenceStore) -> int:
        if errors:
            raise errors.pop()
        return 0

    monkeypatch.setattr(ReferenceStore, "ping", ping)
    api = ApiHarness()
    with caplog.at_level(logging.WARNING, "tarry.service"):
        for status in (503, 503, 503, 503, 503, 200):
            assert status == (await api.request("GET", "/readyz")).status
            api.time.ms += 1_000
    assert ["adding is failing: disk full", "adding has recovered"] == [
        record.message for record in caplog.records
    ]
