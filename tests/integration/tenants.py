"""A service with two tenants that requires API keys and blocks private addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tarry.service.api.auth import make_api_key
from tarry.service.records.api_keys import put_api_key
from tarry.service.stores.sqlite import SqliteTaskStore
from tests.integration.service import Response, Service, service


class Tenants:
    """The API keys of two tenants of a service."""

    def __init__(self, running_service: Service, secrets: dict[str, str]) -> None:
        self.service = running_service
        self.secrets = secrets

    def request(self, tenant: str, method: str, path: str, body: Any = None) -> Response:
        """Send a request as one of the tenants."""
        headers = {"authorization": f"Bearer {self.secrets[tenant]}"}
        return self.service.send(method, path, body, headers)

    def send_raw(self, *parts: bytes) -> bytes:
        """Send bytes with KEY replaced by an API key; return the bytes of the response."""
        secret = self.secrets["ann"].encode()
        with socket.create_connection(("127.0.0.1", self.service.port), 30) as connection:
            try:
                for part in parts:
                    connection.sendall(part.replace(b"KEY", secret))
            except OSError:
                pass  # the service closed the connection; its response can still be read
            response = b""
            try:
                while data := connection.recv(65536):
                    response += data
            except OSError:
                pass
            return response

    def task_ids(self) -> set[str]:
        """Return the ids of the newest tasks of both tenants."""
        pages = [self.request(name, "GET", "/retry-tasks?limit=200") for name in self.secrets]
        return {item["taskId"] for page in pages for item in page.body["items"]}

    @contextmanager
    def check_nothing_stored(self) -> Iterator[None]:
        """Check that the block adds no task and that the service stays healthy."""
        before = self.task_ids()
        yield
        assert before == self.task_ids()
        assert 200 == self.service.request("GET", "/readyz")[0]


async def _make_keys(database: Path, *tenants: str) -> dict[str, str]:
    store = SqliteTaskStore(database)
    await store.open()
    secrets = {}
    for tenant in tenants:
        secrets[tenant], key = make_api_key(tenant, f"key-{tenant}")
        await put_api_key(store, key)
    await store.close()
    return secrets


@contextmanager
def two_tenants(folder: Path, *flags: str) -> Iterator[Tenants]:
    """Run a service for the tenants "ann" and "bob"."""
    secrets = asyncio.run(_make_keys(folder / "tarry.db", "ann", "bob"))
    with service(folder, "--set", "require_keys=true", *flags, dev=False) as running_service:
        yield Tenants(running_service, secrets)
