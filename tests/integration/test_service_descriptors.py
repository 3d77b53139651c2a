"""A service with few file descriptors."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.integration.service import service, target


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_idle_clients_do_not_block_health_checks_and_deliveries(
    tmp_path: Path, *, tls: bool
) -> None:
    """With 256 descriptors and 400 silent clients, a task is accepted and delivered."""
    flags: tuple[str, ...] = ()
    authority = Authority(tmp_path)
    if tls:
        files = authority.issue("service")
        # Clients that are only closed after the timeout would make the test fail.
        settings = ("--set", "head_timeout_ms=600000")
        flags = ("--tls-cert", str(files.cert), "--tls-key", str(files.key), *settings)
    with_few_descriptors = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    with (
        target() as receiver,
        service(
            tmp_path,
            *flags,
            command_prefix=with_few_descriptors,
            ca_file=authority.ca_file if tls else None,
        ) as running_service,
        ExitStack() as clients,
    ):
        for _ in range(400):
            client = socket.create_connection(("127.0.0.1", running_service.port), 60)
            clients.enter_context(client)
        for _ in range(3):
            assert 200 == running_service.request("GET", "/healthz")[0]
        task = running_service.post(targetUrl=f"{receiver.url}/")
        assert "SUCCEEDED" == running_service.wait_until_finished(task["taskId"])["status"]
    log = (tmp_path / "log").read_text()
    assert "only 256 file descriptors" in log
