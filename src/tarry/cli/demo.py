"""`tarry demo`: run a service and failing targets, and show how twelve calls are retried."""

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
from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence
    from typing import Self

    from rich.table import Table

    from tarry.client import Client
    from tarry.wire.tasks import AttemptLog, RetryTask

_WATCH_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.1
_READY_PREFIX = "tarry serves "
"""`tarry serve` prints this text and its address when it accepts requests."""

DROP_CONNECTION = "drop"
"""Scripted response: close the connection before the body that Content-Length announces is sent."""
TOO_MANY_REQUESTS = "429"
"""Scripted response: status 429 with a Retry-After header."""
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
"""Scripted failures of each path, in order; later requests to the path are answered with 200.

The first segment of a path selects one of three servers, because so many failures of a single
server would open its breaker.
"""
DEAD_LETTER_PATH = "/mail/12"


def demo() -> None:
    """Start a service and failing targets, add twelve calls, and show how they are retried.

    One call becomes a dead letter, which the demo explains and replays. The demo takes about ten
    seconds, needs no network and leaves no files.
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
        client.replay(all=True)
        board.watch([DEAD_LETTER_PATH], min_replays=1)
        _print_summary(targets, board)


class TaskBoard:
    """Shows calls (tasks of the service): a live table or, with `as_lines`, a line per attempt."""

    def __init__(self, client: Client, *, as_lines: bool) -> None:
        self._client = client
        self._as_lines = as_lines
        self._last_attempt_by_path: dict[str, AttemptLog] = {}
        self.tasks: dict[str, RetryTask] = {}
        """Each task by the path of its target URL."""

    def watch(self, paths: Iterable[str], min_replays: int = 0) -> None:
        """Show calls until each has finished and has been replayed at least `min_replays` times."""
        from rich.live import Live

        from tarry.client.api import FINISHED_STATUSES

        deadline = effects.now() + _WATCH_TIMEOUT_S
        live = Live(console=console(), auto_refresh=False)
        with nullcontext() if self._as_lines else live:
            while True:
                self._update()
                watched = {path: self.tasks[path] for path in paths}
                if not self._as_lines:
                    live.update(self._table(watched), refresh=True)
                if all(
                    task.status in FINISHED_STATUSES and task.replays >= min_replays
                    for task in watched.values()
                ):
                    return
                if effects.now() > deadline:
                    raise NotFinished(f"the calls have not finished within {_WATCH_TIMEOUT_S:g} s")
                effects.blocking_sleep(_POLL_INTERVAL_S, None)

    def _update(self) -> None:
        """Fetch all tasks, and the attempts made since the last update."""
        for task in self._client.tasks():
            path = "/" + task.target_url.split("/", 3)[3]
            self.tasks[path] = task
            last_attempt = self._last_attempt_by_path.get(path)
            last_number = 0 if last_attempt is None else last_attempt.attempt_number
            if task.attempt_number <= last_number:  # no new attempt
                continue
            for step in self._client.explain(task).steps:
                if step.attempt_number > last_number:
                    self._last_attempt_by_path[path] = step.attempt
                    if self._as_lines:
                        print_text(f"{call_name(path)}: {step.text}")

    def _table(self, watched: Mapping[str, RetryTask]) -> Table:
        now = effects.unix_time()
        rows: list[tuple[object, ...]] = []
        for path, task in watched.items():
            attempt = self._last_attempt_by_path.get(path)
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
    """Print a summary; raise `NotFinished` if a call failed or had several idempotency keys."""
    undelivered = [
        call_name(path) for path in RESPONSES_BY_PATH if board.tasks[path].status != "SUCCEEDED"
    ]
    sent_with_several_keys = [
        call_name(path) for path, keys in targets.idempotency_keys.items() if len(set(keys)) != 1
    ]
    if undelivered or sent_with_several_keys:
        msg = f"not delivered: {undelivered}; sent with several keys: {sent_with_several_keys}"
        raise NotFinished(msg)
    attempt_count = sum(map(len, targets.idempotency_keys.values()))
    retried_count = sum(len(keys) > 1 for keys in targets.idempotency_keys.values())
    print_text("")
    print_text(
        f"All {len(RESPONSES_BY_PATH)} calls were delivered, in {attempt_count} attempts: "
        f"{retried_count} were retried, each with one idempotency key."
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
        # Imported here, so that `tarry --help` does not load the HTTP server.
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        self._responses = responses
        self._lock = threading.Lock()
        self.is_fixed: bool = False
        """If True, every request is answered with 200."""
        self.idempotency_keys: dict[str, list[str]] = {path: [] for path in responses}
        """Idempotency keys of the received requests, in order, by path."""
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
        """Record the key of a request, and return the scripted response."""
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
