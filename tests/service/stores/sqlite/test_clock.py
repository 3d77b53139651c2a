"""The clock of the store: jumps of the wall clock, several processes, restarts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tarry.runtime.effects import read_boot_ms
from tarry.service.store import NewTask
from tarry.service.stores.sqlite import SqliteTaskStore
from tarry.service.stores.sqlite.clock import AnchoredClock, read_boot_id
from tests.service.stores.harness import (
    HOUR_MS,
    LEASE,
    MINUTE_MS,
    OTHER_LEASE,
    START_MS,
    task,
    task_numbers,
)


class FakeMachine:
    """The clocks of a machine."""

    def __init__(self) -> None:
        self.boot_ms = 7_000
        self.wall_offset_ms = START_MS - self.boot_ms
        self.boot_id: int | None = 1

    @property
    def wall_ms(self) -> int:
        """The time of the wall clock."""
        return self.boot_ms + self.wall_offset_ms

    def restart(self) -> None:
        """Start the machine again, which takes a minute."""
        wall_ms = self.wall_ms + MINUTE_MS
        self.boot_ms, self.boot_id = 5_000, 2
        self.wall_offset_ms = wall_ms - self.boot_ms

    def new_clock(self) -> AnchoredClock:
        """Return the clock of a process."""
        return AnchoredClock(
            unix_time=lambda: self.wall_ms / 1000,
            boot_ms=lambda: self.boot_ms,
            boot_id=lambda: self.boot_id,
        )


async def open_store(machine: FakeMachine, folder: Path) -> SqliteTaskStore:
    """Open the store of a process."""
    store = SqliteTaskStore(folder / "tasks.db", clock=machine.new_clock())
    await store.open()
    return store


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS])
def test_clock_does_not_follow_a_jump_of_the_wall_clock(jump_ms: int) -> None:
    """Only the time that passes on the boot clock counts."""
    machine = FakeMachine()
    clock = machine.new_clock()
    machine.boot_ms += 10
    assert START_MS + 10 == clock()

    machine.wall_offset_ms += jump_ms
    assert START_MS + 10 == clock()
    machine.boot_ms += 20
    assert START_MS + 30 == clock()


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS])
async def test_jump_ends_no_lease_and_no_wait(jump_ms: int, tmp_path: Path) -> None:
    """After a jump, another process claims neither leased tasks nor tasks that wait."""
    machine = FakeMachine()
    store = await open_store(machine, tmp_path)
    waiting = NewTask(task(2), delay_ms=MINUTE_MS)
    await store.add([NewTask(task(1), lease_on_add=True), waiting], LEASE)
    machine.wall_offset_ms += jump_ms
    other = await open_store(machine, tmp_path)
    for process in (store, other):
        assert START_MS == await process.ping()
        assert [] == (await process.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks
        assert START_MS == await process.read(lambda tx: tx.now)

    machine.boot_ms += MINUTE_MS
    claimed = await other.claim(OTHER_LEASE, limit=10, per_lane=10)
    assert [1, 2] == sorted(task_numbers(claimed.tasks))
    await store.close()
    await other.close()


async def _restart_service(machine: FakeMachine, folder: Path) -> SqliteTaskStore:
    return await open_store(machine, folder)


async def _restart_machine(machine: FakeMachine, folder: Path) -> SqliteTaskStore:
    machine.restart()
    return await open_store(machine, folder)


@pytest.mark.parametrize("restart", [_restart_service, _restart_machine])
async def test_wall_clock_is_read_again_after_a_restart(
    restart: Callable[[FakeMachine, Path], Awaitable[SqliteTaskStore]], tmp_path: Path
) -> None:
    """When all processes were stopped, the next one uses the time of the wall clock."""
    machine = FakeMachine()
    first = await open_store(machine, tmp_path)
    machine.wall_offset_ms += HOUR_MS
    second = await open_store(machine, tmp_path)
    await first.close()
    third = await open_store(machine, tmp_path)
    assert START_MS == await third.ping()
    await second.close()
    await third.close()

    last = await restart(machine, tmp_path)
    assert machine.wall_ms == await last.ping()
    await last.close()


async def test_machine_without_boot_id_has_one_clock_per_process(tmp_path: Path) -> None:
    """Without a boot id, an offset in the file could be from before a restart of the machine."""
    machine = FakeMachine()
    machine.boot_id = None
    first = await open_store(machine, tmp_path)
    machine.wall_offset_ms += HOUR_MS
    second = await open_store(machine, tmp_path)
    assert START_MS == await first.ping()
    assert START_MS + HOUR_MS == await second.ping()
    await first.close()
    await second.close()


def test_deviation_from_the_wall_clock_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A jump of more than five seconds is a warning, also when it is undone."""
    machine = FakeMachine()
    clock = machine.new_clock()
    messages: list[list[str]] = []
    with caplog.at_level(logging.WARNING, "tarry.service"):
        for jump_ms in (4_000, HOUR_MS, 0, -HOUR_MS - 4_000):
            caplog.clear()
            machine.wall_offset_ms += jump_ms
            for _ in range(3):
                clock()
            messages.append([record.message for record in caplog.records])

    assert [0, 1, 0, 1] == [len(logged) for logged in messages]
    assert "differs from the time of the store by +3604 s" in messages[1][0]
    assert "by +0 s" in messages[3][0]


def test_clocks_of_the_machine_can_be_read() -> None:
    """The boot clock does not run backwards, and a boot id fits into a column."""
    assert read_boot_ms() <= read_boot_ms()
    boot_id = read_boot_id()
    assert boot_id is None or (boot_id == read_boot_id() and 0 <= boot_id < 1 << 63)
