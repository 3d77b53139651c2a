"""An HTTP server that is down at first and then accepts a limited number of requests per second.

While it is down, it refuses connections, or all requests with a 429. After that, a share of the
accepted requests can fail with a 500.

    python -m benchmarks.service.capacity_target OPTIONS_JSON

The options are the fields of `Options`. Each port is a separate target, with its own capacity: the
number of requests that are accepted within any second. Further requests are refused. The server
ends when all expected requests have succeeded, or at SIGTERM. Then it writes the time and status of
each request, by port, to the log file.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httptools
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a server."""

    ports: list[int]
    capacity: int
    """Requests per second of each port."""
    down_s: float
    """Seconds from the start of the server in which it is down."""
    expected: int
    """Requests to each port that succeed before the server ends."""
    log: str
    """Path of the log file."""
    refusal_status: int = 503
    """503, or 429 with `Retry-After: 1`."""
    throttles_while_down: bool = False
    """Whether the server answers with 429 while it is down, and does not refuse connections."""
    failing_share: float = 0.0
    """The share of accepted requests that fail with a 500."""
    reduced_capacity: int | None = None
    """The capacity from `reduced_after_s` on."""
    reduced_after_s: float = 0.0
    """Seconds after the end of the down time."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def capacity_at(self, seconds: float) -> int:
        """Return the capacity at a time after the end of the down time."""
        if self.reduced_capacity is None or seconds < self.reduced_after_s:
            return self.capacity
        return self.reduced_capacity


_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_FAILURES = {
    500: b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
    503: b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    429: b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n",
}


class Host:
    """The state of one port."""

    def __init__(
        self, options: Options, started_at: float, on_complete: Callable[[], None]
    ) -> None:
        """`on_complete` is called when all expected requests were accepted."""
        self._options = options
        self._started_at = started_at
        self._on_complete = on_complete
        self._accepted: deque[float] = deque()
        """Times of the requests that were accepted within the last second."""
        self._success_count = 0
        self._random = random.Random(options.ports[0])
        self.log: list[tuple[float, int]] = []
        """The seconds since the end of the down time, and the status of each request."""

    def respond(self) -> bytes:
        now = time.monotonic() - self._started_at
        if now < 0:
            return _FAILURES[429]
        while self._accepted and self._accepted[0] <= now - 1.0:
            self._accepted.popleft()
        is_accepted = len(self._accepted) < self._options.capacity_at(now)
        status = self._options.refusal_status
        if is_accepted:
            self._accepted.append(now)
            status = 500 if self._random.random() < self._options.failing_share else 200
        if status == 200:
            self._success_count += 1
            if self._success_count == self._options.expected:
                self._on_complete()
        self.log.append((now, status))
        return _OK if status == 200 else _FAILURES[status]


class Connection(asyncio.Protocol):
    """One connection, with keep-alive."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._parser = httptools.HttpRequestParser(self)
        self._transport = None

    def connection_made(self, transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._transport.write(self._host.respond())


async def serve(options: Options) -> list[list[tuple[float, int]]]:
    """Serve until the end, and return the requests of each port."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    if not options.throttles_while_down:
        await asyncio.sleep(options.down_s)
    started_at = time.monotonic() + (options.down_s if options.throttles_while_down else 0.0)
    missing_ports = len(options.ports)

    def on_complete() -> None:
        nonlocal missing_ports
        missing_ports -= 1
        if not missing_ports:
            stopped.set()

    hosts = {port: Host(options, started_at, on_complete) for port in options.ports}
    for port, host in hosts.items():
        await loop.create_server(
            lambda host=host: Connection(host), "127.0.0.1", port, backlog=4096
        )
    await stopped.wait()
    await asyncio.sleep(0.2)  # the last responses
    return [host.log for host in hosts.values()]


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    Path(options.log).write_text(json.dumps(uvloop.run(serve(options))))


if __name__ == "__main__":
    main()
