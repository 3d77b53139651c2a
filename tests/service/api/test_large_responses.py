"""Limits for large responses that clients do not read."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tarry.service.api import large_responses
from tarry.service.api.messages import _MAX_BODY_PART_BYTES
from tests.service.api.harness import TARGET, ApiHarness
from tests.service.api.test_auth import create_key
from tests.service.http.harness import (
    MAX_WRITE_BUFFER_BYTES,
    ConnectionHarness,
    UnreadTransport,
)

EMPTY_PAGE = b'{"items":[],"nextCursor":null}'


class UnreadResponse:
    """A request whose client does not read the body of the response until `is_read` is set."""

    def __init__(self, api: ApiHarness, path: str, key: str) -> None:
        self.is_sent = asyncio.Event()
        self.is_read = asyncio.Event()
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "query_string": b"",
            "headers": [(b"host", b"tarry.test"), (b"x-api-key", key.encode())],
        }
        self.task = asyncio.ensure_future(api.api(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.is_sent.set()
            await self.is_read.wait()


@pytest.mark.parametrize(
    "path", ["/retry-tasks", "/dead-letters", "/downstreams", "/dead-letters/replays"]
)
async def test_a_tenant_that_does_not_read_its_pages_gets_no_more(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next page of this tenant is a 503. Other tenants and small responses are not affected."""
    monkeypatch.setattr(large_responses, "MAX_UNREAD_BYTES", 2 * len(EMPTY_PAGE))

    api = ApiHarness(keys=True)
    secrets = [(await create_key(api, tenant))[0] for tenant in ("acme", "beta")]
    acme, beta = ({"X-API-Key": secret} for secret in secrets)
    unread = UnreadResponse(api, path, secrets[0])
    await unread.is_sent.wait()

    page = await api.request("GET", path, headers=acme)
    batch = {"tasks": [{"targetUrl": TARGET}]}
    added = await api.request("POST", "/retry-tasks/batch", batch, headers=acme)
    small = await api.request("GET", "/retry-policies/default", headers=acme)
    other = await api.request("GET", path, headers=beta)

    assert (503, "1") == (page.status, page.header("retry-after"))
    assert (503, 0) == (added.status, await api.count_tasks())
    assert [200, 200] == [small.status, other.status]
    unread.is_read.set()
    await unread.task
    assert 200 == (await api.request("GET", path, headers=acme)).status


async def test_a_response_that_cannot_be_sent_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed or cancelled response frees its share."""
    monkeypatch.setattr(large_responses, "MAX_UNREAD_BYTES", 2 * len(EMPTY_PAGE))
    api = ApiHarness()

    unread = UnreadResponse(api, "/retry-tasks", "")
    await unread.is_sent.wait()
    assert 503 == (await api.request("GET", "/retry-tasks")).status
    unread.task.cancel()
    await asyncio.wait([unread.task])
    assert 200 == (await api.request("GET", "/retry-tasks")).status


async def test_a_large_body_is_sent_in_parts(api: ApiHarness) -> None:
    """Each part has at most 64 KiB, so that a part waits until the previous one is read."""
    for _ in range(5):
        await api.create(headers={"X-Data": "x" * 30_000})
    response = await api.request("GET", "/retry-tasks")
    parts = response.messages[1:]
    assert str(len(response.body)) == response.header("content-length")
    assert [_MAX_BODY_PART_BYTES] * 2 == [len(part["body"]) for part in parts[:-1]]
    assert 0 < len(parts[-1]["body"]) <= _MAX_BODY_PART_BYTES
    assert [True, True, False] == [part.get("more_body", False) for part in parts]
    assert 5 == len(response.json["items"])


async def test_few_pages_of_a_tenant_are_built_at_the_same_time() -> None:
    """Further requests wait. The pages of another tenant are built meanwhile."""
    api = ApiHarness(keys=True)
    secrets = [(await create_key(api, tenant))[0] for tenant in ("acme", "beta")]
    running: list[str] = []
    is_readable = asyncio.Event()
    list_tasks: Callable[..., Awaitable[Any]] = api.store.list_tasks

    async def wait_and_list(tenant: str, *args: Any, **options: Any) -> Any:
        running.append(tenant)
        await is_readable.wait()
        return await list_tasks(tenant, *args, **options)

    api.store.list_tasks = wait_and_list  # type: ignore[method-assign]
    requests = [
        asyncio.ensure_future(api.request("GET", "/retry-tasks", headers={"X-API-Key": secret}))
        for secret in secrets
        for _ in range(10)
    ]
    for _ in range(100):
        await asyncio.sleep(0)
    limit = large_responses.MAX_TENANT_CONCURRENT_PAGES
    assert ["acme"] * limit + ["beta"] * limit == sorted(running)
    is_readable.set()
    responses = await asyncio.gather(*requests)
    assert [200] * 20 == [response.status for response in responses]


@pytest.mark.parametrize(("client_count", "max_mib"), [(12, 40), (40, 56)])
async def test_memory_of_unread_pages_is_bounded(
    api: ApiHarness, client_count: int, max_mib: int
) -> None:
    """Clients that do not read pages of large tasks use 3 MiB each, and less if they are many.

    A page has 2 MiB. Its buffer may be up to 1.5 times as large: msgspec does not shrink it.
    """
    for _ in range(600):
        await api.create(headers={"X-Data": "x" * 30_000})
    request = b"GET /retry-tasks?limit=1000 HTTP/1.1\r\nHost: tarry.test\r\n\r\n"
    transports = [UnreadTransport() for _ in range(client_count)]
    connections = [ConnectionHarness(api.api, transport=each) for each in transports]
    tracemalloc.start()
    try:
        for connection, transport in zip(connections, transports, strict=True):
            transport.pause_writing = connection.protocol.pause_writing
            connection.protocol.data_received(request)
        for transport in transports:
            await transport.is_settled.wait()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for connection in connections:
        connection.protocol.connection_lost(None)
        await connection.wait_until_served()

    assert any(transport.write_buffer_size > MAX_WRITE_BUFFER_BYTES for transport in transports)
    assert peak <= max_mib << 20
