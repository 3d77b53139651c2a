"""A real HTTP server that plays the service's API, and loses answers on command.

`faults` are used up in order, one for each request: "drop" does what was asked and closes the
connection without an answer, "cut" sends half of it, "503" and "429" answer that with a
Retry-After of 7 and do nothing. `answers` has what a path is answered with, beside tasks.
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

Answered = tuple[int, Any]


class Seen(NamedTuple):
    """One request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, read."""
        return json.loads(self.body)


def task_of(number: int, **fields: Any) -> dict[str, Any]:
    """A task as the service tells it."""
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
        "cancelling": False,
        "replays": 0,
        "version": 1,
        **fields,
    }


def problem(status: int, title: str, detail: str, **more: Any) -> Answered:
    """A refusal as the service tells it."""
    return status, {"title": title, "status": status, "detail": detail, **more}


class Played:
    """The service: the tasks that it took, what it has seen, and what it is to do."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.faults: deque[str] = deque()
        self.tasks: dict[str, dict[str, Any]] = {}
        """By idempotency key."""
        self.answers: dict[str, Callable[[Seen], Answered] | Answered] = {}
        """By method and path."""
        self.streams: deque[bytes] = deque()
        """What the next readers of events get before their connection ends."""
        self.lock = threading.Lock()
        played = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def answer(self) -> None:
                length = int(self.headers.get("content-length", 0))
                parts = urlsplit(self.path)
                headers = {name.lower(): value for name, value in self.headers.items()}
                query = dict(parse_qsl(parts.query))
                seen = Seen(self.command, parts.path, query, headers, self.rfile.read(length))
                with played.lock:
                    played.seen.append(seen)
                    fault = played.faults.popleft() if played.faults else ""
                    if fault in {"503", "429"}:
                        status, told = problem(int(fault), "Not now", "Later.")
                    elif seen.path == "/events" and played.streams:
                        self.stream(played.streams.popleft())
                        return
                    else:
                        status, told = played.answer(seen)
                if fault == "drop":
                    self.close_connection = True
                    return
                content = told if isinstance(told, bytes) else json.dumps(told).encode()
                self.send_response(status)
                if status != 204:
                    kind = "application/json" if status < 400 else "application/problem+json"
                    self.send_header("content-type", kind)
                    self.send_header("content-length", str(len(content)))
                if status in {429, 503}:
                    self.send_header("retry-after", "7")
                self.end_headers()
                if fault == "cut":
                    content = content[: len(content) // 2]
                    self.close_connection = True
                self.wfile.write(b"" if status == 204 else content)

            def stream(self, content: bytes) -> None:
                """Send a part of an endless answer."""
                self.send_response(200)
                self.send_header("content-type", "text/event-stream; charset=utf-8")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
                self.close_connection = True  # in the midst of it

            do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, seen: Seen) -> Answered:
        """Do what is asked for."""
        found = self.answers.get(f"{seen.method} {seen.path}")
        if found is not None:
            return found(seen) if callable(found) else found
        if (seen.method, seen.path) == ("POST", "/retry-tasks"):
            return self.add(seen.json)
        if (seen.method, seen.path) == ("POST", "/retry-tasks/batch"):
            verdicts = [self.add(task) for task in seen.json["tasks"]]
            return 200, {"results": [{"status": status, "task": task} for status, task in verdicts]}
        for task in self.tasks.values():
            if seen.path == f"/retry-tasks/{task['taskId']}" and seen.method == "GET":
                return 200, task
        return problem(404, "Not found", "There is no such task.")

    def add(self, asked: dict[str, Any]) -> Answered:
        """Take a task in; the same key is the same task."""
        key = asked["idempotencyKey"]
        known = self.tasks.get(key)
        if known is not None:
            return 200, known
        url = asked["targetUrl"]
        self.tasks[key] = task_of(len(self.tasks) + 1, idempotencyKey=key, targetUrl=url)
        return 201, self.tasks[key]

    def start(self) -> None:
        """Serve in a thread."""
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def playing() -> Iterator[Played]:
    """Run one for the length of a block."""
    played = Played()
    played.start()
    try:
        yield played
    finally:
        played.stop()
