"""Server processes that share an idempotency store: the handler runs once per key."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
KEY = {"Idempotency-Key": '"8e03978e-40d5-43dd-bc93-6894a57f9324"'}
TIMEOUT_S = 30.0
CONCURRENT_REQUESTS = 50


@dataclass(frozen=True)
class ServerProcess:
    """A server process and its URL."""

    url: str
    process: subprocess.Popen[bytes]


@dataclass(frozen=True)
class SharedState:
    """The store and the folder that the processes share."""

    store_arguments: tuple[str, str, str]
    """Kind, address and table of the store, as arguments of the server's command line."""
    folder: Path


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def shared(request: pytest.FixtureRequest, tmp_path: Path, table: str) -> SharedState:
    """Return the state for a store of each kind, with records that no other test uses."""
    address_fixtures = {"postgres": "postgres_dsn", "redis": "redis_url"}
    if request.param == "sqlite":
        return SharedState(("sqlite", str(tmp_path / "keys.db"), table), tmp_path)
    address = request.getfixturevalue(address_fixtures[request.param])
    return SharedState((request.param, address, table), tmp_path)


@contextmanager
def server(
    shared: SharedState, *, lease: float = 30.0, hangs: bool = False
) -> Iterator[ServerProcess]:
    """Run a server process on its own port; requests wait in the backlog until it is ready."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        descriptor = listener.fileno()
        arguments = [
            *shared.store_arguments,
            shared.folder / "runs",
            lease,
            "hang" if hangs else "respond",
        ]
        command = [sys.executable, "-m", "tests.integration.counting_server", str(descriptor)]
        process = subprocess.Popen(
            [*command, *map(str, arguments)], cwd=ROOT, pass_fds=[descriptor]
        )
        port = listener.getsockname()[1]
    try:
        yield ServerProcess(f"http://127.0.0.1:{port}/pay", process)
    finally:
        process.kill()
        process.wait()


def read_runs(folder: Path) -> list[str]:
    """Return the process id of each handler run, in order."""
    path = folder / "runs"
    return path.read_text(encoding="utf-8").split() if path.exists() else []


def client() -> httpx.AsyncClient:
    """Return a client that sends the idempotency key."""
    return httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, headers=KEY)


def test_concurrent_requests_at_three_processes_run_once(shared: SharedState) -> None:
    """Fifty requests with one key at three processes cause one handler run and one response."""

    async def main(urls: list[str]) -> None:
        async with client() as http:
            requests = (http.post(urls[n % 3], content=b"100") for n in range(CONCURRENT_REQUESTS))
            responses = await asyncio.gather(*requests)
            late = [await http.post(url, content=b"100") for url in urls]

        (runner_pid,) = read_runs(shared.folder)
        completed = [response for response in responses if response.status_code != 409]
        assert {f"paid by {runner_pid}"} == {response.text for response in [*completed, *late]}
        assert {201} == {response.status_code for response in [*completed, *late]}
        assert 1 == sum("idempotent-replayed" not in response.headers for response in completed)
        assert ["true"] * 3 == [response.headers["idempotent-replayed"] for response in late]

    with server(shared) as one, server(shared) as other, server(shared) as third:
        asyncio.run(main([one.url, other.url, third.url]))


def test_key_of_a_killed_process_is_free_after_its_lease(shared: SharedState) -> None:
    """A key is taken while its process lives; after SIGKILL it is free when its lease expires."""

    async def main(doomed: ServerProcess, other: ServerProcess) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        async with client() as http, client() as doomed_client:
            first = asyncio.create_task(doomed_client.post(doomed.url, content=b"100"))
            while not read_runs(shared.folder):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            assert 409 == (await http.post(other.url, content=b"100")).status_code

            doomed.process.send_signal(signal.SIGKILL)
            assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], Exception)
            response = await http.post(other.url, content=b"100")
            while response.status_code == 409:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
                response = await http.post(other.url, content=b"100")

        assert 201 == response.status_code
        assert f"paid by {other.process.pid}" == response.text
        assert [str(doomed.process.pid), str(other.process.pid)] == read_runs(shared.folder)

    with server(shared, lease=2.0, hangs=True) as doomed, server(shared, lease=2.0) as other:
        asyncio.run(main(doomed, other))
