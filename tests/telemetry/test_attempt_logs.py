"""The listener that writes attempt logs for `tarry tune`."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import tarry
import tarry.telemetry
from tarry.runtime.effects import effects
from tarry.telemetry import attempt_log
from tarry.testing import VirtualClock
from tarry.tuning.attempt_log import OUTCOME_KINDS, read_attempt_log
from tests.runtime.drivers import DRIVERS, FAIL, OK, Dependency, Driver, Step

SLOW_FAILURE = Step(raises=ConnectionError("unreachable"), duration_s=0.2)
SLOW_SUCCESS = Step(duration_s=0.3)


@contextmanager
def listening(path: Path, **options: Any) -> Iterator[None]:
    """Write an attempt log while the block runs."""
    listener = attempt_log(path, **options)
    remove = tarry.listen(listener)
    try:
        yield
    finally:
        remove()
        listener.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
@pytest.mark.parametrize("has_downstream", [False, True])
def test_rows_of_a_call(
    driver: Driver,
    has_downstream: bool,
    clock: VirtualClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attempt has a row with the call's id, its number, start, duration, outcome and delay."""
    path = tmp_path / "attempts.jsonl"
    options = {"downstream": tarry.Downstream("payments")} if has_downstream else {}
    monkeypatch.setattr(effects, "unix_time", effects.now)
    started_ms = effects.unix_time() * 1000

    with listening(path):
        driver.run(clock, Dependency(clock, SLOW_FAILURE, SLOW_SUCCESS), **options)

    first, second = read_rows(path)
    assert first["taskId"] == second["taskId"]
    common = {"operation": "op", "downstream": "payments" if has_downstream else None}
    assert {
        "taskId": first["taskId"],
        "attemptNumber": 1,
        "startedAt": pytest.approx(started_ms, abs=0.01),
        "durationMs": pytest.approx(200.0),
        "outcome": "transient",
        "delayMs": pytest.approx(50.0),
        **common,
    } == first
    assert {
        "taskId": first["taskId"],
        "attemptNumber": 2,
        "startedAt": pytest.approx(started_ms + 250, abs=0.01),
        "durationMs": pytest.approx(300.0),
        "outcome": "success",
        "delayMs": None,
        **common,
    } == second


