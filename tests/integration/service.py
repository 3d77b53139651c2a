"""A real service in its own process, and a real HTTP target that records its requests."""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.ports import free_port

STARTUP_TIMEOUT_S = 60.0
TERMINAL_STATUSES = {"SUCCEEDED", "EXHAUSTED", "CANCELLED"}


class Response(NamedTuple):
    """A response of the service."""

    status: int
    body: Any
    """The decoded JSON, or the text of another content type."""
    headers: dict[str, str]
    """Headers with names in lower case."""


class Target:
    """An HTTP server that records requests.

    `respond(path, number)` returns the status of the `number`th request for a path.
    """

    def __init__(
        self, respond: Callable[[str, int], int] = lambda _path, _number: 200, port: int = 0
    ) -> None:
        self.respond: Callable[[str, int], int] = respond
        self.received_requests: dict[str, list[dict[str, str]]] = defaultdict(list)
        """The headers of the requests, by path."""
        self.bodies: dict[str, list[bytes]] = defaultdict(list)
        self.methods: dict[str, list[str]] = defaultdict(list)
        self._lock = threading.Lock()
        target = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                with target._lock:
                    target.bodies[self.path].append(body)
                    target.methods[self.path].append(self.command)
                    target.received_requests[self.path].append(dict(self.headers))
                    number = len(target.received_requests[self.path])
                self.send_response(target.respond(self.path, number))
                self.send_header("content-length", "0")
                self.end_headers()

            do_GET = do_PUT = do_POST  # noqa: N815 - named by BaseHTTPRequestHandler

            def log_message(self, *_args: object) -> None:
                """Log nothing."""

        class Server(ThreadingHTTPServer):
            request_queue_size = 256
            daemon_threads = True

            def handle_error(self, *_args: object) -> None:
                """Ignore errors of clients that were killed."""

        self._server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


class Service:
    """A `tarry serve` process; its store is kept when the process ends.

    The default store is a SQLite file. `command_prefix` is put before the command. With `ca_file`,
    requests are sent over TLS.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        dev: bool = True,
        command_prefix: tuple[str, ...] = (),
        store: str | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self.folder = folder
        self.ca_file = ca_file
        self._store = store or f"sqlite:{folder / 'tarry.db'}"
        self.port = free_port()
        self.flags: tuple[str, ...] = ("--dev", *flags) if dev else flags
        """The flags of the next start."""
        self._command_prefix = command_prefix
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running process."""
        assert self._process is not None
        return self._process

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the service and wait until it is ready."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start the process."""
        command = [*self._command_prefix, sys.executable, "-m", "tarry", "serve"]
        command += ["--port", str(self.port)]
        command += ["--store", self._store, *self.flags]
        with (self.folder / "log").open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)

    def wait_until_ready(self) -> None:
        """Wait until the process can serve requests; with `--workers`, all its processes."""
        deadline = time.monotonic() + STARTUP_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError((self.folder / "log").read_text())
            try:
                if self.request("GET", "/readyz")[0] == 200 and self._are_all_ready():
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError((self.folder / "log").read_text())

    def _are_all_ready(self) -> bool:
        # A supervisor prints the address when all its processes are ready.
        log = (self.folder / "log").read_bytes()[self._log_start :]
        return "--workers" not in self.flags or b"tarry serves " in log

    def kill(self) -> None:
        """Kill the process, as in a power failure."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """Send SIGTERM, wait for the process and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Response:
        """Send a request; a body of bytes is sent unchanged, any other body as JSON."""
        connection = self._connect()
        try:
            encoded = body if body is None or isinstance(body, bytes) else json.dumps(body)
            defaults = {"content-type": "application/json"} if body is not None else {}
            connection.request(method, path, encoded, defaults | (headers or {}))
            response = connection.getresponse()
            raw = response.read()
            response_headers = {name.lower(): value for name, value in response.getheaders()}
            is_json = "json" in response_headers.get("content-type", "")
            return Response(
                response.status, json.loads(raw) if is_json else raw.decode(), response_headers
            )
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self.ca_file is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        context = ssl.create_default_context(cafile=self.ca_file)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=context)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Send a request; return the status and the decoded body."""
        return self.send(method, path, body, headers)[:2]

    def post(self, **fields: Any) -> dict[str, Any]:
        """Create a task; return its JSON."""
        status, task = self.request("POST", "/retry-tasks", fields)
        assert 201 == status, task
        created: dict[str, Any] = task
        return created

    def task(self, task_id: str) -> dict[str, Any]:
        """Return one task."""
        task: dict[str, Any] = self.request("GET", f"/retry-tasks/{task_id}")[1]
        return task

    def attempts(self, task_id: str) -> list[dict[str, Any]]:
        """Return the attempts of a task."""
        attempts: list[dict[str, Any]]
        attempts = self.request("GET", f"/retry-tasks/{task_id}/attempts")[1]["items"]
        return attempts

    def wait_until_finished(self, task_id: str) -> dict[str, Any]:
        """Wait until a task is finished; return it."""
        self.wait_for(lambda: self.task(task_id)["status"] in TERMINAL_STATUSES)
        return self.task(task_id)

    def all_tasks(self) -> list[dict[str, Any]]:
        """Return the tasks of all pages."""
        tasks, cursor = [], ""
        while True:
            page = self.request("GET", f"/retry-tasks?limit=500{cursor}")[1]
            tasks += page["items"]
            if page["nextCursor"] is None:
                return tasks
            cursor = f"&cursor={page['nextCursor']}"

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition is true, or until the timeout of the test."""
        while not condition():
            time.sleep(0.05)


@contextmanager
def service(
    folder: Path,
    *flags: str,
    dev: bool = True,
    command_prefix: tuple[str, ...] = (),
    store: str | None = None,
    ca_file: Path | None = None,
) -> Iterator[Service]:
    """Run a service for a test."""
    running_service = Service(
        folder, *flags, dev=dev, command_prefix=command_prefix, store=store, ca_file=ca_file
    )
    running_service.launch()
    try:
        running_service.wait_until_ready()
        yield running_service
    finally:
        if running_service.process.poll() is None:
            os.kill(running_service.process.pid, signal.SIGCONT)
            running_service.kill()


@contextmanager
def target(
    respond: Callable[[str, int], int] = lambda _path, _number: 200, port: int = 0
) -> Iterator[Target]:
    """Run a target for a test."""
    started_target = Target(respond, port)
    try:
        yield started_target
    finally:
        started_target.close()
