"""Readers of `/events` in a separate process, which only receive and count the events.

The process prints "ready" when all streams are open. It reads until its standard input is closed,
and then prints the counts as JSON.
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.service.processes import BenchmarkError, ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

_REQUEST = b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@dataclass(slots=True)
class EventCounts:
    """The number of events that all readers together have received and missed."""

    events: int = 0
    missed: int = 0
    """The number of times that a reader has missed events."""


@contextmanager
def running_event_readers(group: ProcessGroup, port: int, count: int) -> Iterator[EventCounts]:
    """Run readers; the yielded counts are set at the end."""
    counts = EventCounts()
    if not count:
        yield counts
        return
    command = (sys.executable, "-m", "benchmarks.service.event_readers", str(port), str(count))
    process = group.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if process.stdout.readline() != "ready\n":
        raise BenchmarkError(f"the event streams cannot be opened:\n{group.log_tail()}")
    yield counts
    process.stdin.close()
    received = process.stdout.readline()
    if not received:
        raise BenchmarkError(f"the event streams have ended:\n{group.log_tail()}")
    result = json.loads(received)
    counts.events, counts.missed = result["events"], result["missed"]


def main() -> None:
    """Read streams until the standard input is closed."""
    port, count = map(int, sys.argv[1:])
    selector = selectors.DefaultSelector()
    for _ in range(count):
        stream = socket.create_connection(("127.0.0.1", port))
        stream.sendall(_REQUEST)
        head = b""
        while b": hello\n\n" not in head:
            received = stream.recv(65_536)
            if not received:
                raise SystemExit(f"the service did not open a stream: {head!r}")
            head += received
        selector.register(stream, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    print("ready", flush=True)
    events = missed = 0
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                print(json.dumps({"events": events, "missed": missed}), flush=True)
                return
            received = key.fileobj.recv(1 << 20)
            if not received:
                raise SystemExit("the service has closed a stream")
            events += received.count(b"\ndata: ")
            missed += received.count(b"event: missed\n")


if __name__ == "__main__":
    main()
