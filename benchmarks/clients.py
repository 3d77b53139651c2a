"""The cost that the httpx adapter adds to a successful request, compared with httpx-retries.

    python -m benchmarks.clients

There are three measurements, because the time of a socket hides differences of microseconds, and a
stub transport leaves out the effects of a real request:

* In process: each transport wraps a stub that responds at once. The figure is the processor time of
  the best of many short rounds: the cost of the adapter itself, with warm processor caches.
* Inside a request: each transport sends requests over a socket. The figure is the time spent in the
  adapter, without the time in the transport that it wraps. The processor caches are cold, because
  many other functions run in each request, so the same code costs several times as much.
* Over a socket: the time of whole requests to one local server, as a user sees it. Each client has
  one connection, and the clients take turns in a new random order each round. The limits apply to
  these figures.

There are two limits. First, the median request takes at most 5 % longer than with plain httpx.
Second, it is not significantly slower than with httpx-retries. For this, the difference of the two
clients' times is computed for each round, and a bootstrap with 2,000 samples gives the 95 %
confidence interval of the median difference. tarry is slower if the whole interval is above zero. A
smaller difference can have the opposite sign in another run; the figure from inside a request shows
how large it is. tarry does more work per request: it updates a breaker, a budget and a latency
percentile under a lock.

Needs httpx, httpx-retries and uvicorn.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from contextlib import contextmanager
from statistics import median
from time import perf_counter, process_time, sleep
from typing import TYPE_CHECKING

import httpx
from httpx_retries import Retry
from httpx_retries import RetryTransport as HttpxRetriesTransport

from tarry.adapters.httpx import RetryTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_TIME_RATIO = 1.05
ROUNDS, REQUESTS = 400, 20
STUB_ROUNDS, STUB_REQUESTS = 200, 1000
BOOTSTRAP_SAMPLES, LOWER_QUANTILE, UPPER_QUANTILE = 2000, 0.025, 0.975
PLAIN, TARRY, HTTPX_RETRIES = "httpx", "httpx with tarry", "httpx with httpx-retries"

Times = dict[str, list[float]]
"""Seconds per request for each client; all lists have the rounds in the same order."""


async def app(_scope, receive, send):
    """Respond to each request with a body of two bytes."""
    await receive()
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


class StubTransport(httpx.BaseTransport):
    """A transport that returns a response at once."""

    def __init__(self) -> None:
        self._response = httpx.Response(200)

    def handle_request(self, _request: httpx.Request) -> httpx.Response:
        """Return the same response each time."""
        return self._response


class InnerTransport(httpx.BaseTransport):
    """A transport that records when its last request started and finished."""

    def __init__(self) -> None:
        self._transport = httpx.HTTPTransport()
        self.started = self.finished = 0.0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        self.started = perf_counter()
        response = self._transport.handle_request(request)
        self.finished = perf_counter()
        return response


class OuterTransport(httpx.BaseTransport):
    """A transport that measures the time that the wrapped transport adds to its inner transport."""

    def __init__(self, transport: httpx.BaseTransport, inner: InnerTransport) -> None:
        self._transport = transport
        self._inner = inner
        self.times: list[float] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        started = perf_counter()
        response = self._transport.handle_request(request)
        finished = perf_counter()
        self.times.append(self._inner.started - started + finished - self._inner.finished)
        return response


def build_transports(
    build_inner: Callable[[], httpx.BaseTransport],
) -> dict[str, httpx.BaseTransport]:
    """Return the three compared transports, each over its own inner transport."""
    return {
        PLAIN: build_inner(),
        TARRY: RetryTransport(build_inner()),
        HTTPX_RETRIES: HttpxRetriesTransport(build_inner(), retry=Retry(total=3)),
    }


def measure(
    calls: dict[str, Callable[[], object]], rounds: int, requests: int, clock: Callable[[], float]
) -> Times:
    """Measure all calls in turns, in a new random order each round."""
    times: Times = {name: [] for name in calls}
    names = list(calls)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            call = calls[name]
            started = clock()
            for _ in range(requests):
                call()
            times[name].append((clock() - started) / requests)
    return times


def measure_in_process() -> Times:
    """Measure the transports over a stub."""
    request = httpx.Request("GET", "http://127.0.0.1:8000/")

    def build_call(transport: httpx.BaseTransport) -> Callable[[], object]:
        return lambda: transport.handle_request(request)

    calls = {
        name: build_call(transport) for name, transport in build_transports(StubTransport).items()
    }
    return measure(calls, STUB_ROUNDS, STUB_REQUESTS, process_time)


@contextmanager
def run_server() -> Iterator[str]:
    """Run the application in a separate process, and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "benchmarks.clients:app", "--port", str(port)]
    process = subprocess.Popen([*command, "--log-level", "critical"])
    url = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(200):
            try:
                httpx.get(url)
                break
            except httpx.ConnectError:
                sleep(0.05)
        yield url
    finally:
        process.kill()


