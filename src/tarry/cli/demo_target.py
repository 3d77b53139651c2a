"""The targets of `tarry demo`: local HTTP servers that fail in a scripted way."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

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


class FlakyTargets:
    """HTTP servers that send the scripted responses of each path, and then only 200."""

    def __init__(self, responses: Mapping[str, Sequence[str]]) -> None:
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

    def start(self) -> None:
        """Start a thread for each server."""
        for server in self._servers.values():
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop the servers."""
        for server in self._servers.values():
            server.shutdown()
            server.server_close()


def _server_name(path: str) -> str:
    return path.split("/")[1]


@contextmanager
def run_flaky_targets(responses: Mapping[str, Sequence[str]]) -> Generator[FlakyTargets]:
    """Run the targets during a with block."""
    targets = FlakyTargets(responses)
    targets.start()
    try:
        yield targets
    finally:
        targets.close()
