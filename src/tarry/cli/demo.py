"""`tarry demo`: run a service and failing targets, and show twelve calls being retried."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from tarry.cli.output import attempt_result, console, print_text, table, time_until
from tarry.cli.remote import connect
from tarry.cli.tasks import print_explanation
from tarry.client.errors import NotFinished, ServiceError, ServiceUnreachable
from tarry.runtime.clocks import environment

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence
    from typing import Self

    from rich.table import Table

    from tarry.client import Client
    from tarry.wire.tasks import AttemptLog, RetryTask

_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.1
_READY_PREFIX = "tarry serves "
"""Start of the line that `tarry serve` prints when it is ready; the address follows."""

DROP_CONNECTION = "drop"
"""Scripted response whose connection is closed before the announced body is sent."""
TOO_MANY_REQUESTS = "429"
"""Scripted response that is sent with a Retry-After header."""
RETRY_AFTER_S = 1

MAX_ATTEMPTS = 4
RESPONSES_BY_PATH: dict[str, tuple[str, ...]] = {
    "/order/1": (),
    "/order/2": ("503",),
    "/order/3": ("503", "503"),
    "/order/4": (DROP_CONNECTION,),
    "/invoice/5": (TOO_MANY_REQUESTS,),
    "/invoice/6": ("500",),
    "/invoice/7": ("502", DROP_CONNECTION),
    "/invoice/8": (),
    "/mail/9": ("503", "504", "503"),
    "/mail/10": (),
    "/mail/11": ("500",),
    "/mail/12": ("503",) * MAX_ATTEMPTS,
}
"""Failure responses for each path; all later requests to the path are answered with 200.

