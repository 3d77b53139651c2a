"""The cost that the httpx adapter adds to a successful request, compared with httpx-retries.

    python -m benchmarks.clients

Three figures, because a socket hides microseconds and a stub hides everything else:

* In process: each transport over one that answers at once, in processor time, the best of many
  short rounds. This is the cost of the adapter itself, with warm processor caches.
* Inside a request: over a socket, from one clock to the other around the transport inside. By then
  a thousand other functions have run, so that the same code costs several times as much.
* Over a socket: one local server, one connection each, the clients in turn, in a new random order
  each round. This is what a user sees. The limits apply to these figures.

Two marks. The median request takes at most 5 % more than plain httpx. And it is not slower than
with httpx-retries, as far as the run can tell: each round has one time for either client, and the
median of their differences is drawn again 2,000 times from the same rounds (a bootstrap). Where
even the lower end of the middle 95 % of those medians is above zero, the run has shown that we are
slower. A smaller difference is none to a user: another run may turn it round. It may still be
there, and the figure from inside a request says how large it is: counting for a breaker, a budget
and a percentile, under a lock, is not done for nothing.

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
from httpx_retries import RetryTransport as Peer

from tarry.adapters.httpx import RetryTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_ADDED = 1.05
ROUNDS, REQUESTS = 400, 20
STUB_ROUNDS, STUB_REQUESTS = 200, 1000
DRAWS, LOWER, UPPER = 2000, 0.025, 0.975
PLAIN, OURS, THEIRS = "httpx", "httpx with tarry", "httpx with httpx-retries"

Times = dict[str, list[float]]
"""Seconds a request, one figure for each round, in the same order for all."""


async def app(_scope, receive, send):
    """Answer everything with two bytes."""
    await receive()
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


class Stub(httpx.BaseTransport):
    """A transport that returns a response at once."""

    def __init__(self) -> None:
        self._answer = httpx.Response(200)

    def handle_request(self, _request: httpx.Request) -> httpx.Response:
        """Return the same answer each time."""
        return self._answer


class Inside(httpx.BaseTransport):
    """A transport that records when it started and finished."""

    def __init__(self) -> None:
        self._transport = httpx.HTTPTransport()
        self.begun = self.ended = 0.0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        self.begun = perf_counter()
        response = self._transport.handle_request(request)
        self.ended = perf_counter()
        return response


class Around(httpx.BaseTransport):
    """A transport that measures the time that another transport adds to sending."""

    def __init__(self, transport: httpx.BaseTransport, inside: Inside) -> None:
        self._transport = transport
        self._inside = inside
        self.times: list[float] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        begun = perf_counter()
        response = self._transport.handle_request(request)
        ended = perf_counter()
        self.times.append(self._inside.begun - begun + ended - self._inside.ended)
        return response


def transports(inner: Callable[[], httpx.BaseTransport]) -> dict[str, httpx.BaseTransport]:
    """Return the three compared transports, each over its own inner transport."""
    return {
        PLAIN: inner(),
        OURS: RetryTransport(inner()),
        THEIRS: Peer(inner(), retry=Retry(total=3)),
    }


def timed(
    calls: dict[str, Callable[[], object]], rounds: int, requests: int, clock: Callable[[], float]
) -> Times:
    """Measure all calls in turns."""
    times: Times = {name: [] for name in calls}
    names = list(calls)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            call = calls[name]
            begun = clock()
            for _ in range(requests):
                call()
            times[name].append((clock() - begun) / requests)
    return times


def in_process() -> Times:
    """Time the transports over a stub."""
    request = httpx.Request("GET", "http://127.0.0.1:8000/")

    def call_of(transport: httpx.BaseTransport) -> Callable[[], object]:
        return lambda: transport.handle_request(request)

    calls = {name: call_of(transport) for name, transport in transports(Stub).items()}
    return timed(calls, STUB_ROUNDS, STUB_REQUESTS, process_time)


@contextmanager
def server() -> Iterator[str]:
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


def over_a_socket(url: str, of: dict[str, httpx.BaseTransport], rounds: int = ROUNDS) -> Times:
    """Time clients with these transports against a real server."""

    def call_of(client: httpx.Client) -> Callable[[], object]:
        return lambda: client.get(url)

    calls = {name: call_of(httpx.Client(transport=transport)) for name, transport in of.items()}
    return timed(calls, rounds, REQUESTS, perf_counter)


def inside(url: str) -> Times:
    """Measure the time that the transports add to sending."""
    inner: list[Inside] = []

    def make() -> Inside:
        inner.append(Inside())
        return inner[-1]

    made = transports(make)
    watched = {name: Around(made[name], within) for name, within in zip(made, inner, strict=True)}
    over_a_socket(url, dict(watched), ROUNDS // 4)
    return {name: around.times for name, around in watched.items()}


def interval(differences: list[float]) -> tuple[float, float]:
    """Return the range that the median of such differences lies in, 19 times of 20."""
    rng = random.Random(7)
    medians = sorted(median(rng.choices(differences, k=len(differences))) for _ in range(DRAWS))
    return medians[int(LOWER * DRAWS)], medians[int(UPPER * DRAWS)]


def main() -> int:
    """Measure, print, and compare with the limits."""
    stubbed = {name: min(taken) for name, taken in in_process().items()}
    with server() as url:
        within = {name: median(taken) for name, taken in inside(url).items()}
        times = over_a_socket(url, transports(httpx.HTTPTransport))
    for where, found in (("in process", stubbed), ("inside a request", within)):
        for name in (OURS, THEIRS):
            print(f"{where}, {name} adds {(found[name] - found[PLAIN]) * 1e6:.1f} us")
    medians = {name: median(taken) for name, taken in times.items()}
    for name, taken in medians.items():
        ratio = taken / medians[PLAIN]
        print(f"over a socket, {name:25}{taken * 1e6:8.0f} us{ratio:8.3f} x httpx")
    pairs = zip(times[OURS], times[THEIRS], strict=True)
    low, high = interval([ours - theirs for ours, theirs in pairs])
    print(f"tarry less httpx-retries: {low * 1e6:+.1f} to {high * 1e6:+.1f} us")
    added = medians[OURS] / medians[PLAIN]
    met = added <= MOST_ADDED and low <= 0
    slower = "slower" if low > 0 else "faster" if high < 0 else "no difference to be seen"
    verdict = "pass" if met else "MISS"
    print(f"{verdict}: {added:.3f} <= {MOST_ADDED}; beside httpx-retries: {slower}")
    return not met


if __name__ == "__main__":
    sys.exit(main())
