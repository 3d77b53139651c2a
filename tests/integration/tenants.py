"""A service that requires keys and allows no private address, and two tenants of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tarry.service.api.auth import make_api_key
from tarry.service.stores.sqlite import SqliteStore
from tests.integration.service import Reply, Service, service


class Tenants:
    """Two tenants of one service."""

    def __init__(self, running: Service, secrets: dict[str, str]) -> None:
        self.running = running
        self.secrets = secrets

    def ask(self, tenant: str, method: str, path: str, body: Any = None) -> Reply:
        """Send a request as one of the tenants."""
        headers = {"authorization": f"Bearer {self.secrets[tenant]}"}
        return self.running.reply(method, path, body, headers)

    def raw(self, *parts: bytes) -> bytes:
        """Send bytes unchanged except KEY; return the response up to its end."""
        secret = self.secrets["ann"].encode()
        with socket.create_connection(("127.0.0.1", self.running.port), 30) as wire:
            try:
                for part in parts:
                    wire.sendall(part.replace(b"KEY", secret))
            except OSError:
                pass  # it has hung up on us; what it said is still there
            answer = b""
            try:
                while more := wire.recv(65536):
                    answer += more
            except OSError:
                pass
            return answer

    def count_tasks(self) -> list[str]:
        """Return the counts of tasks from the metrics."""
        lines = self.ask("ann", "GET", "/metrics").body.splitlines()
        return [line for line in lines if line.startswith("retry_tasks{")]

    @contextmanager
    def check_nothing_stored(self) -> Iterator[None]:
        """Check that no task is added and that the service stays healthy."""
        before = self.count_tasks()
        yield
        assert before == self.count_tasks()
        assert 200 == self.running.request("GET", "/readyz")[0]


async def _make_keys(database: Path, *tenants: str) -> dict[str, str]:
    store = SqliteStore(database)
    await store.open()
    secrets = {}
    for tenant in tenants:
        secrets[tenant], key = make_api_key(tenant, f"key-{tenant}")
        await store.put_api_key(key)
    await store.close()
    return secrets


@contextmanager
def two_tenants(folder: Path, *flags: str) -> Iterator[Tenants]:
    """Run a service for the tenants "ann" and "bob"."""
    secrets = asyncio.run(_make_keys(folder / "tarry.db", "ann", "bob"))
    with service(folder, "--set", "require_keys=true", *flags, dev=False) as running:
        yield Tenants(running, secrets)
