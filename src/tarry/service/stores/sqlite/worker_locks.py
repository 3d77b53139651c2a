"""File locks that show which worker processes are alive, and which of them is the leader.

Every open store holds a lock on its own file, `<database>.worker-<token>`, with a random *token*.
The kernel releases the lock when the process ends, for whatever reason, but not when the process is
suspended (SIGSTOP). So the leases of a dead process can be ended before they expire. The file has a
record of each attempt that the process has started, so that only these attempts count as lost.

One of the open stores holds the lock on `<database>.leader`, see `Store.try_lead`.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no flock: leases end when they expire
    fcntl = None  # type: ignore[assignment]  # mypy expects a module

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_START_RECORD = struct.Struct("36sq")  # the id of a task, and its version
_START_RECORD_BYTES = _START_RECORD.size
_pack_start_into = _START_RECORD.pack_into
_MAX_START_RECORDS = 8_192  # twice as many as a process leases tasks


class WorkerLock:
    """The lock of one open store; also finds the lock files of processes that have ended.

    With a writer process, the service holds the lock and passes the `token` to the writer process.
    """

    def __init__(self, database: str | os.PathLike[str], token: str | None = None) -> None:
        # The real path: another process may open the same database by another path.
        self._path_prefix = Path(f"{os.path.realpath(database)}.worker-")
        self._descriptor: int | None = None
        self._starts: mmap | None = None
        self.token: str | None = token
        """The suffix of the lock file; None before `acquire`, or if files cannot be locked."""

    def acquire(self) -> None:
        """Create a lock file and lock it. If that fails, leases end only when they expire."""
        while self.token is None:
            token = uuid4().hex
            try:
                descriptor = os.open(self._path(token), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            except OSError:
                return
            is_locked = _try_lock(descriptor)
            if is_locked and os.fstat(descriptor).st_nlink > 0:
                self._descriptor, self.token = descriptor, token
                self._starts = _map_start_records(descriptor)
                return
            os.close(descriptor)
            if is_locked is None:
                self._delete_file(token)
                return
            # Another process found the new file before it was locked here, took it for the file of
            # a dead process, and locked or deleted it. Try again with a new file.

    def release(self) -> None:
        """Release the lock and delete its file; other processes may then end remaining leases."""
        if self._descriptor is not None:
            self._delete_file(str(self.token))
            os.close(self._descriptor)
            if self._starts is not None:
                self._starts.close()
            self._descriptor = self._starts = self.token = None

    def record_start(self, slot: int, task_id: str, version: int) -> None:
        """Record that an attempt of a task starts; see `Store.record_start`."""
        if self._starts is not None and slot < _MAX_START_RECORDS:
            # The file need not be synced: it must only survive this process.
            _pack_start_into(self._starts, slot * _START_RECORD_BYTES, task_id.encode(), version)

    def read_starts(self, token: str) -> set[bytes]:
        """Return the records of `record_start` in a lock file, each as `pack_start` returns it."""
        try:
            content = self._path(token).read_bytes()
        except OSError:
            return set()
        size = _START_RECORD_BYTES
        return {content[at : at + size] for at in range(0, len(content), size)} - {bytes(size)}

    def find_dead_locks(self, tokens: Iterable[str]) -> list[str]:
        """Return those of the tokens whose process has ended."""
        return [token for token in tokens if token != self.token and self._is_dead(token)]

    def remove_dead_files(self, kept_tokens: Collection[str]) -> None:
        """Delete the lock files of processes that have ended, except those of `kept_tokens`."""
        for token in self._list_tokens():
            if token != self.token and token not in kept_tokens:
                self._is_dead(token, delete=True)

    def has_other_holders(self) -> bool:
        """Return whether another store is open, in this process or another."""
        other_tokens = [token for token in self._list_tokens() if token != self.token]
        return len(self.find_dead_locks(other_tokens)) < len(other_tokens)

    def _list_tokens(self) -> list[str]:
        prefix = self._path_prefix.name
        names = [path.name for path in self._path_prefix.parent.iterdir()]
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def _path(self, token: str) -> Path:
        return self._path_prefix.with_name(self._path_prefix.name + token)

    def _delete_file(self, token: str) -> None:
        with suppress(OSError):  # for example on a read-only disk; the next start deletes the file
            self._path(token).unlink()

    def _is_dead(self, token: str, *, delete: bool = False) -> bool:
        """Return whether the process with this token has ended; `delete` its lock file if so."""
        try:
            descriptor = os.open(self._path(token), os.O_RDWR)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            if not _try_lock(descriptor):
                return False
            if delete:
                self._delete_file(token)
            return True
        finally:
            os.close(descriptor)


def _map_start_records(descriptor: int) -> mmap | None:
    """Return the mapped file for records of starts, or None if the disk is full.

    Writing to memory takes 1 us, `os.pwrite` 2 to 10 us. The zeros are written first, because a
    write to a part of the file that has no space on the disk would end the process with SIGBUS.
    """
    size = _MAX_START_RECORDS * _START_RECORD_BYTES
    try:
        os.pwrite(descriptor, bytes(size), 0)
        return mmap(descriptor, size)
    except (OSError, ValueError):  # ValueError: the disk had space for a part of the zeros only
        os.ftruncate(descriptor, 0)
        return None


def pack_start(task_id: str, version: int) -> bytes:
    """Return the record of `WorkerLock.record_start`."""
    return _START_RECORD.pack(task_id.encode(), version)


class LeaderLock:
    """A lock that one of the open stores of a database holds."""

    def __init__(self, database: str | os.PathLike[str]) -> None:
        self._path = Path(f"{os.path.realpath(database)}.leader")
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Acquire the lock if no other store has it; return whether this store has it now.

        If files cannot be locked, the result is True for each store.
        """
        if self._descriptor is not None:
            return True
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return True
        is_locked = _try_lock(descriptor)
        # Without a link, the file was deleted by `release` of another store after it was opened.
        if is_locked and os.fstat(descriptor).st_nlink > 0:
            self._descriptor = descriptor
            return True
        os.close(descriptor)
        return is_locked is None

    def release(self) -> None:
        """Release the lock and delete its file."""
        if self._descriptor is not None:
            with suppress(OSError):  # for example on a read-only disk
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None


def _try_lock(descriptor: int) -> bool | None:
    """Lock a file. Return False if another process holds the lock, None if locking fails."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
