"""A running service with TLS: its clients, the command line, and a certificate that is replaced."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

import tarry
from tarry.client.errors import ServiceUnreachable
from tests.certificates import Authority, PemFiles, common_name
from tests.integration.service import Service, service


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return a certificate authority."""
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> PemFiles:
    """Return the certificate of the service."""
    return authority.issue("first")


@pytest.fixture(scope="module")
def tls_service(
    authority: Authority, files: PemFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """Run a service with TLS that gives clients three seconds for their first request."""
    flags = ["--tls-cert", str(files.cert), "--tls-key", str(files.key)]
    flags += ["--set", "head_timeout_ms=3000"]
    with service(tmp_path_factory.mktemp("service"), *flags, ca_file=authority.ca_file) as running:
        yield running


def run_tarry(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of tarry."""
    command = [sys.executable, "-m", "tarry", *arguments]
    environ = os.environ | variables
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


async def test_clients_verify_the_certificate(tls_service: Service, authority: Authority) -> None:
    """Both clients send tasks over TLS with the CA file, and refuse the certificate without it."""
    url = f"https://127.0.0.1:{tls_service.port}"
    ca_file = str(authority.ca_file)
    with tarry.Client(url, ca_file=ca_file) as client:
        task = client.enqueue(f"{url}/healthz", method="GET", overrides={"maxAttempts": 1})
        client.wait(task, timeout=60)
        # The service does not trust its own certificate as that of a target.
        assert ["tls"] == [attempt.error_class for attempt in client.attempts(task)]
    no_retries = tarry.Policy(max_attempts=1)
    with (
        tarry.Client(url, policy=no_retries) as client,
        pytest.raises(ServiceUnreachable, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.health()

    async with tarry.AsyncClient(url, ca_file=ca_file) as client:
        assert (await client.health()).ready


def test_command_line_uses_the_ca_file(tls_service: Service, authority: Authority) -> None:
    """TARRY_CA_FILE is trusted by the commands; without it, the error names it."""
    arguments = ("tasks", "list", "--server", f"https://127.0.0.1:{tls_service.port}")
    result = run_tarry(*arguments, TARRY_CA_FILE=str(authority.ca_file))
    assert (0, "") == (result.returncode, result.stderr)
    result = run_tarry(*arguments)
    assert "TARRY_CA_FILE can name the certificates to trust" in result.stderr
    result = run_tarry(*arguments, TARRY_CA_FILE="/none")
    assert "TARRY_CA_FILE must be a file of PEM certificates, but /none" in result.stderr


def test_client_without_tls_is_disconnected(tls_service: Service) -> None:
    """A request in plain text gets no response, and a client that sends nothing is disconnected."""
    for request in (b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", tls_service.port), timeout=30) as connection:
            connection.sendall(request)
            while received := connection.recv(1024):
                assert not received.startswith(b"HTTP")


def test_certificate_is_replaced_while_the_service_runs(
    tls_service: Service, authority: Authority, files: PemFiles
) -> None:
    """New connections get the new certificate; a connection that exists still gets responses."""
    context = ssl.create_default_context(cafile=authority.ca_file)

    def connect() -> tuple[http.client.HTTPSConnection, str]:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", tls_service.port, timeout=60, context=context
        )
        connection.connect()
        assert isinstance(connection.sock, ssl.SSLSocket)
        return connection, common_name(connection.sock.getpeercert())

    def has_new_certificate() -> bool:
        connection, name = connect()
        connection.close()
        return name == "second"

    old_connection, name = connect()
    assert "first" == name
    for is_replaced in (False, True):
        old_connection.request("GET", "/healthz")
        response = old_connection.getresponse()
        response.read()
        assert (200, False) == (response.status, response.will_close)
        if not is_replaced:
            files.replace_with(authority.issue("second"))
            tls_service.wait_for(has_new_certificate)
    old_connection.close()


class NameHandler(BaseHTTPRequestHandler):
    """Records the common names of client certificates."""

    names: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        """Read the body and return 200."""
        self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.connection, ssl.SSLSocket)
        self.names.append(common_name(self.connection.getpeercert()))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        """Log nothing."""


def test_target_gets_a_client_certificate(tmp_path: Path, authority: Authority) -> None:
    """The settings file maps a target that requires a client certificate to its files."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca_file)
    context.load_cert_chain(*authority.issue("target"))
    context.verify_mode = ssl.CERT_REQUIRED
    own = authority.issue("own")
    settings = tmp_path / "tarry.toml"
    with ThreadingHTTPServer(("127.0.0.1", 0), NameHandler) as target:
        target.socket = context.wrap_socket(target.socket, server_side=True)
        threading.Thread(target=target.serve_forever, daemon=True).start()
        settings.write_text(f"""
ca_file = "{authority.ca_file}"

[[client_certificates]]
targets = ["https:127.0.0.1:{target.server_port}"]
cert_file = "{own.cert}"
key_file = "{own.key}"
""")
        with service(tmp_path, "--config", str(settings)) as running:
            task = running.post(targetUrl=f"https://127.0.0.1:{target.server_port}/", body={})
            assert "SUCCEEDED" == running.wait_until_finished(task["taskId"])["status"]
        target.shutdown()
    assert ["own"] == NameHandler.names


def test_processes_of_a_supervisor_use_tls(
    tmp_path: Path, authority: Authority, files: PemFiles
) -> None:
    """With `--workers`, all processes have the certificate, and the greeting has the URL."""
    flags = ("--tls-cert", str(files.cert), "--tls-key", str(files.key), "--workers", "2")
    with service(tmp_path, *flags, ca_file=authority.ca_file) as running:
        running.wait_for(lambda: "tarry serves" in (tmp_path / "log").read_text())
        assert f"tarry serves https://127.0.0.1:{running.port} " in (tmp_path / "log").read_text()
        assert 200 == running.request("GET", "/readyz")[0]


def test_service_does_not_start_with_an_invalid_certificate(
    tmp_path: Path, authority: Authority, files: PemFiles
) -> None:
    """The error has the setting, and the exit code is that of invalid settings."""
    other = authority.issue("other")
    flags = ["serve", "--store", f"sqlite:{tmp_path / 'tarry.db'}", "--port", "0"]
    result = run_tarry(*flags, "--tls-cert", str(files.cert), "--tls-key", str(other.key))
    assert 2 == result.returncode
    assert "error: tls_key must be the private key of the certificate in" in result.stderr
    assert not (tmp_path / "tarry.db").exists()
    result = run_tarry(*flags, "--tls-cert", str(files.cert))
    assert "error: tls_key must be given with tls_cert" in result.stderr
