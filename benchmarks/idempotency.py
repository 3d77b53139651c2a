"""The cost that the idempotency middleware adds to a Starlette POST with a new key.

    python -m benchmarks.idempotency

Two servers run in separate processes: "guarded" has the middleware, "plain" does not. A client with
a persistent connection to each sends them requests in turns, in random order. The limit: with
httpx, the median request to the guarded server takes at most 1.10 times as long as one to the plain
server, on h11 and, if they are installed, on httptools with uvloop. Three other figures are printed
for information: the same measurement with http.client, which does less work itself, the processor
time of the servers, and the processor time of the applications without a server.

Needs starlette, uvicorn and httpx.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
from contextlib import ExitStack
from http.client import HTTPConnection
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Route

from tarry.idempotency import IdempotencyMiddleware

MAX_TIME_RATIO = 1.10
REQUESTS, WARM_UP_REQUESTS = 3000, 500
"""Requests by each client to each server; together they fit into the memory store."""
NAMES = ("plain", "guarded")
LOOP_BY_HTTP_PARSER = {"h11": "asyncio", "httptools": "uvloop"}
"""The HTTP parsers of uvicorn, and the event loop that is used with each."""
BODY = b'{"amount": 100, "currency": "EUR", "order": "2f6c1c4e"}'
HEADERS = {
    "user-agent": "benchmark",
    "accept": "*/*",
    "authorization": "Bearer 0123456789abcdef0123456789abcdef",
    "content-type": "application/json",
}
ASGI_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
ASGI_HEADERS += [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % len(BODY))]
KEY_COUNTER = count()


async def pay(request):
    """Read JSON, and respond with JSON."""
    order = await request.json()
    return JSONResponse({"paid": order["amount"]}, 201)


def build_app(name):
    """Return the application; the middleware has its defaults."""
    middleware = [Middleware(IdempotencyMiddleware)] if name == "guarded" else []
    return Starlette(routes=[Route("/payments", pay, methods=["POST"])], middleware=middleware)


def plain():
    return build_app("plain")


def guarded():
    return build_app("guarded")


def next_key() -> str:
    return f'"8e03978e-40d5-43dd-bc93-{next(KEY_COUNTER):012d}"'


class Server:
    """uvicorn in a separate process, and two clients with persistent connections to it."""

    def __init__(self, name: str, http: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        factory = f"benchmarks.idempotency:{name}"
        command = [sys.executable, "-m", "uvicorn", "--factory", factory, "--port", str(port)]
        options = ["--http", http, "--loop", LOOP_BY_HTTP_PARSER[http], "--log-level", "critical"]
        self.process = subprocess.Popen([*command, *options])
        self._wait_for(port)
        self.http_client = HTTPConnection("127.0.0.1", port)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False)

    def _wait_for(self, port: int) -> None:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=10).close()
            except ConnectionRefusedError:
                sleep(0.05)
            else:
                return
        self.close()
        raise RuntimeError("the server does not listen after 10 s")

    def post(self) -> int:
        """Send one request with httpx."""
        headers = {**HEADERS, "idempotency-key": next_key()}
        return self.client.post("/payments", content=BODY, headers=headers).status_code

    def post_with_http_client(self) -> int:
        """Send one request with http.client."""
        headers = {**HEADERS, "idempotency-key": next_key()}
        self.http_client.request("POST", "/payments", BODY, headers)
        response = self.http_client.getresponse()
        response.read()
        return response.status

    def processor_time(self) -> float:
        """Return the processor seconds of the server, or 0 if the system has no /proc."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def measure_servers(http: str) -> float:
    """Measure and print requests to both servers; return the ratio of the times with httpx."""
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name in NAMES:
            servers[name] = Server(name, http)
            stack.callback(servers[name].close)
        httpx_times = measure_requests(servers, Server.post)
        before = {name: servers[name].processor_time() for name in NAMES}
        http_client_times = measure_requests(servers, Server.post_with_http_client)
        cpu_times = {
            name: (servers[name].processor_time() - before[name]) / (WARM_UP_REQUESTS + REQUESTS)
            for name in NAMES
        }
    ratio = print_ratio(f"httpx, {http}", httpx_times)
    print_ratio(f"http.client, {http}", http_client_times)
    if cpu_times["plain"]:
        print_ratio(f"server CPU time, {http}", cpu_times)
    return ratio


def measure_requests(servers: dict[str, Server], post) -> dict[str, float]:
    """Return the median seconds of a request to each server."""
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(WARM_UP_REQUESTS + REQUESTS):
        for name in random.sample(NAMES, len(NAMES)):
            started = perf_counter()
            status = post(servers[name])
            times[name].append(perf_counter() - started)
            assert status == 201
    return {name: median(times[name][WARM_UP_REQUESTS:]) for name in NAMES}


async def call_directly(app, requests: int) -> float:
    """Return the processor seconds of one request to an application without a server."""
    body = {"type": "http.request", "body": BODY, "more_body": False}
    statuses = []

    async def receive():
        return body

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    started = process_time()
    for _ in range(requests):
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/payments",
            "query_string": b"",
            "headers": [*ASGI_HEADERS, (b"idempotency-key", next_key().encode())],
        }
        await app(scope, receive, send)
    seconds = process_time() - started
    assert [201] * requests == statuses
    return seconds / requests


def measure_in_process() -> None:
    """Measure and print direct calls of the applications, without a server."""
    best = dict.fromkeys(NAMES, float("inf"))
    with asyncio.Runner() as runner:
        for _ in range(100):
            for name in random.sample(NAMES, len(NAMES)):
                best[name] = min(best[name], runner.run(call_directly(build_app(name), 200)))
    print_ratio("best call in process", best)


def print_ratio(title: str, seconds: dict[str, float]) -> float:
    """Print the seconds of both applications; return the ratio of guarded to plain."""
    plain, guarded = (seconds[name] * 1e6 for name in NAMES)
    figures = f"plain{plain:7.1f} us, guarded{guarded:7.1f} us, {guarded - plain:+6.1f} us"
    print(f"{title:25}{figures},{guarded / plain:6.3f} x plain")
    return guarded / plain


def main() -> int:
    """Measure, print, and compare with the limit."""
    parsers = [
        http for http, loop in LOOP_BY_HTTP_PARSER.items() if find_spec(http) and find_spec(loop)
    ]
    ratios = {http: measure_servers(http) for http in parsers}
    measure_in_process()
    for http, ratio in ratios.items():
        status = "pass" if ratio <= MAX_TIME_RATIO else "MISS"
        print(f"{status}: {http} {ratio:.3f} <= {MAX_TIME_RATIO}")
    return max(ratios.values()) > MAX_TIME_RATIO


if __name__ == "__main__":
    sys.exit(main())
