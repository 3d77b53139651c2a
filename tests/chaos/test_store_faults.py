"""Disk faults while a service runs: the service reports them, loses no task, and recovers."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.integration.service import Service, service, target

Fault: TypeAlias = Callable[[Service], AbstractContextManager[None]]
UNSHARE_MOUNTS = ("unshare", "--map-root-user", "--mount", "sh", "-c")
MOUNT_AND_EXEC = 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"'
RUNNING_COUNT, DELAYED_COUNT = 8, 20  # a new lane starts 8 attempts at a time


@contextmanager
def full_disk(running_service: Service) -> Iterator[None]:
    """Fill the disk: ENOSPC."""
    disk = Path(f"/proc/{running_service.process.pid}/root{running_service.folder}")
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1024))
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def file_size_limit(running_service: Service) -> Iterator[None]:
    """Limit the size of the files that the service writes: EFBIG."""
    limit, pids = (
        resource.RLIMIT_FSIZE,
        [running_service.process.pid, *child_pids(running_service.process.pid)],
    )
    soft, hard = resource.prlimit(pids[0], limit)
    for pid in pids:
        resource.prlimit(pid, limit, (4096, hard))
    try:
        yield
    finally:
        for pid in pids:
            resource.prlimit(pid, limit, (soft, hard))


def child_pids(pid: int) -> list[int]:
    """Return the ids of the child processes of a process."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


@contextmanager
def immutable_files(running_service: Service) -> Iterator[None]:
    """Make the files immutable, also for the process that has opened them: EPERM."""
    files = [str(running_service.folder / name) for name in ("tarry.db", "tarry.db-wal")]
    assert _succeeds("chattr", "+i", *files)
    try:
        yield
    finally:
        assert _succeeds("chattr", "-i", *files)


@contextmanager
def renamed_database(running_service: Service) -> Iterator[None]:
    """Rename the database file."""
    database = running_service.folder / "tarry.db"
    renamed = database.rename(running_service.folder / "elsewhere")
    try:
        yield
    finally:
        renamed.rename(database)


def _succeeds(*command: str) -> bool:
    """Run a command; return whether it exists and exits with 0."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def skip_without_immutable_files(folder: Path) -> None:
    """Skip the test if files in this folder cannot be made immutable."""
    (folder / "file").touch()
    if not _succeeds("chattr", "+i", str(folder / "file")):
        pytest.skip("needs root, and a file system that supports chattr +i")
    _succeeds("chattr", "-i", str(folder / "file"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", [full_disk, file_size_limit, immutable_files, renamed_database])
def test_service_recovers_from_a_store_fault(fault: Fault, tmp_path: Path) -> None:
    """The service returns 503 during the fault, and makes one attempt of each accepted task."""
    command_prefix: tuple[str, ...] = ()
    if fault is full_disk:
        command_prefix = (*UNSHARE_MOUNTS, MOUNT_AND_EXEC, str(tmp_path))
        if not _succeeds(*command_prefix, "true"):
            pytest.skip("a separate disk needs user namespaces: run as root, or enable them")
    if fault is immutable_files:
        skip_without_immutable_files(tmp_path)
    may_respond = threading.Event()

    def respond_slowly(_path: str, _number: int) -> int:
        may_respond.wait(60)
        return 200

    with (
        target(respond_slowly) as receiver,
        service(tmp_path, command_prefix=command_prefix) as running_service,
    ):
        accepted = {
            running_service.post(targetUrl=f"{receiver.url}/{n}")["taskId"]
            for n in range(RUNNING_COUNT)
        }
        for n in range(DELAYED_COUNT):
            accepted.add(
                running_service.post(targetUrl=f"{receiver.url}/delayed/{n}", delayMs=2000)[
                    "taskId"
                ]
            )
        running_service.wait_for(lambda: len(receiver.received_requests) >= RUNNING_COUNT)
        extra_count = 0
        with fault(running_service):
            while True:  # the WAL file may have space for a few more tasks
                status, body, headers = running_service.send(
                    "POST",
                    "/retry-tasks",
                    {"targetUrl": f"{receiver.url}/extra/{extra_count}", "body": "x" * 9999},
                )
                if status != 201:
                    break
                extra_count += 1
                accepted.add(body["taskId"])
            assert 503 == status
            assert 1 <= int(headers["retry-after"])
            running_service.wait_for(lambda: running_service.request("GET", "/readyz")[0] == 503)
            assert 200 == running_service.request("GET", "/healthz")[0]
            failing = running_service.request("GET", "/readyz")[1]["failing"]
            assert {"store", "adding"} & set(failing)
            may_respond.set()  # attempts end, but their results cannot be written
            for _ in range(50):
                assert 503 == running_service.request("GET", "/readyz")[0]
                time.sleep(0.05)

        running_service.wait_for(lambda: running_service.request("GET", "/readyz")[0] == 200)
        running_service.wait_for(
            lambda: all(
                running_service.task(task_id)["status"] == "SUCCEEDED" for task_id in accepted
            )
        )
        assert accepted == {task["taskId"] for task in running_service.all_tasks()}
        assert RUNNING_COUNT + DELAYED_COUNT + extra_count == len(receiver.received_requests)
        assert {1} == {len(requests) for requests in receiver.received_requests.values()}
        assert {1} == {task["attemptNumber"] for task in running_service.all_tasks()}
        running_service.wait_until_finished(
            running_service.post(targetUrl=f"{receiver.url}/after")["taskId"]
        )


@pytest.mark.timeout(120)
def test_no_task_is_lost_if_the_write_ahead_log_is_deleted(tmp_path: Path) -> None:
    """Tasks that are accepted after the deletion exist after the service was killed."""
    with service(tmp_path) as running_service:
        for total, suffixes in ((20, ("-wal",)), (40, ("-shm", "-wal"))):
            for suffix in suffixes:
                (running_service.folder / f"tarry.db{suffix}").unlink()
            for n in range(20):
                running_service.post(targetUrl=f"http://127.0.0.1:9/{n}", delayMs=3_600_000)
            accepted = {task["taskId"] for task in running_service.all_tasks()}
            assert total == len(accepted)
            # The writer process is killed too: otherwise it would close its connection, which
            # copies the deleted file.
            running_service.process.send_signal(signal.SIGSTOP)
            for pid in child_pids(running_service.process.pid):
                os.kill(pid, signal.SIGKILL)
            running_service.kill()
            running_service.start()
            assert accepted == {task["taskId"] for task in running_service.all_tasks()}


@pytest.mark.timeout(120)
def test_service_stops_on_a_read_only_disk(tmp_path: Path) -> None:
    """SIGTERM ends the service with exit code 0 and without a traceback."""
    skip_without_immutable_files(tmp_path)
    with service(tmp_path) as running_service:
        running_service.post(targetUrl="http://127.0.0.1:9/", delayMs=3_600_000)
        files = [str(path) for path in running_service.folder.glob("tarry.db*")]
        assert _succeeds("chattr", "+i", *files, str(running_service.folder))
        try:
            exit_code = running_service.stop()
        finally:
            assert _succeeds("chattr", "-i", str(running_service.folder), *files)
        log = (running_service.folder / "log").read_text()
        running_service.start()

    assert 0 == exit_code
    assert "Traceback" not in log
