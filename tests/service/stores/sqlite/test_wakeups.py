"""Wake-ups between processes: one named pipe for each process that listens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

from tarry.service.stores.sqlite import wakeups
from tarry.service.stores.sqlite.wakeups import Wakeups


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine function, for at most 20 seconds."""

    async def run_with_timeout() -> None:
        async with asyncio.timeout(20):
            await main()

    asyncio.run(run_with_timeout())


def test_all_other_processes_are_woken(tmp_path: Path) -> None:
    """A notification wakes each process that listens, but not the process that sends it."""

    async def main() -> None:
        woken = [asyncio.Event() for _ in range(3)]
        channels = [Wakeups(tmp_path / "tasks.db") for _ in woken]
        for channel, event in zip(channels, woken, strict=True):
            channel.listen(event.set)
        channels[0].notify()
        await asyncio.gather(woken[1].wait(), woken[2].wait())
        assert not woken[0].is_set()
        for channel in channels:
            channel.close()

    run(main)
    assert [] == list(tmp_path.iterdir())


def test_a_process_reached_by_another_path_is_woken(tmp_path: Path) -> None:
    """A process that opened the file by a symbolic link belongs to the same group."""
    (tmp_path / "tasks.db").touch()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "other.db").symlink_to(tmp_path / "tasks.db")

    async def main() -> None:
        woken = asyncio.Event()
        with (
            closing(Wakeups(tmp_path / "tasks.db")) as listener,
            closing(Wakeups(tmp_path / "link" / "other.db")) as sender,
        ):
            listener.listen(woken.set)
            sender.notify()
            await woken.wait()

    run(main)


def test_a_burst_of_wakeups_does_not_block_the_sender(tmp_path: Path) -> None:
    """A full pipe is ignored, because the process will be woken anyway."""

    async def main() -> None:
        woken = asyncio.Event()
        with (
            closing(Wakeups(tmp_path / "tasks.db")) as listener,
            closing(Wakeups(tmp_path / "tasks.db")) as sender,
        ):
            listener.listen(woken.set)
            for _ in range(70_000):  # a pipe of Linux holds 65,536 bytes
                sender.notify()
            await woken.wait()

    run(main)


def test_the_pipe_of_a_killed_process_is_deleted(tmp_path: Path) -> None:
    """A pipe from which no process reads is deleted by the next process that listens."""
    folder = tmp_path / "tasks.db.wake"
    folder.mkdir()
    os.mkfifo(folder / "dead")

    async def main() -> None:
        with closing(Wakeups(tmp_path / "tasks.db")) as listener:
            listener.listen(lambda: None)
            [own_pipe] = folder.iterdir()
            assert "dead" != own_pipe.name

    run(main)


def test_a_process_that_ends_is_not_woken_any_more(tmp_path: Path) -> None:
    """A sender closes the pipe of a process that has exited, and continues with the others."""

    async def main() -> None:
        woken = asyncio.Event()
        ended, listener, sender = (Wakeups(tmp_path / "tasks.db") for _ in range(3))
        ended.listen(lambda: None)
        listener.listen(woken.set)
        sender.notify()
        await woken.wait()
        woken.clear()
        ended.close()
        sender.notify()
        await woken.wait()
        assert 1 == len(sender._others)
        listener.close()
        sender.close()

    run(main)


def test_new_processes_are_found_later(tmp_path: Path) -> None:
    """A process that starts to listen after the last search is found by the next search."""

    async def main() -> None:
        woken = asyncio.Event()
        with (
            closing(Wakeups(tmp_path / "tasks.db")) as listener,
            closing(Wakeups(tmp_path / "tasks.db")) as sender,
        ):
            sender.notify()
            listener.listen(woken.set)
            sender._searched_at -= wakeups._SEARCH_INTERVAL_S
            sender.notify()
            await woken.wait()

    run(main)


def test_a_missing_folder_is_ignored(tmp_path: Path) -> None:
    """If no pipe can be created, nothing is raised, because processes also poll."""

    async def main() -> None:
        with closing(Wakeups(tmp_path / "missing" / "tasks.db")) as listener:
            listener.listen(lambda: None)
            listener.notify()

    run(main)