def test_tune_reads_the_log(
    clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tarry tune` reads the log: the attempts of each call, with their outcomes."""
    monkeypatch.setattr(effects, "unix_time", effects.now)
    path = tmp_path / "attempts.jsonl"
    dependency = Dependency(clock, FAIL, SLOW_SUCCESS, OK)

    with listening(path):
        for _ in range(2):
            tarry.call(dependency.call, on=ConnectionError)
        with suppress(ZeroDivisionError):
            tarry.call(lambda: 1 / 0, on=ConnectionError)

    log = read_attempt_log(path)
    assert [1, 2, 1, 1] == list(log.numbers)
    assert ["transient", "success", "success", "permanent"] == [
        OUTCOME_KINDS[kind].value for kind in log.kinds
    ]
    assert 3 == len(set(log.tasks))


def test_an_attempt_that_began_before_the_listener_is_not_logged(tmp_path: Path) -> None:
    """An attempt that began without a listener has no known duration, and is not logged."""
    path = tmp_path / "attempts.jsonl"
    removers: list[Callable[[], None]] = []

    @tarry.retry(on=ConnectionError, policy=tarry.Policy(initial_delay=0.001))
    def call() -> str:
        if not removers:
            removers.append(tarry.listen(attempt_log(path)))
            raise ConnectionError
        return "done"

    assert "done" == call()
    removers[0]()

    assert [2] == [row["attemptNumber"] for row in read_rows(path)]


def test_hedged_calls_are_not_logged(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"

    with listening(path):
        tarry.hedge_sync(lambda: "done", after=1.0)

    assert [] == read_rows(path)


def make_calls(count: int) -> None:
    """Make calls that succeed."""
    for _ in range(count):
        tarry.call(lambda: "done", on=ConnectionError)


def test_rotation(tmp_path: Path) -> None:
    """A full file is renamed, and only `backups` renamed files are kept; each line is complete."""
    path = tmp_path / "attempts.jsonl"

    with listening(path, max_bytes=1_000, backups=2):
        make_calls(100)

    files = sorted(tmp_path.iterdir())
    assert ["attempts.jsonl", "attempts.jsonl.1", "attempts.jsonl.2"] == [f.name for f in files]
    assert all(0 < file.stat().st_size <= 1_000 for file in files)
    numbers = [
        int(row["taskId"].rpartition("-")[2]) for file in reversed(files) for row in read_rows(file)
    ]
    assert list(range(numbers[0], numbers[0] + len(numbers))) == numbers
    assert len(read_attempt_log(files[1])) > 1


def test_a_line_longer_than_the_file_is_written(tmp_path: Path) -> None:
    """A line that is longer than `max_bytes` gets a file of its own."""
    path = tmp_path / "attempts.jsonl"

    with listening(path, max_bytes=10):
        make_calls(3)

    assert [1, 1] == [len(read_rows(file)) for file in sorted(tmp_path.iterdir())]


def test_two_processes_share_a_file(tmp_path: Path) -> None:
    """If another process has renamed the full file, the listener writes to the new file."""
    path = tmp_path / "attempts.jsonl"

    with listening(path, max_bytes=1_000), listening(path, max_bytes=1_000):
        make_calls(30)

    rows = [read_rows(file) for file in sorted(tmp_path.iterdir())]
    assert 2 == len(rows)
    assert all(rows)


def test_rotation_holds_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a process checks and renames the full file, no other process has its lock."""
    path = tmp_path / "attempts.jsonl"
    is_same_file = os.path.samestat
    could_lock: list[bool] = []

    def try_lock(first: os.stat_result, second: os.stat_result) -> bool:
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                could_lock.append(False)
            else:
                could_lock.append(True)
        return is_same_file(first, second)

    monkeypatch.setattr(os.path, "samestat", try_lock)
    with listening(path, max_bytes=10):
        make_calls(2)

    assert [False] == could_lock


def test_a_file_that_another_process_renames_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another process renames the full file first, the listener does not rename its new file."""
    path = tmp_path / "attempts.jsonl"

    def rename_first(_descriptor: int, _operation: int) -> None:
        path.rename(f"{path}.1")
        path.touch()

    monkeypatch.setattr(fcntl, "flock", rename_first)
    with listening(path, max_bytes=10):
        make_calls(2)

    assert [1, 1] == [len(read_rows(file)) for file in sorted(tmp_path.iterdir())]


def test_rotation_without_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full file is also renamed on a file system that has no locks."""
    path = tmp_path / "attempts.jsonl"

    def raise_error(_descriptor: int, _operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", raise_error)
    with listening(path, max_bytes=10):
        make_calls(2)

    assert [1, 1] == [len(read_rows(file)) for file in sorted(tmp_path.iterdir())]


def test_a_file_that_was_removed_is_created_again(tmp_path: Path) -> None:
    """When the full file no longer exists, the listener creates a new one."""
    path = tmp_path / "attempts.jsonl"

    with listening(path, max_bytes=400):
        make_calls(2)
        path.unlink()
        make_calls(1)

    assert 1 == len(read_rows(path))


def test_an_existing_log_is_continued(tmp_path: Path) -> None:
    """A restarted program appends to its log."""
    path = tmp_path / "attempts.jsonl"

    for _ in range(2):
        with listening(path):
            make_calls(1)

    assert 2 == len(read_rows(path))


def test_a_full_disk_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the log cannot be written, calls succeed and there is one warning until it is written."""
    path = tmp_path / "attempts.jsonl"

    def raise_error(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with listening(path):
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", raise_error)
                make_calls(5)
            make_calls(1)

    warnings = [record.getMessage() for record in caplog.records]
    expected = f"attempt log cannot be written, attempts are lost, path={path} "
    assert [expected + "error=[Errno 28] No space left on device"] * 2 == warnings
    assert 2 == len(read_rows(path))


def test_a_file_that_cannot_be_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that could not be opened after a rotation is opened for a later attempt."""
    path = tmp_path / "attempts.jsonl"
    open_file = os.open

    def raise_error(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with listening(path, max_bytes=10):
        make_calls(1)
        monkeypatch.setattr(os, "open", raise_error)
        make_calls(2)
        monkeypatch.setattr(os, "open", open_file)
        make_calls(1)

    assert [1, 1] == [len(read_rows(file)) for file in sorted(tmp_path.iterdir())]


def test_attempts_after_close_are_dropped(tmp_path: Path) -> None:
    """A closed listener does not open its file again, and may be closed twice."""
    path = tmp_path / "attempts.jsonl"
    listener = attempt_log(path)
    remove = tarry.listen(listener)
    make_calls(1)
    listener.close()
    make_calls(1)
    listener.close()
    remove()

    assert 1 == len(read_rows(path))


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    """A path that cannot be written raises at once, not in a call."""
    with pytest.raises(OSError, match="No such file"):
        attempt_log(tmp_path / "missing" / "attempts.jsonl")


@pytest.mark.parametrize("option", ["max_bytes", "backups"])
def test_invalid_options(option: str, tmp_path: Path) -> None:
    """An invalid option raises an error that names it."""
    options: dict[str, Any] = {option: 0}
    with pytest.raises(tarry.ConfigurationError, match=option):
        attempt_log(tmp_path / "attempts.jsonl", **options)


def test_unknown_names() -> None:
    """The package has no other names."""
    with pytest.raises(AttributeError, match="no attribute 'attempt_file'"):
        _ = tarry.telemetry.attempt_file
