"""Reading of request bodies and query parameters."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tarry.service.api import messages
from tarry.service.api.context import ApiLimits
from tarry.service.api.messages import ApiRequest
from tarry.service.api.problems import ApiError
from tarry.service.tenant_shares import TenantShares
from tests.service.api.harness import TARGET, ApiHarness

JSON = {b"content-type": b"application/json"}

PURGE_DETAIL = (
    "body must be empty: use the query parameters all, cursor, policyId, lane, reason, urlPrefix, "
    "idempotencyKey, createdAfter, createdBefore, finishedAfter, finishedBefore, lastStatus, error."
)


def chunked_request(*chunks: bytes, tenant: str = "a") -> ApiRequest:
    """Return a request whose body arrives in chunks."""
    remaining = list(chunks)

    async def receive() -> dict[str, Any]:
        chunk = remaining.pop(0)
        await asyncio.sleep(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(remaining)}

    return ApiRequest({}, receive, JSON, tenant=tenant)


async def test_the_total_size_of_incomplete_bodies_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bodies above the limit get a 503, and a complete body frees its share."""
    monkeypatch.setattr(messages, "_buffered_body_bytes", TenantShares(18))

    many = [chunked_request(b"12345", b"67890").read_body(100) for _ in range(4)]
    results = await asyncio.gather(*many, return_exceptions=True)
    rejected = [result for result in results if isinstance(result, ApiError)]

    assert {503} == {error.problem.status for error in rejected}
    assert len(results) - len(rejected) == results.count(b"1234567890") > 0
    assert b"1234567890" == await chunked_request(b"12345", b"67890").read_body(100)


@pytest.mark.parametrize(
    "last_message",
    [{"type": "http.request", "body": b"2"}, {"type": "http.disconnect"}],
    ids=["complete", "disconnected"],
)
async def test_incomplete_bodies_of_a_tenant_leave_memory_for_others(
    monkeypatch: pytest.MonkeyPatch, last_message: dict[str, Any]
) -> None:
    """A tenant gets a 503 when it has used its share; another tenant can still send a body."""
    shares = TenantShares(100)
    monkeypatch.setattr(messages, "_buffered_body_bytes", shares)

    may_end = asyncio.Event()

    def slow_request() -> ApiRequest:
        remaining = [{"type": "http.request", "body": b"1" * 10, "more_body": True}]

        async def receive() -> dict[str, Any]:
            if remaining:
                return remaining.pop()
            await may_end.wait()
            return last_message

        return ApiRequest({}, receive, JSON, tenant="a")

    tasks = [asyncio.create_task(slow_request().read_body(100)) for _ in range(10)]
    await asyncio.sleep(0)
    assert 50 == shares.used_by("a")
    other = chunked_request(b"12345", b"67890", tenant="b")
    assert b"1234567890" == await other.read_body(100)
    may_end.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert 5 == sum(isinstance(result, ApiError) for result in results)
    assert 0 == shares.used_by("a") == shares.used_by("b")


@pytest.mark.parametrize(
    ("method", "path", "detail"),
    [
        ("DELETE", "/dead-letters", PURGE_DETAIL),
        ("DELETE", "/retry-tasks/{task}", "body must be empty."),
        ("POST", "/retry-tasks/{task}/retry", "body must be empty."),
        ("DELETE", "/retry-policies/mine", "body must be empty."),
        ("POST", "/downstreams/https:hooks.example:443/resume", "body must be empty."),
        (
            "POST",
            "/downstreams/https:hooks.example:443/pause",
            "body must be empty: use the query parameters create.",
        ),
    ],
)
@pytest.mark.parametrize(
    "framing_header", [("content-length", "2"), ("transfer-encoding", "chunked")]
)
async def test_an_unexpected_body_is_422(
    api: ApiHarness, framing_header: tuple[str, str], method: str, path: str, detail: str
) -> None:
    """A body is rejected, because it may be a filter that would be ignored."""
    task = await api.create()
    response = await api.request(
        method, path.format(task=task["taskId"]), body=b"{}", headers=dict([framing_header])
    )
    assert (422, "body", detail) == (
        response.status,
        response.problem["field"],
        response.problem["detail"],
    )


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/retry-tasks"),
        ("POST", "/retry-tasks/batch"),
        ("POST", "/dead-letters/replays"),
        ("POST", "/retry-policies"),
        ("PUT", "/retry-policies/mine"),
    ],
)
async def test_an_unexpected_query_is_422(api: ApiHarness, method: str, path: str) -> None:
    """A query is rejected, so that `?dryRun=true` does not start a replay."""
    response = await api.request(method, f"{path}?dryRun=true", {})
    assert (422, "dryRun", "dryRun is not a known field.") == (
        response.status,
        response.problem["field"],
        response.problem["detail"],
    )
    assert [] == (await api.request("GET", "/dead-letters/replays")).json["items"]


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"]
)
async def test_other_content_types_are_415(api: ApiHarness, content_type: str) -> None:
    """Content types that a web page can send without a CORS preflight are rejected."""
    response = await api.request(
        "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"content-type": content_type}
    )
    assert (415, "application/json") == (response.status, response.header("accept"))
    assert 0 == await api.count_tasks()


