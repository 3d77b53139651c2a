"""The commands and code of the pages about the service, run with a real service.

A command runs as it is on the page, except that ports and ids are replaced by the actual ones. Its
output is compared with the page: ids, times and delays may differ, `...` matches any text, and
whitespace is ignored. Tables on the pages must match the code.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tarry.service.api.context import ApiLimits
from tarry.service.api.problems import PROBLEM_TYPES
from tarry.service.delivery import Fault
from tarry.service.delivery.guard import Guard
from tarry.service.engine.context import EngineLimits
from tarry.service.file_descriptors import share_descriptors
from tarry.service.model import TRANSITIONS
from tarry.service.settings import Settings, load_settings
from tests.cli.harness import run_command
from tests.integration.ports import free_port
from tests.integration.service import Service, Target, service, target
from tests.test_docs import DOCS, Block, blocks_of, relative_path, table_of

PAGES = [
    *sorted(DOCS.glob("service*.md")),
    *(DOCS / f"{name}.md" for name in ("hand-off", "incidents", "moving-from-celery")),
    *(DOCS / f"{name}.md" for name in ("payments", "rate-limited-api", "webhooks")),
]
DOCUMENTED_SERVICE, DOCUMENTED_TARGET = "127.0.0.1:8080", "127.0.0.1:9009"
"""The addresses of the service and of the target on the pages."""
_ID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_VARIABLE_PARTS = (
    (_ID, "ID"),
    (re.compile(r"\b1\d{12}\b"), "TIME"),
    (re.compile(r"[\d.]+ m?s\b"), "TIME"),
)
_NUMBER = re.compile(r"\b\d[\d,]*")
_REPEATED_COMMAND = re.compile(r"tarry (tasks (show|explain) .*|downstreams)")
_OUTPUT_TIMEOUT_S = 30.0
"""A repeated command must print the output on the page within this time."""
_START_TIMEOUT_S = 30.0
"""A server that a page starts must accept connections within this time."""
_NEEDS_PROCESS = re.compile(r"(?!tarry )|.*[$`|<>;&]|tarry keys ", re.DOTALL)
"""Commands with shell syntax, and those that print to both streams."""
_NOT_RUN = ("pip install", "tarry serve", "make serve", "python examples/")
"""Commands that are not run here: the fixture has done their work, or other tests run them."""


class PageRunner:
    """Runs the commands of a page in the folder of the service."""

    def __init__(self, running_service: Service, actual_addresses: dict[str, str]) -> None:
        self._service = running_service
        self._actual_addresses = actual_addresses
        self._ids: dict[str, str] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environ = {
            **os.environ,
            "COLUMNS": "300",
            "NO_COLOR": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TARRY_SERVER": f"http://{actual_addresses[DOCUMENTED_SERVICE]}",
            "TERM": "dumb",
        }

    def run(self, command: str, expected: str, where: str) -> None:
        """Run a command and compare its output; some commands are repeated until it matches."""
        if command.startswith("tarry serve"):
            assert self._matches(expected, (self._service.folder / "log").read_text()), where
            return
        if command.startswith(_NOT_RUN):
            return
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self._environ[name] = self._run(f"printf %s {value}").strip()
            return
        if command.endswith("&"):
            self._start(command)
            return
        printed = self._run_or_call(command)
        deadline = time.monotonic() + _OUTPUT_TIMEOUT_S
        while not self._matches(expected, printed) and _REPEATED_COMMAND.fullmatch(command):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
            printed = self._run_or_call(command)
        assert self._matches(expected, printed), f"{where}\n{command}\n{printed}"
        self._ids |= zip(_ID.findall(expected), _ID.findall(printed), strict=False)

    def close(self) -> None:
        """Stop all started processes."""
        for process in self._processes:
            process.terminate()
            process.wait()

    def substitute_actual_values(self, text: str) -> str:
        """Return a text of the page with the actual addresses, ports and ids."""
        for documented, actual in (self._actual_addresses | self._ids).items():
            text = text.replace(documented, actual)
        return text.replace(
            DOCUMENTED_TARGET.partition(":")[2],
            self._actual_addresses[DOCUMENTED_TARGET].partition(":")[2],
        )

    def _run_or_call(self, command: str) -> str:
        """Run a command, in this process unless it needs one of its own.

        The start of a process takes 0.6 s of processor time, and some commands are repeated.
        """
        if _NEEDS_PROCESS.match(command):
            return self._run(command)
        arguments = shlex.split(self.substitute_actual_values(command))[1:]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._environ.items():
                patch.setenv(name, value)
            patch.chdir(self._service.folder)
            done = run_command(*arguments)
        return done.out + done.err

    def _run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", self.substitute_actual_values(command)],  # noqa: S607 - bash is found on PATH
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=self._service.folder,
            env=self._environ,
        )
        return done.stdout

    def _start(self, command: str) -> None:
        arguments = shlex.split(self.substitute_actual_values(command).partition(">")[0])
        process = subprocess.Popen(
            [sys.executable, *arguments[1:]],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._service.folder,
        )
        self._processes.append(process)
        target = self._actual_addresses[DOCUMENTED_TARGET]
        host, _, port = target.partition(":")
        if port in arguments:  # otherwise, attempts of the next command could be refused
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not _is_listening(host, int(port)):
                assert time.monotonic() < deadline, f"{command} did not start"
                time.sleep(0.01)

    def _matches(self, expected: str, printed: str) -> bool:
        parts = _normalize(self.substitute_actual_values(expected)).split("...")
        pattern = ".*".join(re.escape(part.strip()) for part in parts)
        return re.fullmatch(pattern, _normalize(printed), re.DOTALL) is not None


def _is_listening(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), _START_TIMEOUT_S):
        return True
    return False


def _normalize(text: str) -> str:
    for pattern, placeholder in _VARIABLE_PARTS:
        text = pattern.sub(placeholder, text)
    return " ".join(text.split())


def _commands(block: Block) -> Iterator[tuple[str, str]]:
    """Return the commands of a console block, each with its output."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        command = lines.pop(0)
        while command.endswith("\\\n") or command.count("'") % 2:
            command += lines.pop(0)
        yield command.strip(), "".join(lines)


