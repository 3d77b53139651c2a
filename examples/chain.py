"""Three services in a chain, each with four attempts per call, and a fourth that always fails.

Run it: `python examples/chain.py`. It starts real processes and counts the requests that reach the
failing service. It needs `pip install 'tarry[httpx]' starlette uvicorn`.
"""

import logging
import socket
import subprocess
import sys
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from time import sleep

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import tarry
from tarry.adapters.asgi import OneRetryLayerMiddleware
from tarry.adapters.httpx import AsyncRetryTransport

CALLS = 100


def serve(port: int, below: str, rule: str) -> None:
    """Serve requests by calling the service below, up to four times each."""
    logging.getLogger("tarry").setLevel(logging.ERROR)  # otherwise each retry is logged
    policy = tarry.Policy(max_attempts=4, initial_delay=0.001, max_delay=0.001)
    budget = tarry.RatioBudget(0.1, min_per_second=0) if rule == "budget" else None
    downstream = tarry.Downstream("below", budget=budget)
    client = httpx.AsyncClient(
        transport=AsyncRetryTransport(policy=policy, downstream=downstream), timeout=30
    )

    async def handle(_: Request) -> PlainTextResponse:
        response = await client.get(below)
        return PlainTextResponse(response.text, response.status_code)

    app = Starlette(routes=[Route("/", handle)])
    wrapped = OneRetryLayerMiddleware(app) if rule == "one layer" else app
    uvicorn.run(wrapped, port=port, log_level="critical")


def free_ports(count: int) -> list[int]:
    """Return unused ports, all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def start_failing_service(requests: list[str]) -> ThreadingHTTPServer:
    """Start a service that fails every request and records its path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_error(503)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return server


def wait_for_server(port: int) -> None:
    """Return when a server listens on the port, or after a minute."""
    for _ in range(1200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        sleep(0.05)


def requests_per_call(rule: str, calls: int) -> float:
    """Start the chain, call its first service, and return the requests at the last one per call."""
    requests: list[str] = []
    server = start_failing_service(requests)
    below = f"http://127.0.0.1:{server.server_port}/"
    with ExitStack() as stack:
        ports = free_ports(3)
        for port in ports:
            command = [sys.executable, __file__, str(port), below, rule]
            stack.callback(subprocess.Popen(command).kill)
            below = f"http://127.0.0.1:{port}/"
        for port in ports:
            wait_for_server(port)
        client = stack.enter_context(httpx.Client(timeout=60))
        for _ in range(calls):
            client.get(below)
    server.shutdown()
    return len(requests) / calls


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    else:
        print(
            f"every layer retries: {requests_per_call('every layer', 1):.0f} requests for one call"
        )
        print(f"one layer retries:   {requests_per_call('one layer', 1):.0f} requests for one call")
        per_call = requests_per_call("budget", CALLS)
        print(f"a budget of 10 %:    {per_call:.1f} requests for each of {CALLS} calls")
