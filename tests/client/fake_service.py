"""A fake service: a real HTTP server with a small part of the API and scripted faults.

Each request takes the next of `faults`: "drop" processes the request and closes the connection
without a response, "cut" sends half of the response, "503" and "429" send that status with a
Retry-After of 7 and do not process the request. An empty string means no fault. `responses` has
scripted responses by method and path.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

StatusAndContent = tuple[int, Any]


class ReceivedRequest(NamedTuple):
    """A request as the service received it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The decoded JSON body."""
        return json.loads(self.body)


def task_json(number: int, **fields: Any) -> dict[str, Any]:
    """Return a task as JSON of the API."""
    return {
        "taskId": f"00000000-0000-7000-8000-{number:012}",
        "status": "PENDING",
        "reason": None,
        "idempotencyKey": f"key-{number}",
        "targetUrl": "https://example.com/hook",
        "method": "POST",
        "headers": {},
        "policyId": "default",
        "policyVersion": None,
        "policy": None,
        "lane": "https://example.com:443",
        "attemptNumber": 0,
        "nextAttemptAt": 1_800_000_000_000,
        "createdAt": 1_800_000_000_000,
        "finishedAt": None,
        "bodySize": 0,
        "bodyRef": None,
        "callbackUrl": None,
        "callbackPolicyId": None,
        "cancelling": False,
        "replays": 0,
        "version": 1,
        **fields,
    }


def problem_response(status: int, title: str, detail: str, **extensions: Any) -> StatusAndContent:
    """Return a problem document with its status."""
    return status, {"title": title, "status": status, "detail": detail, **extensions}


class FakeService:
    """The server, its tasks, the requests it received, and its scripted behaviour."""

    def __init__(self) -> None:
        self.requests: list[ReceivedRequest] = []
        self.faults: deque[str] = deque()
        self.tasks: dict[str, dict[str, Any]] = {}
        """By idempotency key."""
        self.responses: dict[
            str, Callable[[ReceivedRequest], StatusAndContent] | StatusAndContent
        ] = {}
        """By method and path."""
        self.retry_after: str | None = None
        """Retry-After header of all responses; None sends 7, and only with 429 and 503."""
        self.streams: deque[bytes] = deque()
        """Contents of the next event streams; the connection is closed after each."""
        self.lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_request(self) -> None:
                length = int(self.headers.get("content-length", 0))
                parts = urlsplit(self.path)
                headers = {name.lower(): value for name, value in self.headers.items()}
                query = dict(parse_qsl(parts.query))
                request = ReceivedRequest(
                    self.command, parts.path, query, headers, self.rfile.read(length)
                )
                with service.lock:
                    service.requests.append(request)
                    fault = service.faults.popleft() if service.faults else ""
                    if fault in {"503", "429"}:
                        status, result = problem_response(int(fault), "Not now", "Later.")
                    elif request.path == "/events" and service.streams:
                        self.stream(service.streams.popleft())
                        return
                    else:
                        status, result = service.respond(request)
                if fault == "drop":
                    self.close_connection = True
                    return
                content = result if isinstance(result, bytes) else json.dumps(result).encode()
                self.send_response(status)
                if status != 204:
                    kind = "application/json" if status < 400 else "application/problem+json"
                    self.send_header("content-type", kind)
                    self.send_header("content-length", str(len(content)))
                if status in {429, 503} or service.retry_after is not None:
                    self.send_header("retry-after", service.retry_after or "7")
                self.end_headers()
                if fault == "cut":
                    content = content[: len(content) // 2]
                    self.close_connection = True
                self.wfile.write(b"" if status == 204 else content)

            def stream(self, content: bytes) -> None:
                """Send a chunked response that is never completed."""
                self.send_response(200)
                self.send_header("content-type", "text/event-stream; charset=utf-8")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
                self.close_connection = True  # before the last chunk

            do_GET = do_POST = do_PUT = do_DELETE = handle_request  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def respond(self, request: ReceivedRequest) -> StatusAndContent:
        """Process a request, and return its response."""
        scripted = self.responses.get(f"{request.method} {request.path}")
        if scripted is not None:
            return scripted(request) if callable(scripted) else scripted
        if (request.method, request.path) == ("POST", "/retry-tasks"):
            return self.add_task(request.json)
        if (request.method, request.path) == ("POST", "/retry-tasks/batch"):
            added = [self.add_task(task) for task in request.json["tasks"]]
            return 200, {"results": [{"status": status, "task": task} for status, task in added]}
        for task in self.tasks.values():
            if request.path == f"/retry-tasks/{task['taskId']}" and request.method == "GET":
                return 200, task
        return problem_response(404, "Not found", "There is no such task.")

    def add_task(self, fields: dict[str, Any]) -> StatusAndContent:
        """Add a task, or return the task that already has its key."""
        key = fields["idempotencyKey"]
        existing = self.tasks.get(key)
        if existing is not None:
            return 200, existing
        url = fields["targetUrl"]
        self.tasks[key] = task_json(len(self.tasks) + 1, idempotencyKey=key, targetUrl=url)
        return 201, self.tasks[key]

    def start(self) -> None:
        """Serve in a thread."""
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def run_fake_service() -> Iterator[FakeService]:
    """Run a fake service during a with block."""
    service = FakeService()
    service.start()
    try:
        yield service
    finally:
        service.stop()
