"""`tarry serve` and `tarry config`: the first minute, the end, and what is in force."""

from __future__ import annotations

import http.client
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cli.operating import tarry


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `tarry serve` on a free port; give the process and its greeting."""
    command = [sys.executable, "-m", "tarry", "serve", "--port", "0", *flags]
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


def pasted(curl: str) -> tuple[int, bytes]:
    """Do what a line with curl does."""
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
    answer = connection.getresponse()
    try:
        return answer.status, answer.read()
    finally:
        connection.close()


def test_greeting_has_a_line_that_works(tmp_path: Path) -> None:
    """Where it is, where its data is, and a task that is delivered; SIGTERM ends it with 0."""
    with serving(tmp_path, "--dev") as (process, greeting):
        status, answer = pasted(greeting[greeting.index("curl") :])
        process.send_signal(signal.SIGTERM)
        code = process.wait()

    assert (201, "SUCCEEDED") == (status, json.loads(answer)["status"])
    assert f"data in {tmp_path / 'tarry-data' / 'tarry.db'}\n" in greeting
    assert "--dev: tasks may go to this machine" in greeting
    assert 0 == code


def test_greeting_says_how_to_get_a_key(tmp_path: Path) -> None:
    """Where keys are needed, the next command is there; Ctrl-C ends with 130."""
    flags = ("--store", "sqlite:x.db", "--set", "require_keys=true")
    with serving(tmp_path, *flags) as (process, greeting):
        process.send_signal(signal.SIGINT)
        code = process.wait()

    assert "tarry keys create --tenant NAME --store sqlite:x.db\n" in greeting
    assert "Authorization: Bearer KEY" in greeting
    assert 130 == code


def test_service_that_cannot_start_says_so(tmp_path: Path) -> None:
    """The port is taken: 4, and the log has the reason."""
    with serving(tmp_path, "--store", "memory:") as (_, greeting):
        port = greeting.split()[2].rpartition(":")[2]
        command = [sys.executable, "-m", "tarry", "serve", "--store", "memory:", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (4, "") == (done.returncode, done.stdout)
    assert "address already in use" in done.stderr
    assert "\nerror: the service did not start: the log above says why\n" in done.stderr


def test_config_tells_where_values_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags over variables over the file over defaults; secrets are only counted."""
    file = tmp_path / "tarry.toml"
    file.write_text('port = 1\nhost = "::1"\nsigning_secrets = ["whsec_hidden"]\n')
    monkeypatch.setenv("TARRY_PORT", "2")
    monkeypatch.setenv("TARRY_IN_FLIGHT", "3")
    given = ("config", "--config", file, "--port", "4", "--set", "drain-ms=5")

    told, shown = tarry(*given, "--json").json, tarry(*given)

    assert {"value": "4", "from": "--port"} == told["port"]
    assert {"value": "3", "from": "TARRY_IN_FLIGHT"} == told["in_flight"]
    assert {"value": "::1", "from": f"host in {file}"} == told["host"]
    assert {"value": "5", "from": "--set drain_ms"} == told["drain_ms"]
    assert "default" == told["store"]["from"]
    assert "whsec_hidden" not in shown.out
    assert ["port", "4", "--port"] == next(
        line.split()[:3] for line in shown.out.splitlines() if line.startswith("port ")
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--set", "port"], "--set takes NAME=VALUE, got 'port'"),
        (["--set", "prot=1"], "--set prot: there is no such setting; there are allow_host, "),
        (["--set", "port=x"], "--set port: expected"),
        (["--port", "99999"], "--port: expected"),
        (["--config", "none.toml"], "cannot read none.toml"),
    ],
    ids=["no value", "no such setting", "no number", "too large", "no file"],
)
def test_mistake_is_named(flags: list[str], said: str) -> None:
    """Before anything is started."""
    done = tarry("config", *flags)

    assert (2, "") == (done.code, done.out)
    assert said in done.err


@pytest.mark.parametrize(
    ("arguments", "missing", "said"),
    [
        (["serve"], "uvicorn", "pip install 'tarry[service]'"),
        (["config"], "msgspec", "pip install 'tarry[service]'"),
        (["keys", "create", "--tenant", "a"], "uuid_utils", "pip install 'tarry[service]'"),
        (["send", "http://x"], "httpx", "pip install 'tarry[client]'"),
        (["tasks", "list", "--status", "PENDING"], "msgspec", "pip install 'tarry[client]'"),
    ],
    ids=["serve", "config", "keys", "send", "tasks"],
)
def test_missing_extra_is_named(arguments: list[str], missing: str, said: str) -> None:
    """One line with the way to install it."""
    code = (
        f"import sys; sys.modules[{missing!r}] = None; "
        f"sys.argv[1:] = {arguments!r}; from tarry.cli import main; main()"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (2, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert 1 == done.stderr.count("\n")
