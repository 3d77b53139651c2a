"""The targets of `tarry demo`: HTTP servers on this machine that fail to a plan."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

DROP = "drop"
"""Ends the connection in the middle of its answer."""
BUSY = "429"
"""Comes with a wish: Retry-After."""
ASKED = 1
"""Seconds that a busy target asks for."""

ATTEMPTS = 4
PLANS: dict[str, tuple[str, ...]] = {
    "/order/1": (),
    "/order/2": ("503",),
    "/order/3": ("503", "503"),
    "/order/4": (DROP,),
    "/invoice/5": (BUSY,),
    "/invoice/6": ("500",),
    "/invoice/7": ("502", DROP),
    "/invoice/8": (),
    "/mail/9": ("503", "504", "503"),
    "/mail/10": (),
    "/mail/11": ("500",),
    "/mail/12": ("503",) * ATTEMPTS,
}
"""What the target answers to each call before it answers 200.

Each first part is a host of its own: together, all these failures would open a breaker.
"""
DOOMED = "/mail/12"


class Flaky:
    """Answers each path by its plan, one step for each request, and 200 after the last."""

    def __init__(self, plans: Mapping[str, Sequence[str]]) -> None:
        self._plans = plans
        self._lock = threading.Lock()
        self.is_mended: bool = False
        """Whether all plans are over."""
        self.keys: dict[str, list[str]] = {path: [] for path in plans}
        """The idempotency keys that came, one for each request."""
        flaky = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                step = flaky.answer(self.path, self.headers.get("idempotency-key", ""))
                if step == DROP:
                    self.send_response(200)
                    self.send_header("content-length", "5")
                    self.end_headers()
                    self.close_connection = True
                    return
                self.send_response(int(step))
                if step == BUSY:
                    self.send_header("retry-after", str(ASKED))
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
                """Say nothing."""

        self._servers = {
            host: ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            for host in dict.fromkeys(map(_host_of, plans))
        }

    def url_of(self, path: str) -> str:
        """Return where a call goes."""
        return f"http://127.0.0.1:{self._servers[_host_of(path)].server_port}{path}"

    def answer(self, path: str, key: str) -> str:
        """Return the next step of a path's plan."""
        with self._lock:
            seen = self.keys.setdefault(path, [])
            seen.append(key)
            plan = () if self.is_mended else self._plans.get(path, ())
            return plan[len(seen) - 1] if len(seen) <= len(plan) else "200"

    def start(self) -> None:
        """Serve, each host in a thread."""
        for server in self._servers.values():
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop."""
        for server in self._servers.values():
            server.shutdown()
            server.server_close()


def _host_of(path: str) -> str:
    return path.split("/")[1]


@contextmanager
def flaky_targets(plans: Mapping[str, Sequence[str]]) -> Generator[Flaky]:
    """Run targets for the length of a block."""
    flaky = Flaky(plans)
    flaky.start()
    try:
        yield flaky
    finally:
        flaky.close()