The first segment of a path selects one of three servers, because so many failures of a single
server would open its breaker.
"""
DEAD_LETTER_PATH = "/mail/12"


def demo() -> None:
    """Run a service, failing targets and twelve calls, and show how the calls are retried.

    One call becomes a dead letter, is explained and replayed. The demo takes about ten seconds,
    needs no network and leaves no files.
    """
    from tempfile import TemporaryDirectory

    print_text("starting a service and three failing targets ...")
    with (
        TemporaryDirectory(prefix="tarry-demo-") as folder,
        FlakyTargets(RESPONSES_BY_PATH).run() as targets,
        _run_service(Path(folder)) as address,
        connect(address, api_key=None) as client,
    ):
        print_text(f"the service is at {address}; adding {len(RESPONSES_BY_PATH)} calls:")
        _enqueue_calls(client, targets)
        board = TaskBoard(client, as_lines=not console().is_terminal)
        board.watch(RESPONSES_BY_PATH)
        print_text("")
        name = call_name(DEAD_LETTER_PATH).capitalize()
        print_text(f"{name} is a dead letter now. `tarry tasks explain` explains why:")
        print_explanation(client.explain(board.tasks[DEAD_LETTER_PATH]))
        print_text("")
        print_text("The targets are fixed now, and `tarry dead replay` replays the call:")
        targets.is_fixed = True
        client.replay()
        board.watch([DEAD_LETTER_PATH], replays=1)
        _print_summary(targets, board)


class TaskBoard:
    """Shows the calls, which are tasks: as a live table, or with `as_lines` a line per attempt."""

    def __init__(self, client: Client, *, as_lines: bool) -> None:
        self._client = client
        self._as_lines = as_lines
        self._last_shown_number: dict[str, int] = {}
        self._last_attempts: dict[str, AttemptLog] = {}
        self.tasks: dict[str, RetryTask] = {}
        """Each task by the path of its target URL."""

    def watch(self, paths: Iterable[str], replays: int = 0) -> None:
        """Show calls until each has finished and has been replayed at least `replays` times."""
        from rich.live import Live

        from tarry.client.api import FINISHED_STATUSES

        deadline = environment.now() + _TIMEOUT_S
        live = Live(console=console(), auto_refresh=False)
        with nullcontext() if self._as_lines else live:
            while True:
                self._update()
                watched = {path: self.tasks[path] for path in paths}
                if not self._as_lines:
                    live.update(self._table(watched), refresh=True)
                if all(
                    task.status in FINISHED_STATUSES and task.replays >= replays
                    for task in watched.values()
                ):
                    return
                if environment.now() > deadline:
                    raise NotFinished(f"the calls have not finished within {_TIMEOUT_S:g} s")
                environment.blocking_sleep(_POLL_INTERVAL_S, None)

    def _update(self) -> None:
        """Fetch all tasks, and the attempts made since the last update."""
        for task in self._client.tasks():
            path = "/" + task.target_url.split("/", 3)[3]
            self.tasks[path] = task
            last_shown = self._last_shown_number.get(path, 0)
            if task.attempt_number <= last_shown:
                continue
            for step in self._client.explain(task).steps:
                if step.attempt_number > last_shown:
                    self._last_shown_number[path] = step.attempt_number
                    self._last_attempts[path] = step.attempt
                    if self._as_lines:
                        print_text(f"{call_name(path)}: {step.text}")

    def _table(self, watched: Mapping[str, RetryTask]) -> Table:
        now = environment.unix_time()
        rows: list[tuple[object, ...]] = []
        for path, task in watched.items():
            attempt = self._last_attempts.get(path)
            result = "" if attempt is None else attempt_result(attempt)
            next_attempt = time_until(task.next_attempt_at, now)
            rows.append((call_name(path), task.status, task.attempt_number, next_attempt, result))
        return table(("call", "status", "attempts", "next attempt", "last result"), rows)


def call_name(path: str) -> str:
    """Return the name of a call: `order 7` for the path /order/7."""
    return path.strip("/").replace("/", " ")


def _enqueue_calls(client: Client, targets: FlakyTargets) -> None:
    from tarry.core.policy import Policy

    policy = Policy(max_attempts=MAX_ATTEMPTS, initial_delay=0.6, max_delay=4.0, jitter="equal")
    client.put_policy("demo", policy)
    results = client.enqueue_many(
        {"url": targets.url_of(path), "body": {"order": number}, "policy": "demo"}
        for number, path in enumerate(RESPONSES_BY_PATH, 1)
    )
    problems = [result.problem for result in results if result.task is None]
    if problems:
        raise ServiceError(f"the service rejected a call: {problems[0]}")


def _print_summary(targets: FlakyTargets, board: TaskBoard) -> None:
    """Print the number of attempts; raise `NotFinished` unless each call arrived with one key."""
    undelivered = [
        call_name(path) for path in RESPONSES_BY_PATH if board.tasks[path].status != "SUCCEEDED"
    ]
    sent_with_several_keys = [
        call_name(path) for path, keys in targets.idempotency_keys.items() if len(set(keys)) != 1
    ]
    if undelivered or sent_with_several_keys:
        msg = f"not delivered: {undelivered}; sent with more than one key: {sent_with_several_keys}"
        raise NotFinished(msg)
    requests = sum(map(len, targets.idempotency_keys.values()))
    retried = sum(len(keys) > 1 for keys in targets.idempotency_keys.values())
    print_text("")
    print_text(
        f"All {len(RESPONSES_BY_PATH)} calls were delivered, in {requests} attempts: {retried} "
        "were retried, each with one idempotency key."
    )
    print_text("Try it yourself: `tarry serve --dev` in one terminal, `tarry send URL` in another.")


@contextmanager
def _run_service(folder: Path) -> Generator[str]:
    """Run a service in a separate process; yield its address."""
    # All settings are passed as flags, because flags take precedence over TARRY_* variables.
    store = f"sqlite:{folder / 'demo.db'}"
    flags = ["--host", "127.0.0.1", "--port", "0", "--dev", "--store", store]
    flags += ["--set", "require_keys=false", "--set", "bodies=", "--set", "log_level=error"]
    command = [sys.executable, "-m", "tarry", "serve", *flags]
    with (
        (folder / "log").open("w+", encoding="utf-8") as log,
        subprocess.Popen(  # noqa: S603 - runs tarry itself
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder
        ) as process,
    ):
        try:
            assert process.stdout is not None  # noqa: S101 - for the type checker
            ready_line = process.stdout.readline()
            if not ready_line.startswith(_READY_PREFIX):
                log.seek(0)
                raise ServiceUnreachable(f"the service did not start: {ready_line}{log.read()}")
            yield ready_line.removeprefix(_READY_PREFIX).split()[0]
        finally:
            process.terminate()


class FlakyTargets:
    """HTTP servers that send the scripted responses of each path, and then only 200."""

    def __init__(self, responses: Mapping[str, Sequence[str]]) -> None:
        # Imported here, because the help of the commands must not load it.
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        self._responses = responses
        self._lock = threading.Lock()
        self.is_fixed: bool = False
        """If True, every request is answered with 200."""
        self.idempotency_keys: dict[str, list[str]] = {path: [] for path in responses}
        """Idempotency key of each received request, by path."""
        targets = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                response = targets.next_response(self.path, self.headers.get("idempotency-key", ""))
                if response == DROP_CONNECTION:
                    self.send_response(200)
                    self.send_header("content-length", "5")
                    self.end_headers()
                    self.close_connection = True
                    return
                self.send_response(int(response))
                if response == TOO_MANY_REQUESTS:
                    self.send_header("retry-after", str(RETRY_AFTER_S))
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as in the base class
                """Log nothing."""

        self._servers = {
            name: ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            for name in dict.fromkeys(map(_server_name, responses))
        }

    def url_of(self, path: str) -> str:
        """Return the URL of a path on its server."""
        return f"http://127.0.0.1:{self._servers[_server_name(path)].server_port}{path}"

    def next_response(self, path: str, idempotency_key: str) -> str:
        """Record a request, and return its scripted response."""
        with self._lock:
            keys = self.idempotency_keys.setdefault(path, [])
            keys.append(idempotency_key)
            responses = () if self.is_fixed else self._responses.get(path, ())
            return responses[len(keys) - 1] if len(keys) <= len(responses) else "200"

    @contextmanager
    def run(self) -> Generator[Self]:
        """Run each server in a thread of its own during a with block."""
        for server in self._servers.values():
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield self
        finally:
            for server in self._servers.values():
                server.shutdown()
                server.server_close()


def _server_name(path: str) -> str:
    return path.split("/")[1]
