"""The cost that the idempotency middleware adds to a Starlette POST with a new key.

    python -m benchmarks.idempotency

Two servers, plain and guarded, each in a process of its own, and a client with a connection to each
that it keeps: one request to the one, one to the other, in random order. The verdict: the median
request to the guarded server, as a user of httpx sees it, is at most 1.10 times that to the plain
one, on h11 and, where they are installed, on httptools and uvloop. For information: the same as
http.client sees it, which does less itself, the servers' processor time, and that of the
applications without a server. Needs starlette, uvicorn and httpx.
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

MOST_ADDED = 1.10
REQUESTS, WARM_UP = 3000, 500
"""By each client to each server; together fewer than the memory store has room for."""
NAMES = ("plain", "guarded")
KINDS = {"h11": "asyncio", "httptools": "uvloop"}
"""What uvicorn reads HTTP with, and the loop that goes with it."""
BODY = b'{"amount": 100, "currency": "EUR", "order": "2f6c1c4e"}'
HEADERS = {
    "user-agent": "benchmark",
    "accept": "*/*",
    "authorization": "Bearer 0123456789abcdef0123456789abcdef",
    "content-type": "application/json",
}
FIELDS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
FIELDS += [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % len(BODY))]
NUMBERS = count()


async def pay(request):
    """Read JSON, answer with JSON."""
    order = await request.json()
    return JSONResponse({"paid": order["amount"]}, 201)


def make(name):
    """Return the application; the middleware has its defaults."""
    middleware = [Middleware(IdempotencyMiddleware)] if name == "guarded" else []
    return Starlette(routes=[Route("/payments", pay, methods=["POST"])], middleware=middleware)


def plain():
    return make("plain")


def guarded():
    return make("guarded")


def fresh_key() -> str:
    return f'"8e03978e-40d5-43dd-bc93-{next(NUMBERS):012d}"'


class Server:
    """uvicorn in a separate process, and two clients with persistent connections to it."""

    def __init__(self, name: str, http: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        factory = f"benchmarks.idempotency:{name}"
        command = [sys.executable, "-m", "uvicorn", "--factory", factory, "--port", str(port)]
        options = ["--http", http, "--loop", KINDS[http], "--log-level", "critical"]
        self.process = subprocess.Popen([*command, *options])
        self._wait_for(port)
        self.plain_client = HTTPConnection("127.0.0.1", port)
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
        headers = {**HEADERS, "idempotency-key": fresh_key()}
        return self.client.post("/payments", content=BODY, headers=headers).status_code

    def post_plainly(self) -> int:
        """Send one request with http.client."""
        headers = {**HEADERS, "idempotency-key": fresh_key()}
        self.plain_client.request("POST", "/payments", BODY, headers)
        response = self.plain_client.getresponse()
        response.read()
        return response.status

    def processor_time(self) -> float:
        """Return the seconds that the server has worked, or 0 where the system does not tell."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def served(http: str) -> float:
    """Measure and print requests to servers, and return the ratio that a user of httpx sees."""
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name in NAMES:
            servers[name] = Server(name, http)
            stack.callback(servers[name].close)
        seen = measure_requests(servers, Server.post)
        before = {name: servers[name].processor_time() for name in NAMES}
        seen_plainly = measure_requests(servers, Server.post_plainly)
        worked = {
            name: (servers[name].processor_time() - before[name]) / (WARM_UP + REQUESTS)
            for name in NAMES
        }
    ratio = show(f"httpx, {http}", seen)
    show(f"http.client, {http}", seen_plainly)
    if worked["plain"]:
        show(f"server's work, {http}", worked)
    return ratio


def measure_requests(servers: dict[str, Server], post) -> dict[str, float]:
    """Return the median seconds of a request to each server."""
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(WARM_UP + REQUESTS):
        for name in random.sample(NAMES, len(NAMES)):
            begun = perf_counter()
            status = post(servers[name])
            times[name].append(perf_counter() - begun)
            assert status == 201
    return {name: median(times[name][WARM_UP:]) for name in NAMES}


async def direct(app, requests: int) -> float:
    """Return the processor seconds of one request to an application without a server."""
    body = {"type": "http.request", "body": BODY, "more_body": False}
    statuses = []

    async def receive():
        return body

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    begun = process_time()
    for _ in range(requests):
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/payments",
            "query_string": b"",
            "headers": [*FIELDS, (b"idempotency-key", fresh_key().encode())],
        }
        await app(scope, receive, send)
    taken = process_time() - begun
    assert [201] * requests == statuses
    return taken / requests


def in_process() -> None:
    """Measure and print calls of the applications."""
    best = dict.fromkeys(NAMES, float("inf"))
    with asyncio.Runner() as runner:
        for _ in range(100):
            for name in random.sample(NAMES, len(NAMES)):
                best[name] = min(best[name], runner.run(direct(make(name), 200)))
    show("best call in process", best)


def show(what: str, seconds: dict[str, float]) -> float:
    """Print one line and return its ratio."""
    plain, guarded = (seconds[name] * 1e6 for name in NAMES)
    figures = f"plain{plain:7.1f} us, guarded{guarded:7.1f} us, {guarded - plain:+6.1f} us"
    print(f"{what:25}{figures},{guarded / plain:6.3f} x plain")
    return guarded / plain


def main() -> int:
    """Measure, print, and compare with the limit."""
    kinds = [http for http, loop in KINDS.items() if find_spec(http) and find_spec(loop)]
    ratios = {http: served(http) for http in kinds}
    in_process()
    for http, ratio in ratios.items():
        print(f"{'pass' if ratio <= MOST_ADDED else 'MISS'}: {http} {ratio:.3f} <= {MOST_ADDED}")
    return max(ratios.values()) > MOST_ADDED


if __name__ == "__main__":
    sys.exit(main())