def measure_over_socket(
    url: str, transports: dict[str, httpx.BaseTransport], rounds: int = ROUNDS
) -> Times:
    """Measure requests to a server by clients with these transports."""

    def build_call(client: httpx.Client) -> Callable[[], object]:
        return lambda: client.get(url)

    clients = {name: httpx.Client(transport=transport) for name, transport in transports.items()}
    calls = {name: build_call(client) for name, client in clients.items()}
    return measure(calls, rounds, REQUESTS, perf_counter)


def measure_inside_requests(url: str) -> Times:
    """Measure the time that each transport adds to its inner transport."""
    inner: list[InnerTransport] = []

    def build_inner() -> InnerTransport:
        inner.append(InnerTransport())
        return inner[-1]

    transports = build_transports(build_inner)
    outer = {
        name: OuterTransport(transports[name], inner_transport)
        for name, inner_transport in zip(transports, inner, strict=True)
    }
    measure_over_socket(url, dict(outer), ROUNDS // 4)
    return {name: transport.times for name, transport in outer.items()}


def confidence_interval(differences: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median difference."""
    rng = random.Random(7)
    medians = sorted(
        median(rng.choices(differences, k=len(differences))) for _ in range(BOOTSTRAP_SAMPLES)
    )
    lower = medians[int(LOWER_QUANTILE * BOOTSTRAP_SAMPLES)]
    return lower, medians[int(UPPER_QUANTILE * BOOTSTRAP_SAMPLES)]


def main() -> int:
    """Measure, print, and compare with the limits."""
    in_process = {name: min(times) for name, times in measure_in_process().items()}
    with run_server() as url:
        inside = {name: median(times) for name, times in measure_inside_requests(url).items()}
        socket_times = measure_over_socket(url, build_transports(httpx.HTTPTransport))
    for where, seconds in (("in process", in_process), ("inside a request", inside)):
        for name in (TARRY, HTTPX_RETRIES):
            print(f"{where}, {name} adds {(seconds[name] - seconds[PLAIN]) * 1e6:.1f} us")
    medians = {name: median(times) for name, times in socket_times.items()}
    for name, seconds_per_request in medians.items():
        ratio = seconds_per_request / medians[PLAIN]
        print(f"over a socket, {name:25}{seconds_per_request * 1e6:8.0f} us{ratio:8.3f} x httpx")
    pairs = zip(socket_times[TARRY], socket_times[HTTPX_RETRIES], strict=True)
    low, high = confidence_interval([tarry - peer for tarry, peer in pairs])
    print(f"tarry minus httpx-retries: {low * 1e6:+.1f} to {high * 1e6:+.1f} us")
    ratio = medians[TARRY] / medians[PLAIN]
    is_met = ratio <= MAX_TIME_RATIO and low <= 0
    comparison = "slower" if low > 0 else "faster" if high < 0 else "no significant difference"
    status = "pass" if is_met else "MISS"
    print(f"{status}: {ratio:.3f} <= {MAX_TIME_RATIO}; compared with httpx-retries: {comparison}")
    return not is_met


if __name__ == "__main__":
    sys.exit(main())
