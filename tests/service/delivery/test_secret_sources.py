"""Sources of secrets: files, environment variables, commands, OAuth 2 tokens."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tarry.service.delivery.secret_sources import (
    MAX_SECRET_BYTES,
    CommandSource,
    EnvironmentSource,
    FileSource,
    SecretSource,
    SecretUnavailable,
    SecretValue,
    TokenEndpoint,
    TokenSource,
)
from tarry.service.engine.secrets import ResolvedSecrets
from tests.service.delivery.harness import LOOPBACK_GUARD, LOOPS, run, use_loop
from tests.service.delivery.scripted_server import ScriptedServer, never_respond, run_server


@pytest.fixture(autouse=True, params=LOOPS)
def _loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_loop(request.param, monkeypatch)


def python_command(code: str, **arguments: Any) -> CommandSource:
    """Return a source that runs Python code."""
    command = (sys.executable, "-S", "-E", "-c", code)
    return CommandSource(command, **{"timeout_s": 20.0, "cache_s": 60.0} | arguments)


def fetch_error(source: SecretSource) -> str:
    """Return the error of a fetch that fails."""
    with pytest.raises(SecretUnavailable) as caught:
        run(source.fetch())
    return str(caught.value)


def test_file_is_read_at_each_fetch_without_blanks_around(tmp_path: Path) -> None:
    """The value is the content of the file at the time of the fetch, without the line break."""
    file = tmp_path / "token"
    source = FileSource(file)
    file.write_text("first-token\n")
    assert SecretValue("first-token", 1.0, 1.0) == run(source.fetch())
    file.write_text("  second-token\r\n")
    assert "second-token" == run(source.fetch()).text


def test_representations_contain_no_secret() -> None:
    """The event loop logs representations of results, so they contain no values."""
    request = DeliveryRequest(
        tenant="shop", url="https://a.example/?key=top-secret", method="POST",
        headers={"Authorization": "top-secret"}, body=b"top-secret", timeout=1.0,
    )  # fmt: skip
    result = DeliveryResult(status=401, excerpt=b"top-secret", sent_secrets=("top-secret",))
    resolved = ResolvedSecrets({"Authorization": "top-secret"}, ("top-secret",))
    for value in (SecretValue("top-secret", 1.0, 1.0), request, result, resolved):
        assert "secret" not in repr(value)


def test_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    """The error has the path and the reason."""
    message = f"the file {tmp_path / 'none'} cannot be read: No such file or directory"
    assert message == fetch_error(FileSource(tmp_path / "none"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must have at least 6 characters, but has 0"),
        (b"12345\n", "must have at least 6 characters, but has 5"),
        (b"two\nlines", "must be one line of visible ASCII characters"),
        ("pässword".encode(), "must be one line of visible ASCII characters"),
        (b"x" * (MAX_SECRET_BYTES + 1), f"is longer than {MAX_SECRET_BYTES} bytes"),
    ],
)
def test_value_that_cannot_be_a_header_is_rejected(
    tmp_path: Path, content: bytes, message: str
) -> None:
    """The error has the rule, and no part of the value."""
    file = tmp_path / "token"
    file.write_bytes(content)
    assert f"the file {file} {message}" == fetch_error(FileSource(file))


def test_environment_variable_is_a_secret() -> None:
    """The value does not expire, because the environment of a process does not change."""
    value = run(EnvironmentSource("ERP_TOKEN", {"ERP_TOKEN": "erp-token"}).fetch())
    assert ("erp-token", float("inf")) == (value.text, value.lifetime_s)
    message = "the environment variable ERP_TOKEN is not set"
    assert message == fetch_error(EnvironmentSource("ERP_TOKEN", {}))


def test_command_writes_the_secret_to_its_output() -> None:
    """The value is the output without the line break; it is cached for the configured time."""
    source = python_command("print('command-token')", cache_s=7.0)
    assert SecretValue("command-token", 7.0, 7.0) == run(source.fetch())


def test_command_that_fails_is_reported_without_its_output() -> None:
    """The error has the exit status, but neither standard output nor standard error."""
    code = "import sys; print('command-token'); sys.exit('error-token')"
    message = f"the command {sys.executable} failed: its exit status is 1"
    assert message == fetch_error(python_command(code))


def test_command_that_does_not_exist_is_reported() -> None:
    """The error has the name of the command and the reason."""
    source = CommandSource(["/none/such"], timeout_s=1.0, cache_s=1.0)
    assert "the command /none/such cannot be started: No such file or directory" == fetch_error(
        source
    )


async def test_command_is_ended_after_its_timeout_with_its_children(tmp_path: Path) -> None:
    """A command that hangs, and a program that it has started, are ended."""
    file = tmp_path / "pids"
    child = "import time; time.sleep(60)"
    code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-E', '-c', {child!r}])\n"
        f"open({str(file)!r} + '.new', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(file)!r} + '.new', {str(file)!r})\n"
        "time.sleep(60)\n"
    )

    loop = asyncio.get_running_loop()
    fetch = loop.create_task(python_command(code, timeout_s=3600.0).fetch())
    while not file.exists():  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.01)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    with pytest.raises(SecretUnavailable) as caught:
        await python_command(child, timeout_s=0.05).fetch()
    assert f"the command {sys.executable} has not ended within 0.05 s" == str(caught.value)
    for pid in file.read_text().split():
        while _is_running(int(pid)):  # the child is a zombie until init reaps it
            pass


async def test_command_is_ended_with_its_children_if_it_is_cancelled_during_its_start(
    tmp_path: Path,
) -> None:
    """A fetch that is cancelled before the event loop knows of the process leaves none behind."""
    file = tmp_path / "pids"
    code = f"sleep 60 & echo $$ $! > {file}.new; mv {file}.new {file}; wait"

    loop = asyncio.get_running_loop()
    source = CommandSource(["sh", "-c", code], timeout_s=3600.0, cache_s=1.0)
    fetch = loop.create_task(source.fetch())
    await asyncio.sleep(0)  # creates the asyncio task that starts the command
    await asyncio.sleep(0)  # starts the command
    while not file.exists():
        time.sleep(0.01)  # noqa: ASYNC251 - the event loop must not run meanwhile
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    for pid in file.read_text().split():
        while _is_running(int(pid)):  # the child is a zombie until init reaps it
            pass


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_output_of_a_command_is_bounded() -> None:
    """A command that writes without end is ended."""
    code = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
    message = f"the output of the command {sys.executable} is longer than {MAX_SECRET_BYTES} bytes"
    assert message == fetch_error(python_command(code))


TOKEN = {"access_token": "access-token", "token_type": "Bearer", "expires_in": 100}


def json_response(body: Any, status: str = "200 OK") -> bytes:
    """Return a response with a JSON body."""
    data = json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def fetch_token(
    script: Callable[[ScriptedServer], Awaitable[None]], **endpoint: Any
) -> SecretValue:
    """Fetch a token from a server whose responses the script sends."""

    async def main() -> SecretValue:
        async with run_server() as server:
            delivery = HttpDeliveryClient(LOOPBACK_GUARD)
            url = f"{server.url}token"
            source = TokenSource(
                TokenEndpoint(url=url, client_id="my client", **endpoint),
                EnvironmentSource("S", {"S": "client:secret"}),
                delivery.send,
                tenant="default",
            )
            try:
                value, _ = await asyncio.gather(source.fetch(), script(server))
                return value
            finally:
                await delivery.close()

    return run(main())


def respond(response: bytes) -> Callable[[ScriptedServer], Awaitable[None]]:
    """Return a script that sends one response."""

    async def script(server: ScriptedServer) -> None:
        (await server.received.get()).respond(response)

    return script


def test_token_request_follows_rfc_6749() -> None:
    """A token is requested by POST with the client's credentials in Basic authentication."""
    requests: list[tuple[str, bytes]] = []

    async def script(server: ScriptedServer) -> None:
        request = await server.received.get()
        requests.append((request.head, request.body))
        request.respond(json_response(TOKEN))

    value = fetch_token(script, scope="orders write", parameters={"audience": "https://api"})
    assert SecretValue("access-token", 95.0, 90.0) == value
    [(head, body)] = requests
    assert head.startswith("POST /token HTTP/1.1\r\n")
    assert "Content-Type: application/x-www-form-urlencoded\r\n" in head
    basic = head.partition("Authorization: Basic ")[2].partition("\r\n")[0]
    assert b"my+client:client%3Asecret" == b64decode(basic)
    form = b"grant_type=client_credentials&scope=orders+write&audience=https%3A%2F%2Fapi"
    assert form == body


