"""A real HTTP server whose failures the URL of a request selects.

`POST /anything?plan=503,drop,200` responds to the first request of a run with 503, closes the
connection without a response to the second, and responds with 200 to the third and all later ones.
`run=` names the run; its requests are recorded. Steps of a plan:

* `stream` sends half of a response, and the other half when `may_continue` is set
* `late` responds with 200 when `may_continue` is set
* `hang` sends nothing; `deaf` does not read the body either
* `early` responds with 503 without reading the body
* `long` responds with 503 and a long text; `stall` sends half of that text
* `chunks` responds with 503 in chunks, `many` in long chunks

Response headers follow a colon: `503:retry-after=7|ratelimit-policy=x`, with `~` for a comma. The
server can be used as a proxy: it responds to `http:` requests by their plan, and to CONNECT with
the status at the start of the host name.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

LONG_BODY_REPEATS = 100_000
CONTINUE_TIMEOUT_S = 30.0
"""Limit of the wait for `may_continue`."""


class RecordedRequest(NamedTuple):
    """A request that the server has received."""

    method: str
    headers: dict[str, str]
    body: bytes


class FlakyServer:
    """The server; `received_requests` has the requests of each run."""

    def __init__(self) -> None:  # noqa: C901 - contains the handler class
        self.received_requests: dict[str, list[RecordedRequest]] = defaultdict(list)
        self.connections = 0
        """Number of open connections."""
        self.total_connections = 0
        """Number of connections so far."""
        self.stalled_reads = 0
        """How often a client waited for the second half of a response until the timeout."""
        self.may_continue = threading.Event()
        self.lock = threading.Lock()
        flaky = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else the second packet of a response waits 40 ms

            def setup(self) -> None:
                with flaky.lock:
                    flaky.connections += 1
                    flaky.total_connections += 1
                super().setup()

            def finish(self) -> None:
                super().finish()
                with flaky.lock:
                    flaky.connections -= 1

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except ConnectionError:
                    self.close_connection = True

            def read_body(self) -> bytes:
                if self.headers.get("transfer-encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("content-length", 0)))
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            def respond(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                with flaky.lock:
                    received = flaky.received_requests[query.get("run", [""])[0]]
                    received.append(RecordedRequest(self.command, dict(self.headers.items()), b""))
                    number = len(received)
                plan = query.get("plan", ["200"])[0].split(",")
                step = plan[min(number, len(plan)) - 1]
                if step == "early":
                    self.close_connection = True
                    self.send_error(503)
                    return
                if step == "deaf":
                    flaky.may_continue.wait(CONTINUE_TIMEOUT_S)
                    self.close_connection = True
                    return
                received[number - 1] = received[number - 1]._replace(body=self.read_body())
                if step == "drop":
                    self.close_connection = True
                    return
                if step == "hang":
                    flaky.may_continue.wait(CONTINUE_TIMEOUT_S)
                    self.close_connection = True
                    return
                if step == "late":
                    step = "200" if flaky.may_continue.wait(CONTINUE_TIMEOUT_S) else "500"
                if step == "stream":
                    self.respond_in_halves(200)
                    return
                if step == "stall":
                    self.respond_in_halves(503)
                    return
                if step in ("chunks", "many"):
                    self.respond_in_chunks(number, LONG_BODY_REPEATS if step == "many" else 1)
                    return
                status, _, header_list = step.replace("long", "503").partition(":")
                text = b"" if self.command == "HEAD" else f"answer {number}".encode()
                text *= LONG_BODY_REPEATS if step.startswith("long") else 1
                self.send_response(int(status))
                self.send_header("content-length", str(len(text)))
                for header in header_list.split("|") if header_list else ():
                    name, _, value = header.partition("=")
                    self.send_header(name, value.replace("~", ","))
                self.end_headers()
                self.wfile.write(text)

            def respond_in_halves(self, status: int) -> None:
                self.send_response(status)
                self.send_header("content-length", "10")
                self.end_headers()
                self.wfile.write(b"first")
                if flaky.may_continue.wait(CONTINUE_TIMEOUT_S):
                    self.wfile.write(b"later")
                    return
                flaky.stalled_reads += 1
                self.wfile.write(b"never")

            def respond_in_chunks(self, number: int, times: int) -> None:
                self.send_response(503)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for chunk in (b"answer" * times, b" %d" % number):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                self.wfile.write(b"0\r\n\r\n")

            def do_CONNECT(self) -> None:
                host = self.path.partition(":")[0]
                with flaky.lock:
                    flaky.received_requests[host].append(RecordedRequest(self.command, {}, b""))
                self.send_response(int(host.partition(".")[0]))
                self.send_header("content-length", "0")
                self.end_headers()

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = respond  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        """Start a thread that serves."""
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def flaky_server() -> Iterator[FlakyServer]:
    """Run a server for the duration of a block."""
    flaky = FlakyServer()
    flaky.start()
    try:
        yield flaky
    finally:
        flaky.stop()
