"""The fast path and a chunked body lead to equal responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tarry.errors import Overloaded, StoreUnavailable
from tarry.service.api.auth import make_api_key
from tarry.service.api.context import ApiLimits
from tarry.service.records.api_keys import put_api_key
from tests.service.api.harness import TARGET, ApiHarness, Response, run_with_api

TASK = json.dumps({"targetUrl": TARGET, "idempotencyKey": "k"}).encode()
SMALL_LIMITS = ApiLimits(max_request_bytes=4096, inline_body_bytes=64)
JSON = {"content-type": "application/json"}


def send_on_both_paths(
    body: bytes, headers: dict[str, str], *, error: Exception | None = None, **options: Any
) -> list[tuple[Sequence[Response], int]]:
    """Send a request twice on each path; return the responses and the number of tasks."""

    async def test(api: ApiHarness, chunks: bytes | list[bytes]) -> tuple[Sequence[Response], int]:
        api.engine.error = error
        responses = [
            await api.request("POST", "/retry-tasks", body=chunks, headers=headers)
            for _ in range(2)
        ]
        return responses, await api.count_tasks()

    variants: list[bytes | list[bytes]] = [body, [body[:9], body[9:]]]
    return [run_with_api(partial(test, chunks=variant), **options) for variant in variants]


@pytest.mark.parametrize(
    ("body", "headers", "statuses"),
    [
        (TASK, JSON, [201, 200]),
        (TASK[:-1] + b', "body": "' + b"x" * 100 + b'"}', JSON, [201, 200]),
        (TASK[:-1] + b', "policy": {"maxAttempts": 2}}', JSON, [201, 200]),
        (TASK[:-1] + b', "policyId": "none"}', JSON, [422, 422]),
        (TASK[:-1] + b', "bodyRef": "default/missing"}', JSON, [422, 422]),
        (TASK, {**JSON, "idempotency-key": '"k"'}, [201, 200]),
        (TASK, {**JSON, "idempotency-key": '"other"'}, [422, 422]),
        (TASK, {**JSON, "idempotency-key": '"k'}, [400, 400]),
        (TASK, {**JSON, "origin": "http://evil.example"}, [403, 403]),
        (TASK, {"content-type": "text/plain"}, [415, 415]),
        (TASK + b" " * 4096, JSON, [413, 413]),
        (TASK[:-1], JSON, [400, 400]),
        (TASK[:-1] + b', "body": ' + b"[" * 3000 + b"]" * 1000, JSON, [400, 400]),
        (TASK.replace(b"https", b"ftp"), JSON, [422, 422]),
        (TASK, {**JSON, "prefer": "wait=0"}, [201, 200]),
    ],
)
def test_responses_are_equal(body: bytes, headers: dict[str, str], statuses: list[int]) -> None:
    """Status, headers, body and the number of stored tasks are equal."""
    (complete, stored), (chunks, stored_chunked) = send_on_both_paths(
        body, headers, limits=SMALL_LIMITS, rate=1.0, burst=3.0
    )
    assert statuses == [response.status for response in complete]
    assert [response.messages for response in chunks] == [
        response.messages for response in complete
    ]
    assert stored_chunked == stored == (201 in statuses)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StoreUnavailable("gone"), 503),
        (Overloaded("too much", retry_after=2.0), 503),
        (ZeroDivisionError(), 500),
    ],
)
def test_errors_of_the_engine_are_equal(error: Exception, status: int) -> None:
    """An exception of the engine leads to the same response on both paths."""
    (complete, _), (chunks, _) = send_on_both_paths(TASK, JSON, error=error)
    assert {status} == {response.problem["status"] for response in complete}
    assert [response.messages for response in chunks] == [
        response.messages for response in complete
    ]


def test_another_host_is_rejected() -> None:
    """A request with another `Host` gets a 421 on both paths."""
    (complete, _), (chunks, _) = send_on_both_paths(TASK, JSON, hosts=frozenset({"tarry.internal"}))
    assert {421} == {response.problem["status"] for response in complete}
    assert [response.messages for response in chunks] == [
        response.messages for response in complete
    ]


def test_api_keys_are_checked() -> None:
    """Missing, unknown, stored and cached keys lead to the same responses on both paths."""

    async def test(api: ApiHarness, chunks: bytes | list[bytes]) -> list[Any]:
        secret, key = make_api_key("acme", "1")

        async def request(**headers: str) -> Response:
            return await api.request("POST", "/retry-tasks", body=chunks, headers=headers)

        invalid = [await request(), await request(authorization=f"Bearer {secret}")]
        await put_api_key(api.store, key)
        api.time.ms += 60_000
        valid = [await request(authorization=f"Bearer {secret}") for _ in range(3)]
        assert [401, 401, 201, 200, 200] == [response.status for response in (*invalid, *valid)]
        assert 1 == await api.count_tasks("acme")
        return [response.messages for response in (*invalid, *valid)]

    variants: list[bytes | list[bytes]] = [TASK, [TASK, b""]]
    complete, split = (
        run_with_api(partial(test, chunks=variant), keys=True) for variant in variants
    )
    assert split == complete


async def test_a_cancelled_write_is_500(api: ApiHarness) -> None:
    """A cancelled commit of the engine leads to a 500."""
    await api.create()
    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    api.engine.submit = lambda *_: cancelled  # type: ignore[method-assign]
    assert 500 == (await api.request("POST", "/retry-tasks", body=TASK)).problem["status"]