async def test_the_content_type_can_have_parameters(api: ApiHarness) -> None:
    """`application/json; charset=utf-8` is accepted."""
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = await api.request("POST", "/retry-tasks", {"targetUrl": TARGET}, headers=headers)
    assert 201 == response.status


@pytest.mark.parametrize("length", ["1001", "9" * 5000])
async def test_a_declared_length_above_the_limit_is_413(length: str) -> None:
    """The request is rejected before the body is read."""
    api = ApiHarness(limits=ApiLimits(max_request_bytes=1000))

    class UnreadableChunks(list[bytes]):
        def pop(self, *_: object) -> bytes:
            raise AssertionError("the body was read")

    response = await api.request(
        "POST", "/retry-tasks", body=UnreadableChunks([b"x"]), headers={"content-length": length}
    )
    assert 413 == response.status
    assert "raise the setting `max_body_bytes`" in response.problem["detail"]


async def test_a_chunked_body_above_the_limit_is_413() -> None:
    """The connection is closed, and no task is created."""
    api = ApiHarness(limits=ApiLimits(max_request_bytes=1000))
    response = await api.request("POST", "/retry-tasks", body=[b" " * 400] * 3 + [b"{}"])
    assert (413, "close") == (response.status, response.header("connection"))
    assert 0 == await api.count_tasks()


async def test_chunks_are_joined(api: ApiHarness) -> None:
    """A document can be split into chunks at any byte."""
    body = json.dumps({"targetUrl": TARGET}).encode()
    response = await api.request("POST", "/retry-tasks", body=[body[:9], body[9:20], body[20:]])
    assert 201 == response.status


async def test_a_client_that_disconnects_creates_no_task(api: ApiHarness) -> None:
    """A request with an incomplete body gets no response and creates no task."""
    sent: list[object] = []
    parts: list[dict[str, Any]] = [
        {"type": "http.request", "body": b'{"targetUrl":', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return parts.pop(0)

    async def send(message: object) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/retry-tasks",
        "headers": [(b"content-type", b"application/json")],
    }
    await api.api(scope, receive, send)
    assert ([], 0) == (sent, await api.count_tasks())


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=ten", "limit"),
        ("status=DONE", "status"),
        ("status=pending", "status"),
        ("cursor=%F0%9F%92%A9", "cursor"),
        ("sort=up", "sort"),
        ("limit=1&limit=2", "limit"),
        ("policyId=", "policyId"),
        ("policyId=a/b", "policyId"),
        ("status=null", "status"),
        ("cursor=null", "cursor"),
    ],
)
async def test_an_invalid_query_is_422_with_its_parameter(
    api: ApiHarness, query: str, field: str
) -> None:
    """The problem names the parameter."""
    response = await api.request("GET", f"/retry-tasks?{query}")
    assert (422, field) == (response.status, response.problem["field"])


@pytest.mark.parametrize("query", ["lane=%FF", "x" * 9000, "&".join(["a=b"] * 101)])
async def test_a_malformed_query_is_rejected(api: ApiHarness, query: str) -> None:
    """A query that is not UTF-8, is too long or has too many parameters is rejected."""
    response = await api.request("GET", f"/retry-tasks?{query}")
    assert response.status in {400, 422}
    assert "query" == response.problem["field"]
