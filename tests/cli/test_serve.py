"""`tarry serve` and `tarry config`."""

from __future__ import annotations

import errno
import http.client
import io
import json
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tarry.cli.exit_codes import EXIT_SERVICE_ERROR
from tarry.cli.serve import _explain_bind_error, _print_greeting
from tarry.service.settings import load_settings
from tests.cli.harness import run_command

SECRET = f"whsec_{'c2hoaGho' * 4}"


@contextmanager
def run_serve(
    folder: Path, *flags: str, command_prefix: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `tarry serve` on a free port; yield the process and its greeting.

    `command_prefix` is put before the command.
    """
    command = [*command_prefix, sys.executable, "-m", "tarry", "serve", "--port", "0", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    ) as process:
        try:
            assert process.stdout is not None
            greeting = ""
            while not greeting.endswith("'\n\n"):
                line = process.stdout.readline()
                assert line, process.communicate()
                greeting += line
            yield process, greeting
        finally:
            process.kill()


def run_curl(curl: str) -> tuple[int, bytes]:
    """Send the request of a curl command line; return status and body of the response."""
    words = shlex.split(curl.replace("\\\n", " "))
    assert "curl" == words.pop(0)
    url, headers, body = "", {}, ""
    while words:
        word = words.pop(0)
        if word == "-H":
            name, _, value = words.pop(0).partition(": ")
            headers[name] = value
        elif word == "-d":
            body = words.pop(0)
        else:
            url = word
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    connection.request("POST", parts.path, body, headers)
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="prlimit needs Linux")
def test_soft_limit_of_open_files_is_raised_at_start(tmp_path: Path) -> None:
    """The process may open as many files as its hard limit allows."""
    limited = ("sh", "-c", 'ulimit -Sn 200; ulimit -Hn 300; exec "$@"', "sh")
    with run_serve(tmp_path, "--store", "memory:", command_prefix=limited) as (process, _):
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    assert (300, 300) == limits


def test_greeting_has_a_working_example(tmp_path: Path) -> None:
    """The greeting has the data file and a working curl command; SIGTERM exits with 0."""
    with run_serve(tmp_path, "--dev") as (process, greeting):
        status, body = run_curl(greeting[greeting.index("curl") :])
        process.send_signal(signal.SIGTERM)
        code = process.wait()

    assert (201, "SUCCEEDED") == (status, json.loads(body)["status"])
    assert f"data in {tmp_path / 'tarry-data' / 'tarry.db'}\n" in greeting
    assert "--dev: this machine is allowed as a target" in greeting
    assert 0 == code


@pytest.mark.parametrize(
    "close",
    [
        "while True:\n        with suppress(asyncio.CancelledError): await asyncio.sleep(100)",
        "while True: time.sleep(100)",
    ],
    ids=["ignores cancellations", "blocks the event loop"],
)
def test_a_store_that_does_not_close_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close: str
) -> None:
    """The process exits after the shutdown timeout, and logs what it has abandoned."""
    patch = f"""
import asyncio, time
from contextlib import suppress
from tarry.service.stores.sqlite import SqliteTaskStore
async def close_forever(self):
    {close}
SqliteTaskStore.close = close_forever
"""
    (tmp_path / "sitecustomize.py").write_text(patch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with run_serve(tmp_path, "--dev", "--set", "drain_ms=0") as (process, _):
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate()

    assert EXIT_SERVICE_ERROR == process.returncode
    assert "shutdown not complete after 5 s, exiting" in log
    assert "close_forever" in log


def test_greeting_says_how_to_get_a_key(tmp_path: Path) -> None:
    """If keys are required, the greeting has the command to create one; Ctrl-C exits with 130."""
    flags = ("--store", "sqlite:x.db", "--set", "require_keys=true")
    with run_serve(tmp_path, *flags) as (process, greeting):
        process.send_signal(signal.SIGINT)
        code = process.wait()

    assert "tarry keys create --tenant NAME --store sqlite:x.db\n" in greeting
    assert "Authorization: Bearer KEY" in greeting
    assert 130 == code


def test_greeting_says_for_whom_the_signing_secrets_sign(tmp_path: Path) -> None:
    """With API keys, the greeting names the command that creates secrets of other tenants."""
    flags = ("--store", "memory:", "--set", f"signing_secrets={SECRET}")
    with run_serve(tmp_path, *flags, "--set", "require_keys=true") as (_, greeting):
        assert "only for the tenant default; others: tarry secrets create" in greeting
    with run_serve(tmp_path, *flags) as (_, greeting):
        assert "signing_secrets" not in greeting


def test_greeting_has_the_address_for_other_commands(tmp_path: Path) -> None:
    """The greeting sets TARRY_SERVER, unless the service has the default address."""
    line = "export TARRY_SERVER="
    with run_serve(tmp_path, "--store", "memory:") as (_, greeting):
        address = greeting.split()[2]
        assert f"{line}{address}\n" in greeting
    with redirect_stdout(io.StringIO()) as out:
        _print_greeting(load_settings({"store": "memory:"}), "http://127.0.0.1:8080")
    assert "tarry serves http://127.0.0.1:8080" in out.getvalue()
    assert line not in out.getvalue()


def test_greeting_says_how_to_allow_internal_targets(tmp_path: Path) -> None:
    """The greeting has the setting, unless it is set."""
    with run_serve(tmp_path, "--store", "memory:") as (_, greeting):
        assert "public addresses only; to allow hosts of your network: --allow-target" in greeting
    with run_serve(tmp_path, "--store", "memory:", "--allow-target", "*.corp.example") as (
        _,
        greeting,
    ):
        assert "--allow-target" not in greeting


def test_bind_error_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bind error exits with 4 and a hint, and is not logged a second time."""
    with run_serve(tmp_path, "--store", "memory:") as (_, greeting):
        port = greeting.split()[2].rpartition(":")[2]
        port_in_use = run_command("serve", "--store", "memory:", "--port", port)
    foreign_address = run_command(
        "serve", "--store", "memory:", "--port", "0", "--host", "192.0.2.1"
    )

    assert (4, "") == (port_in_use.code, port_in_use.out)
    assert not any("Errno" in record.getMessage() for record in caplog.records)
    assert port_in_use.err.endswith(
        f"error: port {port} of 127.0.0.1 is already in use: choose another with --port\n"
    )
    assert (4, "") == (foreign_address.code, foreign_address.out)
    assert foreign_address.err.endswith(
        "error: 192.0.2.1 is not an address of this machine: choose another with --host\n"
    )


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (
            PermissionError(errno.EACCES, "permission denied"),
            "choose a port above 1023 with --port",
        ),
        (socket.gaierror(-2, "name or service not known"), "choose another with --host"),
        (OSError(errno.EIO, "odd"), None),
    ],
    ids=["privileged port", "unknown name", "other error"],
)
def test_bind_error_hints(error: OSError, hint: str | None) -> None:
    """Known bind errors have a hint; unknown errors have none."""
    message = _explain_bind_error(error, "nowhere", 80)

    assert (message or "").endswith(hint or "")
    assert (hint is None) == (message is None)


