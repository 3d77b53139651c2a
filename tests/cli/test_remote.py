"""Tests for messages about the connection to the service, and for TARRY_ variables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import typer.main

from tarry.cli.app import app
from tarry.service.settings import check_environment
from tarry.testing import no_wait
from tests.cli.harness import run_command
from tests.cli.test_cli_docs import iter_commands

EVENT_STREAM_HEADERS = {"content-type": "text/event-stream"}


@contextmanager
def scripted_server(*responses: tuple[int, dict[str, str], bytes]) -> Iterator[str]:
    """Run a server that sends these responses, each on its own connection; yield its address."""
    remaining = list(responses)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = remaining.pop(0)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_lost_stream_is_reported() -> None:
    """`tail` reports a lost stream and reconnects."""
    event = b'data: {"kind": "resumed", "lane": "http:x"}\n\n'
    with no_wait(), scripted_server((200, EVENT_STREAM_HEADERS, event), (404, {}, b"")) as address:
        result = run_command("tail", "--server", address)

    warning, error = result.err.splitlines()
    assert f"event stream lost, reconnecting, url={address}" == warning
    assert error.startswith("error: ")
    assert 1 == len(result.out.splitlines())


def test_long_wait_is_reported() -> None:
    """A wait for Retry-After is reported; a retry after a short delay is not."""
    page = b'{"items": [], "nextCursor": null}'
    responses = [(429, {"retry-after": "7"}, b""), (503, {}, b""), (200, {}, page)]
    with no_wait(), scripted_server(*responses) as address:
        result = run_command("tasks", "list", "--server", address)

    assert (0, "none\n") == (result.code, result.out)
    (message,) = result.err.splitlines()
    assert re.match(r"the service answered 429: retrying in [78]", message)  # 7 s plus jitter


def test_https_to_http_server_suggests_http() -> None:
    """The error for https:// to a server without TLS suggests http://."""
    with scripted_server() as address:
        result = run_command("tasks", "list", "--server", address.replace("http:", "https:"))

    assert (4, "") == (result.code, result.out)
    assert "; does the service use http:// instead?): start one with" in result.err


@pytest.mark.parametrize(
    ("variable", "suggestion"), [("TARRY_SEVER", "TARRY_SERVER"), ("TARRY_PROT", "TARRY_PORT")]
)
def test_unknown_variable_is_rejected(
    monkeypatch: pytest.MonkeyPatch, variable: str, suggestion: str
) -> None:
    """An unknown TARRY_ variable is rejected with a suggestion."""
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    result = run_command("send", "http://127.0.0.1:1/hook")

    message = f"error: {variable}: there is no such setting; did you mean {suggestion}?\n"
    assert (2, "", message) == result


def test_variables_of_the_service_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client commands accept variables of the service's settings."""
    monkeypatch.setenv("TARRY_PORT", "9000")
    with scripted_server((200, {}, b'{"items": [], "nextCursor": null}')) as address:
        assert (0, "none\n", "") == run_command("tasks", "list", "--server", address)


def test_variables_of_all_commands_are_known() -> None:
    """The check of the environment accepts every variable that an option reads."""
    named_commands = iter_commands(typer.main.get_command(app), ("tarry",))
    variables = {
        param.envvar: "x"
        for _, command in named_commands
        for param in command.params
        if param.envvar
    }

    check_environment(variables)
    assert {"TARRY_SERVER", "TARRY_KEY"} == set(variables)


def test_variables_are_checked_without_the_service() -> None:
    """Variables are checked when only the client is installed."""
    service_packages = (
        "cryptography",
        "obstore",
        "prometheus_client",
        "starlette",
        "uuid_utils",
        "uvicorn",
    )
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({service_packages}))\n"
        "sys.argv = ['tarry', 'tasks', 'list']\n"
        "from tarry import cli; cli.main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TARRY_SEVER": "x"},
    )

    message = "error: TARRY_SEVER: there is no such setting; did you mean TARRY_SERVER?\n"
    assert (2, message) == (result.returncode, result.stderr)
