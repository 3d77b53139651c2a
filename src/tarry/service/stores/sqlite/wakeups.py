"""Wake-ups between the processes that use one file, see `Store.listen`.

A process that listens has a named pipe (FIFO) in the folder `<database>.wake`. Another process that
has made tasks claimable writes a byte to each of these pipes. Unlike polling, this costs nothing
while no task is added. If a pipe cannot be created, the process still polls.

The pipes are in a folder, because `cp tarry.db* backup/` would wait for ever for the end of a pipe.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from errno import ENXIO
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from collections.abc import Callable

_SEARCH_INTERVAL_S = 1.0
"""Pipes of new processes are searched for this often. Until then, these processes poll."""
_READ_BYTES = 4096


class Wakeups:
    """The pipe of this process, and those of the other processes that use the same file."""

    def __init__(self, database: str | os.PathLike[str]) -> None:
        # The real path, because another process may open the same database by a symbolic link.
        self._folder = Path(f"{os.path.realpath(database)}.wake")
        self._own_path: Path | None = None
        self._descriptor: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._others: dict[Path, int] = {}
        """The write ends of the pipes of other processes, by path."""
        self._searched_at = float("-inf")

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the running event loop when another process calls `notify`."""
        self.close()
        self._search()  # also deletes the pipes of processes that were killed
        # Hidden until this process reads from it: other processes delete a pipe without a reader,
        # because its process has exited.
        path = self._folder / uuid4().hex
        hidden_path = path.with_name(f".{path.name}")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            os.mkfifo(hidden_path, 0o600)
            # Opened for writing, too. Otherwise the pipe would always be readable (end of file)
            # after the first writer has closed it.
            self._descriptor = os.open(hidden_path, os.O_RDWR | os.O_NONBLOCK)
            hidden_path.rename(path)
        except (OSError, AttributeError):  # AttributeError: Windows has no `mkfifo`
            with suppress(OSError):
                hidden_path.unlink()
            self.close()
            return
        self._own_path, self._loop = path, asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._on_readable, self._descriptor, callback)
        self._searched_at = float("-inf")  # processes that start together find each other

    def notify(self) -> None:
        """Wake the other processes that listen."""
        if effects.now() >= self._searched_at + _SEARCH_INTERVAL_S:
            self._search()
        for path, descriptor in tuple(self._others.items()):
            try:
                os.write(descriptor, b"\0")
            except BlockingIOError:  # the pipe is full: the process has enough wake-ups to read
                pass
            except OSError:  # the process has exited
                os.close(self._others.pop(path))

    def close(self) -> None:
        """Delete the pipe of this process, and close all pipes."""
        if self._descriptor is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
        if self._own_path is not None:
            with suppress(OSError):  # the last process deletes the folder
                self._own_path.unlink()
                self._folder.rmdir()
        self._descriptor = self._own_path = self._loop = None
        for descriptor in self._others.values():
            os.close(descriptor)
        self._others.clear()
        self._searched_at = float("-inf")

    def _on_readable(self, descriptor: int, callback: Callable[[], None]) -> None:
        with suppress(BlockingIOError):
            os.read(descriptor, _READ_BYTES)
        callback()

    def _search(self) -> None:
        """Open the pipes of other processes, and delete those of processes that were killed."""
        self._searched_at = effects.now()
        try:
            paths = set(self._folder.iterdir()) - {self._own_path}
        except OSError:  # no process has listened yet
            return
        paths = {path for path in paths if not path.name.startswith(".")}
        for path in self._others.keys() - paths:  # the process has closed its store
            os.close(self._others.pop(path))
        for path in paths - self._others.keys():
            try:
                self._others[path] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno == ENXIO:  # no process reads from the pipe
                    with suppress(OSError):
                        path.unlink()
