"""The main program of the writer process; `writer_process` starts it and talks to it."""

from __future__ import annotations

import signal
import sys
from importlib.metadata import version
from typing import IO

from tarry.runtime.clocks import system
from tarry.service.stores.sqlite.database import Database
from tarry.service.stores.sqlite.worker_locks import WorkerLock
from tarry.service.stores.sqlite.writer_process import FRAME_LENGTH, run_calls


def main(path: str, lock_token: str, service_version: str) -> None:
    """Run the calls of each frame from standard input, until the service closes it."""
    if service_version != version("tarry"):  # frames of another version cannot be decoded safely
        sys.exit("tarry was upgraded while the service ran: restart it")
    # A supervisor may signal all processes. The service decides when this one ends: it still has
    # results to write.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # a stray print() must not end up between two frames
    database = Database(
        path, lambda: int(system.unix_time() * 1000), WorkerLock(path, lock_token or None)
    )
    try:
        while True:
            length = FRAME_LENGTH.unpack(_read(source, FRAME_LENGTH.size))[0]
            frame = run_calls(database, _read(source, length))
            sink.write(FRAME_LENGTH.pack(len(frame)) + frame)
            sink.flush()
    except (EOFError, BrokenPipeError):  # the service has ended
        database.close()


def _read(pipe: IO[bytes], length: int) -> bytes:
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return data


if __name__ == "__main__":
    main(*sys.argv[1:])
