"""Methods, `HEAD` and cross-site requests."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tarry.errors import StoreUnavailable
from tarry.runtime.effects import effects
from tarry.service.api import routing
from tests.service.api.harness import TARGET, ApiHarness


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/retry-tasks", "GET, HEAD, OPTIONS, POST"),
        ("GET", "/retry-tasks/batch", "OPTIONS, POST"),
        ("POST", "/retry-tasks/x", "DELETE, GET, HEAD, OPTIONS"),
        ("POST", "/healthz", "GET, HEAD, OPTIONS"),
        ("BREW", "/dead-letters", "DELETE, GET, HEAD, OPTIONS"),
    ],
)
async def test_an_unsupported_method_is_405(
    api: ApiHarness, method: str, path: str, allowed: str
) -> None:
    """The 405 has an `Allow` header, and OPTIONS returns 204 with the same header."""
    response = await api.request(method, path)
    assert (405, allowed) == (response.status, response.header("allow"))
    options = await api.request("OPTIONS", path)
    assert (204, allowed, b"") == (options.status, options.header("allow"), options.body)
    assert options.header("content-length") is None


async def test_head_is_get_without_the_body(api: ApiHarness) -> None:
    """HEAD returns the status and headers of GET, and no body."""
    for path in ("/retry-tasks", "/healthz", "/nothing", "/retry-tasks/x", "/docs"):
        get, head = await api.request("GET", path), await api.request("HEAD", path)
        assert get.messages[0] == head.messages[0]
        assert b"" == head.body != get.body


async def test_an_outage_of_the_store_is_logged_once_per_interval(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each line has the number of rejected requests; only writes may have been stored already."""
    times = iter([0.0, 1.0, 9.9, 10.0, 19.9])
    caplog.set_level(logging.INFO, "tarry.service")
    monkeypatch.setattr(routing, "_store_failures", routing._StoreFailureLog())
    monkeypatch.setattr(effects, "now", lambda: next(times))

    async def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("connection refused")

    api = ApiHarness()
    monkeypatch.setattr(api.store, "list_tasks", fail)
    monkeypatch.setattr(api.store, "add", fail)
    for _ in range(4):
        read = await api.request("GET", "/retry-tasks")
        assert (503, False) == (read.status, "already" in read.problem["detail"])
    write = await api.request("POST", "/retry-tasks", {"targetUrl": TARGET})
    assert (503, True) == (write.status, "already" in write.problem["detail"])
    line = "store unavailable, request=GET /retry-tasks rejected_requests=%d: connection refused"
    assert [line % 1, line % 3] == [record.getMessage() for record in caplog.records]


def test_the_last_rejected_requests_of_an_outage_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are logged after the interval, and not with a request of the next outage."""
    caplog.set_level(logging.INFO, "tarry.service")
    monkeypatch.setattr(routing, "_LOG_INTERVAL_S", 0.05)
    failures = routing._StoreFailureLog()

    async def reject(reason: str, count: int) -> None:
        for _ in range(count):
            failures.log({"method": "GET", "path": "/"}, StoreUnavailable(reason))
        await asyncio.sleep(0.2)

    async def test() -> None:
        await reject("first outage", 4)
        await reject("second outage", 1)

    asyncio.run(test())
    assert ["1: first outage", "3: first outage", "1: second outage"] == [
        record.getMessage().partition("rejected_requests=")[2] for record in caplog.records
    ]


async def test_cross_site_writes_are_403(api: ApiHarness) -> None:
    """A write with the `Origin` of another site is rejected, a read is accepted."""
    document = {"targetUrl": TARGET}
    cross_site = {"Origin": "https://evil.example"}
    same_site = {"Origin": "http://tarry.test"}
    assert 403 == (await api.request("POST", "/retry-tasks", document, headers=cross_site)).status
    assert 403 == (await api.request("DELETE", "/dead-letters", headers=cross_site)).status
    assert 200 == (await api.request("GET", "/retry-tasks", headers=cross_site)).status
    for site, status in (
        ("cross-site", 403),
        ("Cross-Site", 403),
        ("same-site", 403),
        ("cross-site ", 403),
        ("none, cross-site", 403),
        ("same-origin", 201),
        ("none", 201),
    ):
        for origin in ({}, same_site):  # a browser may send no `Origin`
            headers = {"Sec-Fetch-Site": site, **origin}
            response = await api.request("POST", "/retry-tasks", document, headers=headers)
            assert status == response.status
            assert 200 == (await api.request("GET", "/retry-tasks", headers=headers)).status
    assert 201 == (await api.request("POST", "/retry-tasks", document, headers=same_site)).status
