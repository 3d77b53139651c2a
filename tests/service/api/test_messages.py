"""Reading of request bodies, headers and query parameters."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tarry.service.api import messages
from tarry.service.api.context import ApiLimits
from tarry.service.api.messages import ApiRequest
from tarry.service.api.problems import ApiError
from tests.service.api.harness import TARGET, ApiHarness, run_with_api

JSON = {b"content-type": b"application/json"}


def chunked_request(*chunks: bytes) -> ApiRequest:
    """Return a request whose body arrives in chunks."""
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        piece = left.pop(0)
        await asyncio.sleep(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    return ApiRequest({}, receive, JSON)


def test_partial_bodies_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunked bodies do not fill the memory; complete ones free their share."""
    monkeypatch.setattr(messages, "MAX_BUFFERED_BODY_BYTES", 18)

    async def main() -> None:
        many = [chunked_request(b"12345", b"67890").read_body(100) for _ in range(4)]
        ends = await asyncio.gather(*many, return_exceptions=True)
        rejected = [end for end in ends if isinstance(end, ApiError)]

        assert {503} == {one.problem.status for one in rejected}
        assert len(ends) - len(rejected) == ends.count(b"1234567890") > 0
        assert b"1234567890" == await chunked_request(b"12345", b"67890").read_body(100)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path", "detail"),
    [
        (
            "DELETE",
            "/dead-letters",
            "body must be empty: use the query parameters policyId, lane, reason.",
        ),
        ("DELETE", "/retry-tasks/{task}", "body must be empty."),
        ("POST", "/retry-tasks/{task}/retry", "body must be empty."),
        ("DELETE", "/retry-policies/mine", "body must be empty."),
        ("POST", "/downstreams/https:hooks.example:443/pause", "body must be empty."),
    ],
)
@pytest.mark.parametrize("framed", [("content-length", "2"), ("transfer-encoding", "chunked")])
def test_an_unexpected_body_is_422(
    framed: tuple[str, str], method: str, path: str, detail: str
) -> None:
    """It may contain a filter that was meant to limit the operation."""

    async def test(api: ApiHarness) -> None:
        task = await api.create()
        response = await api.request(
            method, path.format(task=task["taskId"]), body=b"{}", headers=dict([framed])
        )
        assert (422, "body", detail) == (
            response.status,
            response.problem["field"],
            response.problem["detail"],
        )

    run_with_api(test)


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
def test_an_unexpected_query_is_422(method: str, path: str) -> None:
    """A replay that was meant to be a dry run must not start."""

    async def test(api: ApiHarness) -> None:
        response = await api.request(method, f"{path}?dryRun=true", {})
        assert (422, "dryRun", "dryRun is not a known field.") == (
            response.status,
            response.problem["field"],
            response.problem["detail"],
        )
        assert [] == (await api.request("GET", "/dead-letters/replays")).json["items"]

    run_with_api(test)


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"]
)
def test_other_content_types_are_415(kind: str) -> None:
    """Pages of other sites cannot send application/json without a preflight."""

    async def test(api: ApiHarness) -> None:
        response = await api.request(
            "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"content-type": kind}
        )
        assert (415, "application/json") == (response.status, response.header("accept"))
        assert 0 == await api.count_tasks()

    run_with_api(test)


def test_the_content_type_may_have_parameters() -> None:
    """`application/json; charset=utf-8` is accepted."""

    async def test(api: ApiHarness) -> None:
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        response = await api.request("POST", "/retry-tasks", {"targetUrl": TARGET}, headers=headers)
        assert 201 == response.status

    run_with_api(test)


@pytest.mark.parametrize("length", ["1001", "9" * 5000])
def test_a_declared_length_above_the_limit_is_413(length: str) -> None:
    """Before any part of the body is read."""

    async def test(api: ApiHarness) -> None:
        class Endless(list[bytes]):
            def pop(self, *_: object) -> bytes:
                raise AssertionError("it was read")

        response = await api.request(
            "POST", "/retry-tasks", body=Endless([b"x"]), headers={"content-length": length}
        )
        assert 413 == response.status

    run_with_api(test, limits=ApiLimits(max_request_bytes=1000))


def test_a_chunked_body_above_the_limit_is_413() -> None:
    """The remaining chunks are not read."""

    async def test(api: ApiHarness) -> None:
        response = await api.request("POST", "/retry-tasks", body=[b" " * 400] * 3 + [b"{}"])
        assert (413, "close") == (response.status, response.header("connection"))
        assert 0 == await api.count_tasks()

    run_with_api(test, limits=ApiLimits(max_request_bytes=1000))


def test_chunks_are_joined() -> None:
    """They form one document."""

    async def test(api: ApiHarness) -> None:
        body = json.dumps({"targetUrl": TARGET}).encode()
        response = await api.request("POST", "/retry-tasks", body=[body[:9], body[9:20], body[20:]])
        assert 201 == response.status

    run_with_api(test)


def test_a_client_that_disconnects_creates_no_task() -> None:
    """The body was not complete."""

    async def test(api: ApiHarness) -> None:
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

    run_with_api(test)


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
def test_an_invalid_query_is_422_with_its_parameter(query: str, field: str) -> None:
    """The problem names the parameter."""

    async def test(api: ApiHarness) -> None:
        response = await api.request("GET", f"/retry-tasks?{query}")
        assert (422, field) == (response.status, response.problem["field"])

    run_with_api(test)


@pytest.mark.parametrize("query", ["lane=%FF", "x" * 9000, "&".join(["a=b"] * 101)])
def test_a_malformed_query_is_rejected(query: str) -> None:
    """Not UTF-8, too long, or too many parameters."""

    async def test(api: ApiHarness) -> None:
        response = await api.request("GET", f"/retry-tasks?{query}")
        assert response.status in {400, 422}
        assert "query" == response.problem["field"]

    run_with_api(test)
