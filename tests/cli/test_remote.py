"""Messages of commands about the connection to the service."""

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
from tests.cli.test_cli_docs import commands

EVENTS = {"content-type": "text/event-stream"}


@contextmanager
def scripted_server(*answers: tuple[int, dict[str, str], bytes]) -> Iterator[str]:
    """Run a server that sends these responses, each on its own connection; yield its address."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = left.pop(0)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_lost_stream_is_reported() -> None:
    """`tail` continues after a lost stream, and reports the loss."""
    event = b'data: {"kind": "resumed", "lane": "http:x"}\n\n'
    with no_wait(), scripted_server((200, EVENTS, event), (404, {}, b"")) as address:
        result = run_command("tail", "--server", address)

    lost, end = result.err.splitlines()
    assert f"event stream lost, reconnecting, url={address}" == lost
    assert end.startswith("error: ")
    assert 1 == len(result.out.splitlines())


def test_long_wait_is_reported() -> None:
    """A wait that the service asks for is reported; short retries are not."""
    page = b'{"items": [], "nextCursor": null}'
    answers = [(429, {"retry-after": "7"}, b""), (503, {}, b""), (200, {}, page)]
    with no_wait(), scripted_server(*answers) as address:
        result = run_command("tasks", "list", "--server", address)

    assert (0, "none\n") == (result.code, result.out)
    (message,) = result.err.splitlines()
    assert re.match(r"the service answered 429: retrying in [78]", message)  # 7 s, and jitter


def test_https_to_http_server_suggests_http() -> None:
    """A TLS error of an HTTP server suggests http://."""
    with scripted_server() as address:
        result = run_command("tasks", "list", "--server", address.replace("http:", "https:"))

    assert (4, "") == (result.code, result.out)
    assert "; does the service use http:// instead?): start one with" in result.err


@pytest.mark.parametrize(
    ("variable", "meant"), [("TARRY_SEVER", "TARRY_SERVER"), ("TARRY_PROT", "TARRY_PORT")]
)
def test_unknown_variable_is_rejected(
    monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
) -> None:
    """An unknown TARRY_ variable is rejected."""
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    result = run_command("send", "http://127.0.0.1:1/hook")

    message = f"error: {variable}: there is no such setting; did you mean {meant}?\n"
    assert (2, "", message) == result


def test_variables_of_the_service_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the service's settings are accepted."""
    monkeypatch.setenv("TARRY_PORT", "9000")
    with scripted_server((200, {}, b'{"items": [], "nextCursor": null}')) as address:
        assert (0, "none\n", "") == run_command("tasks", "list", "--server", address)


def test_variables_of_all_commands_are_known() -> None:
    """Every variable that an option reads is accepted by all commands."""
    inner = commands(typer.main.get_command(app), ("tarry",))
    read = {one.envvar: "x" for _, command in inner for one in command.params if one.envvar}

    check_environment(read)
    assert {"TARRY_SERVER", "TARRY_KEY"} == set(read)


def test_variables_are_checked_without_the_service() -> None:
    """Variables are checked when only the client is installed."""
    hidden = ("cryptography", "obstore", "prometheus_client", "starlette", "uuid_utils", "uvicorn")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden}))\n"
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
