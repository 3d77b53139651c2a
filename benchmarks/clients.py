"""What the httpx adapter adds to a request that succeeds, beside httpx-retries.

    python -m benchmarks.clients

One local server, one connection each, the clients in turn: the median of each client's requests
over the median of plain httpx, in one run. Needs httpx, httpx-retries and uvicorn.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from statistics import median
from time import perf_counter, sleep

import httpx
from httpx_retries import Retry
from httpx_retries import RetryTransport as Peer

from tarry.adapters.httpx import RetryTransport

MOST_ADDED = 1.05
ROUNDS, REQUESTS = 400, 20


async def app(_scope, receive, send):
    """Answer everything with two bytes."""
    await receive()
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


def main() -> int:
    """Measure, print, judge."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "benchmarks.clients:app", "--port", str(port)]
    server = subprocess.Popen([*command, "--log-level", "critical"])
    url = f"http://127.0.0.1:{port}/"
    clients = {
        "httpx": httpx.Client(),
        "httpx with tarry": httpx.Client(transport=RetryTransport(httpx.HTTPTransport())),
        "httpx with httpx-retries": httpx.Client(transport=Peer(retry=Retry(total=3))),
    }
    times: dict[str, list[float]] = {name: [] for name in clients}
    try:
        for _ in range(200):
            try:
                clients["httpx"].get(url)
                break
            except httpx.ConnectError:
                sleep(0.05)
        names = list(clients)
        for _ in range(ROUNDS):
            random.shuffle(names)
            for name in names:
                get = clients[name].get
                begun = perf_counter()
                for _ in range(REQUESTS):
                    get(url)
                times[name].append((perf_counter() - begun) / REQUESTS)
    finally:
        server.kill()
    plain = median(times["httpx"])
    ratios = {name: median(taken) / plain for name, taken in times.items()}
    for name, ratio in ratios.items():
        print(f"{name:27}{median(times[name]) * 1e6:8.0f} us{ratio:8.3f} x httpx")
    ours, theirs = ratios["httpx with tarry"], ratios["httpx with httpx-retries"]
    met = ours <= MOST_ADDED and ours <= theirs
    print(f"{'pass' if met else 'MISS'}: {ours:.3f} <= {MOST_ADDED} and <= {theirs:.3f}")
    return not met


if __name__ == "__main__":
    sys.exit(main())