def _fail_first_two_orders(path: str, request_number: int) -> int:
    return 503 if path == "/orders" and request_number <= 2 else 200


@contextmanager
def page_runner(page: Path, folder: Path) -> Generator[tuple[PageRunner, Service]]:
    """Run a service for one page, and a target if the page does not start its own."""
    with ExitStack() as stack:
        running_service = stack.enter_context(service(folder))
        actual_addresses = {DOCUMENTED_SERVICE: f"127.0.0.1:{running_service.port}"}
        if re.search("http.server 9009|HTTPServer|port=9009", page.read_text("utf-8")):
            actual_addresses[DOCUMENTED_TARGET] = f"127.0.0.1:{free_port()}"
        else:
            started_target: Target = stack.enter_context(target(_fail_first_two_orders))
            actual_addresses[DOCUMENTED_TARGET] = started_target.url.removeprefix("http://")
        runner = PageRunner(running_service, actual_addresses)
        stack.callback(runner.close)
        yield runner, running_service


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", PAGES, ids=relative_path)
def test_output_on_the_page_matches(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands and code of the page, run in order, print the output on the page."""
    monkeypatch.chdir(tmp_path)  # a page may create files
    namespace: dict[str, object] = {"__name__": "page"}
    if "import Webhook" in page.read_text("utf-8"):
        pytest.importorskip("standardwebhooks")
    with page_runner(page, tmp_path) as (runner, running_service):
        if page.stem in {"incidents", "service-operations"}:
            # The page shows or pauses the lane of this task.
            task = {"targetUrl": runner.substitute_actual_values(f"http://{DOCUMENTED_TARGET}/")}
            running_service.request("POST", "/retry-tasks", task, {"Prefer": "wait=30"})
        for block, following in pairwise([*blocks_of(page), Block("", "", 0)]):
            where = f"{relative_path(page)}, line {block.line}"
            if block.info == "console":
                for command, expected in _commands(block):
                    runner.run(command, expected, where)
            elif block.info == "python notest":  # not run by tests/test_docs.py
                printed = io.StringIO()
                with redirect_stdout(printed):
                    code = runner.substitute_actual_values(block.text)
                    exec(compile(code, where, "exec"), namespace)  # noqa: S102 - trusted
                expected = runner.substitute_actual_values(following.text)
                assert expected == printed.getvalue(), where


@pytest.mark.parametrize("page", PAGES, ids=relative_path)
def test_page_closes_clients_and_servers(page: Path) -> None:
    code = "\n".join(block.text for block in blocks_of(page))
    clients = re.findall(r"^(\w+) = tarry\.Client\(", code, re.MULTILINE)
    servers = re.findall(r"^(\w+) = HTTPServer\(", code, re.MULTILINE)

    assert [] == [
        name
        for name in clients
        if not re.search(rf"^{name}\.close\(\)|^with .*\b{name}:", code, re.MULTILINE)
    ]
    assert [] == [name for name in servers if f"\n{name}.server_close()" not in code]


def test_settings_on_the_page_match_the_code() -> None:
    """The table has the name, default and help text of each setting."""
    documented = table_of(DOCS / "service-configuration.md", "setting")
    loaded = load_settings({}, environ={})

    def help_text(type_: Any) -> str:
        return str(type_.__metadata__[-1].description)

    actual = [
        [f"`{field.name}`", loaded.format(field.name), help_text(field.type)]
        for field in msgspec.structs.fields(Settings)
    ]
    assert actual == documented


def test_files_on_the_page_can_be_loaded(tmp_path: Path) -> None:
    """The TOML examples are valid settings files."""
    file = tmp_path / "tarry.toml"
    bodies, downstreams = [
        block.text for block in blocks_of(DOCS / "service-configuration.md") if block.info == ""
    ]

    file.write_text(bodies, encoding="utf-8")
    settings = load_settings({}, environ={}, file=file).settings
    expected = tomllib.loads(bodies)
    assert expected == {name: getattr(settings, name) for name in expected}

    file.write_text(downstreams, encoding="utf-8")
    patterns = load_settings({}, environ={}, file=file).settings.downstreams
    assert ["*/https:*.partner.example:443", "trial-*/*"] == [str(each) for each in patterns]
    assert [50, None] == [each.rate_per_second for each in patterns]


def test_statuses_on_the_page_match_the_code() -> None:
    """The table has each status and the statuses that can follow it."""
    rows = table_of(DOCS / "service-operations.md", "status")

    documented = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in rows}

    actual = {
        status.name: {following.name for following in after}
        for status, after in TRANSITIONS.items()
    }
    assert actual == documented


def test_limits_on_the_page_match_the_code() -> None:
    """The table has the limits of the engine, the API and the connections."""
    rows = table_of(DOCS / "service-operations.md", "limit of one process")
    engine, api = EngineLimits(), ApiLimits()

    documented = [
        int(number.replace(",", "")) for row in rows for number in _NUMBER.findall(row[1])
    ]

    expected = [
        engine.max_running_attempts,
        engine.max_lane_running_attempts,
        engine.max_leased,
        engine.max_lane_leased,
    ]
    # 429 and 503 are the statuses that two rows name: they are sent when a limit is reached.
    expected += [engine.max_unwritten, 503]
    expected += [api.max_waiting_requests, api.max_event_streams, 429, 503]
    expected += share_descriptors(1_000_000, in_flight=engine.max_running_attempts)
    assert expected == documented


def test_setting_for_a_blocked_target_is_on_the_page(caplog: pytest.LogCaptureFixture) -> None:
    """The page has the error and the log line of a blocked host name, with the value to paste."""
    text = " ".join((DOCS / "service-security.md").read_text("utf-8").split())

    error = Guard().report_blocked("billing.internal", ["10.1.2.3"])

    assert error.endswith("--allow-target billing.internal (setting allow_target)")
    assert f"(blocked: {error})" in text
    assert caplog.messages[0].removesuffix("billing.internal (setting allow_target)") in text


def test_error_classes_on_the_page_match_the_code() -> None:
    """The page lists the values of `errorClass`: the faults, except INTERNAL."""
    text = (DOCS / "service-api.md").read_text("utf-8").partition("`errorClass`:")[2]

    assert set(Fault) - {Fault.INTERNAL} == set(re.findall(r"`([a-z]+)`", text))


def test_problem_types_on_the_page_match_the_code() -> None:
    """The table has each problem type with the title and help text that `GET /docs` shows."""
    actual = [
        [f"`{each.name}`", ", ".join(map(str, each.statuses)), each.title, each.help]
        for each in PROBLEM_TYPES
    ]
    assert actual == table_of(DOCS / "service-api.md", "problem type")


def test_operations_on_the_page_match_the_api(tmp_path: Path) -> None:
    """The table has the success statuses of each operation, and which of 403 to 429 it has."""
    with service(tmp_path) as running_service:
        paths = running_service.request("GET", "/openapi.json")[1]["paths"]
    error_statuses = {"403", "404", "409", "429"}
    actual = {
        f"`{method.upper()} {path}`": (
            {status for status in operation["responses"] if status < "300"},
            error_statuses & set(operation["responses"]),
        )
        for path, operations in paths.items()
        for method, operation in operations.items()
    }

    documented = {
        row[0]: (set(re.findall(r"\d+", row[1])), set(re.findall(r"\d+", row[2])))
        for row in table_of(DOCS / "service-api.md", "operation")
    }
    assert actual == documented


def test_metrics_on_the_page_match_the_service(tmp_path: Path) -> None:
    """The table has each metric with its labels."""
    rows = table_of(DOCS / "service-operations.md", "metric")
    documented = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in rows}

    with service(tmp_path) as running_service:
        task = {"targetUrl": f"http://127.0.0.1:{running_service.port}/healthz", "method": "GET"}
        running_service.request("POST", "/retry-tasks", task, {"Prefer": "wait=30"})
        text = running_service.request("GET", "/metrics")[1]

    names = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    actual = {name for name in names if not name.endswith("_created")}
    assert actual == set(documented)
    for name, labels in re.findall(r"^(\w+)\{(.*)\} ", text, re.MULTILINE):
        if name in actual:
            assert documented[name] == set(re.findall(r"(\w+)=", labels)), name
