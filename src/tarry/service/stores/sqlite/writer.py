"""The process that writes: calls in, answers out; see `apart`, which starts it."""

from __future__ import annotations

import signal
import sys
from importlib.metadata import version
from typing import IO

from tarry.runtime.clocks import system
from tarry.service.stores.sqlite.database import Database
from tarry.service.stores.sqlite.frames import LENGTH, carry_out
from tarry.service.stores.sqlite.worker_locks import WorkerLock


def main(path: str, token: str, ours: str) -> None:
    """Carry out what comes in, until nothing does any more."""
    if ours != version("tarry"):
        sys.exit("tarry was upgraded while the service ran: restart it")
    for each in (signal.SIGINT, signal.SIGTERM):  # they are for the one that has started us
        signal.signal(each, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    database = Database(
        path, lambda: int(system.unix_time() * 1000), WorkerLock(path, token or None)
    )
    try:
        while True:
            length = LENGTH.unpack(_read(source, LENGTH.size))[0]
            frame = carry_out(database, _read(source, length))
            sink.write(LENGTH.pack(len(frame)) + frame)
            sink.flush()
    except (EOFError, BrokenPipeError):  # nobody is there any more
        database.close()


def _read(pipe: IO[bytes], length: int) -> bytes:
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return data


if __name__ == "__main__":
    main(*sys.argv[1:])
