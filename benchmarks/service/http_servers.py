"""Measure the processor time of HTTP servers for a POST of 1 KiB, on 64 connections.

    .venv/bench-service/bin/pip install granian hypercorn
    .venv/bench-service/bin/python -m benchmarks.service.http_servers

The application is the service, which stores tasks that are due tomorrow, or `trivial`, which reads
the body and responds. `tarry` is the server of `tarry serve`; `tarry-asgi` is the same without the
fast path for new tasks. The time of the writer process is not included.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import psutil
import uvloop

from benchmarks.service import tarry_server
from benchmarks.service.client import Connections
from benchmarks.service.peers import common
from benchmarks.service.processes import BenchmarkError, ProcessGroup, free_port
from tarry.service.api.messages import ApiResponse
from tarry.service.app import Service
from tarry.service.http.server import HttpServer
from tarry.service.settings import Settings

SERVERS = ("tarry", "tarry-asgi", "uvicorn", "granian", "hypercorn")
APPS = ("trivial", "service")
CONNECTIONS = 64
WARM_UP_REQUESTS = 1_000
PATH = "/retry-tasks"
HOST, PORT = "127.0.0.1", int(os.environ.get("TARRY_PORT", "0"))
RESPONSE = ApiResponse(200, b'{"ok":true}', [(b"content-type", b"application/json")])


class TrivialApp:
    """The trivial application, with the attributes of `Service` that `HttpServer` uses."""

    def __init__(self) -> None:
        self.settings = Settings(host=HOST, port=PORT)
        self.api = SimpleNamespace(fast_routes={PATH.encode(): self.handle_buffered})
        self.max_clients = 1_000

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})
            return
        while (await receive())["more_body"]:
            pass
        await RESPONSE.send(scope, send)

    def handle_buffered(self, _scope, _body, respond) -> None:
        """Respond on the fast path."""
        respond(RESPONSE)

    def begin_shutdown(self) -> None:
        """Do nothing: no request is waiting."""


def make_app() -> Service | TrivialApp:
    """Build the application; the garbage collector of each server is set as in `tarry serve`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    if os.environ["BENCH_APP"] == "trivial":
        return TrivialApp()
    settings = Settings(store=os.environ["TARRY_STORE"], host=HOST, port=PORT, dev=True)
    return Service(settings, writer_process=True)


def serve(server: str) -> None:
    """Run a server until it is killed."""
    if server != "granian":  # it imports the application in another process
        app = make_app()
    if server.startswith("tarry"):
        if server == "tarry-asgi":
            app.api.fast_routes.clear()
        HttpServer(app, lambda _url: None, shutdown_timeout_s=1).run()
    elif server == "uvicorn":
        import uvicorn

        uvicorn.run(app, host=HOST, port=PORT, access_log=False, log_config=None)
    elif server == "granian":
        from granian import Granian

        Granian(
            f"{__spec__.name}:make_app", HOST, PORT, interface="asgi", loop="uvloop", factory=True
        ).serve()
    else:
        from hypercorn.asyncio import serve as serve_hypercorn
        from hypercorn.config import Config

        uvloop.run(serve_hypercorn(app, Config.from_mapping(bind=f"{HOST}:{PORT}")))


async def post_all(port: int, keys: range) -> None:
    """Send a POST for each key, one at a time on each connection."""
    task = {"targetUrl": "http://127.0.0.1:9/", "headers": common.HEADERS, "body": common.BODY}
    task |= {"delayMs": 86_400_000}
    headers = {"Content-Type": "application/json", "Accept": "*/*", "User-Agent": "benchmark"}
    connections = await Connections.open(tarry_server.address(port), CONNECTIONS, headers)
    bodies = (json.dumps(task | {"idempotencyKey": f"order-{key}"}).encode() for key in keys)

    async def work(connection) -> None:
        for body in bodies:
            if await connection.post(PATH, body) not in {200, 201}:
                raise BenchmarkError("a request was rejected")

    await asyncio.gather(*map(work, connections.all))
    connections.close()


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants, without the writer process."""
    server = psutil.Process(pid)
    total = 0.0
    for process in (server, *server.children(recursive=True)):
        with suppress(psutil.Error):
            if "writer_process" not in " ".join(process.cmdline()):
                total += sum(process.cpu_times()[:2])
    return total


def measure(server: str, app: str, count: int) -> float:
    """Return the microseconds of processor time that a server takes for a request."""
    port = free_port()
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        environ = {**tarry_server.environ(folder, port), "BENCH_APP": app}
        with ProcessGroup(environ, folder) as group:
            pid = group.start((sys.executable, "-m", __spec__.name, "--serve", server)).pid
            tarry_server.wait_until_ready(port, group.check)
            uvloop.run(post_all(port, range(-WARM_UP_REQUESTS, 0)))
            before = cpu_seconds(pid)
            uvloop.run(post_all(port, range(count)))
            time.sleep(0.1)
            return 1e6 * (cpu_seconds(pid) - before) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=10_000, help="requests per run (10,000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=SERVERS, default=SERVERS)
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    runs = {(app, server): [] for app in APPS for server in args.only}
    for _ in range(args.rounds):
        for app, server in random.sample(list(runs), len(runs)):
            runs[app, server].append(measure(server, app, args.n))
    print("microseconds of processor time per request: median (minimum to maximum)")
    for (app, server), values in runs.items():
        print(f"{app:8} {server:11} {median(values):6.1f} ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