def test_greeting_of_a_wildcard_address(tmp_path: Path) -> None:
    """With --host 0.0.0.0, the URLs in the greeting have the loopback address."""
    wildcard = "0.0.0.0"  # noqa: S104 - the tested address
    with run_serve(tmp_path, "--dev", "--host", wildcard) as (_, greeting):
        first, *rest = greeting.splitlines()

    port = first.split()[2].rpartition(":")[2]
    url = f"http://127.0.0.1:{port}/"
    links = f"dashboard: {url}, API documentation: {url}docs"
    assert f"tarry serves http://{wildcard}:{port} ({links})" == first
    assert wildcard not in "".join(rest)
    assert f'"targetUrl": "http://127.0.0.1:{port}/healthz"' in greeting


def test_config_shows_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags override variables, variables the file, and the file defaults; secrets are hidden."""
    file = tmp_path / "tarry.toml"
    file.write_text(f'port = 1\nhost = "::1"\nsigning_secrets = ["{SECRET}"]\n')
    monkeypatch.setenv("TARRY_PORT", "2")
    monkeypatch.setenv("TARRY_IN_FLIGHT", "3")
    command = ("config", "--config", file, "--port", "4", "--set", "drain-ms=5")

    document, table = run_command(*command, "--json").json, run_command(*command)

    assert {"value": 4, "from": "--port"} == document["port"]
    assert {"value": 3, "from": "TARRY_IN_FLIGHT"} == document["in_flight"]
    assert {"value": "::1", "from": f"host in {file}"} == document["host"]
    assert {"value": 5, "from": "--set drain_ms"} == document["drain_ms"]
    assert [False, [], ["[redacted]"], 50_000] == [
        document[name]["value"]
        for name in ("dev", "allow_target", "signing_secrets", "tenant_rate")
    ]
    assert "default" == document["store"]["from"]
    assert SECRET not in table.out
    assert ["port", "4", "--port"] == next(
        line.split()[:3] for line in table.out.splitlines() if line.startswith("port ")
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "port"], "--set must have the format NAME=VALUE, got 'port'"),
        (["--set", "prot=1"], "--set prot: there is no such setting; did you mean port?"),
        (["--set", "zz=1"], "--set zz: there is no such setting; the settings are allow_host, "),
        (["--set", "port=x"], "--set port: must be a whole number, got"),
        (["--port", "99999"], "--port: must be a whole number <= 65535"),
        (["--config", "none.toml"], "cannot read none.toml"),
        (["--allow-target", "10.0.0.0/99"], "--allow-target: allow_target must contain CIDRs"),
        (["--set", "ca_file=/nope.pem"], "--set ca_file: ca_file must be a file of PEM"),
        (["--store", "sqlite:/usr"], "--store: store must be a file, but /usr is a folder"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_invalid_setting_is_reported(flags: list[str], message: str) -> None:
    """`serve` and `config` report an invalid setting before anything starts."""
    result = run_command("config", *flags)

    assert (2, "") == (result.code, result.out)
    assert message in result.err
    assert result == run_command("serve", *flags)


@pytest.mark.parametrize(
    ("arguments", "missing", "message"),
    [
        (["serve"], "uvicorn", "pip install 'tarry[service]'"),
        (["config"], "msgspec", "pip install 'tarry[service]'"),
        (["keys", "create", "--tenant", "a"], "uuid_utils", "pip install 'tarry[service]'"),
        (["send", "http://x"], "httpx", "pip install 'tarry[client]'"),
        (["tasks", "list", "--status", "PENDING"], "msgspec", "pip install 'tarry[client]'"),
    ],
    ids=["serve", "config", "keys", "send", "tasks"],
)
def test_missing_extra_is_named(arguments: list[str], missing: str, message: str) -> None:
    """A missing package is reported with the install command."""
    code = (
        f"import sys; sys.modules[{missing!r}] = None; "
        f"sys.argv[1:] = {arguments!r}; from tarry.cli import main; main()"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert (2, "") == (result.returncode, result.stdout)
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert 1 == result.stderr.count("\n")
