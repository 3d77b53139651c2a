"""The listener that writes attempt logs, from which `tarry tune` proposes a policy.

    tarry.listen(tarry.telemetry.attempt_log("attempts.jsonl"))

A log is a JSONL file with a line for each attempt that has ended. The columns are those that
`tarry.tuning.attempt_log` reads, and delayMs, operation and downstream for other tools.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tarry.core.checks import check_count
from tarry.core.events import AttemptFailed, Succeeded
from tarry.core.outcome import Kind
from tarry.runtime.forks import PerProcess

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no flock
    fcntl = None  # type: ignore[assignment]  # mypy expects a module

if TYPE_CHECKING:
    from collections.abc import Generator

    from tarry.core.events import Event

MAX_LOG_BYTES = 100_000_000  # about 500,000 attempts

_logger = logging.getLogger("tarry")


class AttemptLogListener:
    """Writes attempts to a file, which is renamed when it is full; see `attempt_log`."""

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int, backups: int) -> None:
        self._path = Path(path)
        self._max_bytes = check_count("max_bytes", max_bytes)
        self._backups = check_count("backups", backups)
        self._lock = PerProcess(threading.Lock)
        self._is_failing = False
        self._is_closed = False
        self._file: int | None = self._open()  # raises if the file cannot be written
        """The file descriptor; None if the file could not be opened again."""

    def __call__(self, event: Event) -> None:
        """Write a line if the event is the end of an attempt whose duration was measured."""
        if isinstance(event, AttemptFailed):
            number, kind, delay = event.attempt, event.kind, event.delay
        elif isinstance(event, Succeeded):
            number, kind, delay = event.attempts, Kind.SUCCESS, None
        else:
            return
        if event.duration is None:
            return
        row = {
            "taskId": event.call_id,
            "attemptNumber": number,
            "startedAt": round((event.time - event.duration) * 1000, 3),
            "durationMs": round(event.duration * 1000, 3),
            "outcome": kind.value,
            "delayMs": None if delay is None else round(delay * 1000, 3),
            "operation": event.operation,
            "downstream": event.downstream,
        }
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        with self._lock.value:
            if not self._is_closed:
                self._write(line)

    def close(self) -> None:
        """Close the file; later attempts are not logged.

        The function that `tarry.listen` returns removes the listener.
        """
        with self._lock.value:
            self._is_closed = True
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _open(self) -> int:
        # Each line is one write to the end of the file, so several processes can share the file.
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)

    def _write(self, line: bytes) -> None:
        """Write a line; if that fails, log one warning instead of one for each attempt."""
        try:
            if self._file is None:
                self._file = self._open()
            size = os.fstat(self._file).st_size
            if size and size + len(line) > self._max_bytes:
                self._rotate(self._file)
                self._file = self._open()
            os.write(self._file, line)
        except OSError as error:
            if not self._is_failing:
                message = "attempt log cannot be written, attempts are lost, path=%s error=%s"
                _logger.warning(message, self._path, error)
            self._is_failing = True
        else:
            self._is_failing = False

    def _rotate(self, file: int) -> None:
        """Close the full file and rename it, unless another process has renamed it already."""
        self._file = None
        path, opened = self._path, os.fstat(file)
        os.close(file)  # first: Windows does not rename open files
        with suppress(FileNotFoundError), _lock_file(path):
            if os.path.samestat(opened, path.stat()):
                backups = [Path(f"{path}.{number}") for number in range(1, self._backups + 1)]
                for newer, older in reversed(list(pairwise(backups))):
                    if newer.exists():
                        newer.replace(older)
                path.replace(backups[0])


@contextmanager
def _lock_file(path: Path) -> Generator[None]:
    """Lock a file, so that no other process renames it between the check and the rename."""
    if fcntl is None:  # pragma: no cover - Windows
        yield
        return
    # A new descriptor, because forked processes share the locks of inherited descriptors.
    descriptor = os.open(path, os.O_WRONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # also releases the lock


def attempt_log(
    path: str | os.PathLike[str], *, max_bytes: int = MAX_LOG_BYTES, backups: int = 1
) -> AttemptLogListener:
    """Return a listener for `tarry.listen` that appends a line for each attempt to a JSONL file.

    A file that would exceed `max_bytes` is renamed to `path.1`, an older one to `path.2` and so on;
    `backups` is the number of renamed files that are kept. Each line is written when its
    attempt ends. Hedged calls are not logged, because their attempts overlap.
    """
    return AttemptLogListener(path, max_bytes=max_bytes, backups=backups)