def test_client_secret_can_be_sent_in_the_body() -> None:
    """With `secret_in_body`, client id and secret are parameters of the request."""
    requests: list[tuple[str, bytes]] = []

    async def script(server: ScriptedServer) -> None:
        request = await server.received.get()
        requests.append((request.head, request.body))
        request.respond(json_response(TOKEN))

    fetch_token(script, secret_in_body=True)
    [(head, body)] = requests
    assert "Authorization" not in head
    form = b"grant_type=client_credentials&client_id=my+client&client_secret=client%3Asecret"
    assert form == body


@pytest.mark.parametrize(
    ("changes", "lifetime_s"),
    [
        ({"expires_in": "100"}, 95.0),
        ({"expires_in": None}, 285.0),
        ({"expires_in": 0}, 0.95),
        ({"expires_in": "nan"}, 0.95),
    ],
)
def test_lifetime_of_a_token(changes: dict[str, Any], lifetime_s: float) -> None:
    """`expires_in` may be text, or missing: then a token is used for five minutes.

    A token is used for at least a second, so that tokens are not requested in a loop.
    """
    value = fetch_token(respond(json_response({**TOKEN, **changes})))
    assert lifetime_s == pytest.approx(value.lifetime_s)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            json_response(
                {"error": "invalid_client", "error_description": "client:secret"}, "401 X"
            ),
            "the token endpoint responded with 401 invalid_client",
        ),
        (
            json_response({"error": "client:secret"}, "400 X"),
            "the token endpoint responded with 400",
        ),
        (b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n", "the token endpoint responded with 503"),
        (
            b"HTTP/1.1 302 X\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
            "the token endpoint responded with 302",
        ),
        (
            json_response({"access_token": "access-token"}),
            "the response of the token endpoint is not JSON with access_token and token_type",
        ),
        (
            json_response({**TOKEN, "token_type": "mac"}),
            "the token endpoint returned a token that is not a bearer token",
        ),
        (
            json_response({**TOKEN, "access_token": "access\ntoken"}),
            "the access token must be one line of visible ASCII characters",
        ),
    ],
)
def test_failure_of_the_token_endpoint(response: bytes, message: str) -> None:
    """The error has status and code of the response, but no other part of it."""
    with pytest.raises(SecretUnavailable) as caught:
        fetch_token(respond(response))
    assert message == str(caught.value)


def test_token_endpoint_that_cannot_be_reached() -> None:
    """The error has the fault of the connection."""

    async def main() -> None:
        async with run_server(never_respond) as server:
            url = server.url
        delivery = HttpDeliveryClient(LOOPBACK_GUARD)
        source = TokenSource(
            TokenEndpoint(url=url, client_id="c"),
            EnvironmentSource("S", {"S": "client:secret"}),
            delivery.send,
            tenant="default",
        )
        try:
            await source.fetch()
        finally:
            await delivery.close()

    with pytest.raises(SecretUnavailable, match=r"cannot be reached \(refused\)"):
        run(main())


def test_client_secret_that_is_missing_is_reported() -> None:
    """No request is sent without the client's secret."""
    source = TokenSource(
        TokenEndpoint(url="http://127.0.0.1:1/", client_id="c"),
        EnvironmentSource("CLIENT_SECRET", os.environ),
        HttpDeliveryClient(LOOPBACK_GUARD).send,
        tenant="default",
    )
    assert "the environment variable CLIENT_SECRET is not set" == fetch_error(source)
