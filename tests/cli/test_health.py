"""`tarry health`."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest

from tests.certificates import Authority
from tests.cli.harness import run_command
from tests.integration.service import service


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 - nothing listens
def test_service_responds(address: str, host: str) -> None:
    """The command uses the port of the settings, and 127.0.0.1 for the wildcard address 0.0.0.0."""
    port = urlsplit(address).port

    assert (0, "ok\n", "") == run_command("health", "--host", host, "--port", port)


def test_service_with_tls_responds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a certificate in the settings, the command uses HTTPS and does not verify it."""
    authority = Authority(tmp_path)
    files = authority.issue("service")
    flags = ("--tls-cert", str(files.cert), "--tls-key", str(files.key))
    with service(tmp_path, *flags, ca_file=authority.ca_file) as running:
        monkeypatch.setenv("TARRY_PORT", str(running.port))
        without_tls = run_command("health")
        assert (4, "") == (without_tls.code, without_tls.out)
        monkeypatch.setenv("TARRY_TLS_CERT", str(files.cert))
        monkeypatch.setenv("TARRY_TLS_KEY", str(files.key))
        assert (0, "ok\n", "") == run_command("health")


def test_the_service_is_not_imported() -> None:
    """A health check is cheap: the command does not import the application of the service."""
    program = (
        "import sys\n"
        "from tarry.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as error:\n"
        "    print(error.code)\n"
        "print([name for name in sys.modules if name in {'uvicorn', 'tarry.service.app'}])\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    command = [sys.executable, "-c", program, "health", "--port", str(port)]

    result = subprocess.run(command, capture_output=True, text=True, check=True)

    assert "4\n[]\n" == result.stdout


def test_no_service() -> None:
    """The error has the URL, with brackets around an IPv6 address, and the exit code is 4."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    for host, shown in (("127.0.0.1", "127.0.0.1"), ("::", "[::]")):
        result = run_command("health", "--host", host, "--port", port)
        assert (4, "") == (result.code, result.out)
        assert f"no service answers at http://{shown}:{port}/healthz: " in result.err


@pytest.fixture
def failing_port() -> Iterator[int]:
    """The port of a server that responds with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_other_status_is_an_error(failing_port: int) -> None:
    """Another program on the port is not a healthy service."""
    result = run_command("health", "--port", failing_port)

    assert 4 == result.code
    assert f"the service answers 404 at http://127.0.0.1:{failing_port}/healthz" in result.err
