"""Who lives: each open store holds a lock on a file of its own, which ends with its process.

The file lies beside the database, as `<database>.worker-<token>`. The kernel lets go of the lock
when the process dies, however it dies; one that is only stopped still holds it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows: leases end by their time alone
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterable


class WorkerLock:
    """The lock of one open store, and a look at those of the others.

    `token` names the lock of the process that has started us, which holds it for both.
    """

    def __init__(self, database: str | os.PathLike[str], token: str | None = None) -> None:
        # By its real path: who names the file otherwise has to find the same locks.
        self._base = Path(f"{os.path.realpath(database)}.worker-")
        self._file: int | None = None
        self.token: str | None = token
        """The name of our lock; None: there are no locks here, and nobody is known to be dead."""

    def acquire(self) -> None:
        """Take a lock of our own; where that cannot be, leases end by their time alone."""
        while self.token is None:
            token = uuid4().hex
            try:
                file = os.open(self._path(token), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            except OSError:
                return
            is_ours = _lock(file)
            if is_ours and os.fstat(file).st_nlink > 0:
                self._file, self.token = file, token
                return
            os.close(file)
            if is_ours is None:
                self._path(token).unlink(missing_ok=True)
                return
            # Somebody who tidies up was faster than our lock: take another file.

    def release(self) -> None:
        """Give the lock back: leases that are still held are abandoned."""
        if self._file is not None:
            self._path(str(self.token)).unlink(missing_ok=True)
            os.close(self._file)
            self._file = self.token = None

    def remove_dead(self, tokens: Iterable[str]) -> list[str]:
        """Return those whose process has ended, and remove their files."""
        return [token for token in tokens if token != self.token and self._is_free(token)]

    def remove_leftover_files(self) -> None:
        """Remove the files of stores that ended before they had a worker."""
        prefix = self._base.name
        names = [path.name for path in self._base.parent.iterdir()]
        self.remove_dead([name.removeprefix(prefix) for name in names if name.startswith(prefix)])

    def _path(self, token: str) -> Path:
        return self._base.with_name(self._base.name + token)

    def _is_free(self, token: str) -> bool:
        try:
            file = os.open(self._path(token), os.O_RDWR)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            if not _lock(file):
                return False
            self._path(token).unlink(missing_ok=True)
            return True
        finally:
            os.close(file)


def _lock(file: int) -> bool | None:
    """Take a lock, unless another has it; None: there are no locks here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
