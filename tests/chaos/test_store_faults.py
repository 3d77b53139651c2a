"""Disk faults under a running service: it reports them, loses nothing, and recovers by itself."""

from __future__ import annotations

import resource
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
ON_A_SMALL_DISK = ("unshare", "--map-root-user", "--mount", "sh", "-c")
MOUNTED = 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"'
RUNNING, LATER = 20, 20


@contextmanager
def full(running: Service) -> Iterator[None]:
    """Fill the disk: ENOSPC."""
    disk = Path(f"/proc/{running.process.pid}/root{running.folder}")
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1024))
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def limited(running: Service) -> Iterator[None]:
    """Limit the file size of the processes: EFBIG."""
    kind, pids = resource.RLIMIT_FSIZE, [running.process.pid, *children(running.process.pid)]
    soft, hard = resource.prlimit(pids[0], kind)
    for pid in pids:
        resource.prlimit(pid, kind, (4096, hard))
    try:
        yield
    finally:
        for pid in pids:
            resource.prlimit(pid, kind, (soft, hard))


def children(pid: int) -> list[int]:
    """Return the ids of the child processes."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]


@contextmanager
def read_only(running: Service) -> Iterator[None]:
    """Make the files immutable, also for processes that have opened them: EPERM."""
    files = [str(running.folder / name) for name in ("tarry.db", "tarry.db-wal")]
    assert _can("chattr", "+i", *files)
    try:
        yield
    finally:
        assert _can("chattr", "-i", *files)


@contextmanager
def moved(running: Service) -> Iterator[None]:
    """Rename the database file."""
    database = running.folder / "tarry.db"
    elsewhere = database.rename(running.folder / "elsewhere")
    try:
        yield
    finally:
        elsewhere.rename(database)


def _can(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", [full, limited, read_only, moved])
def test_service_recovers_from_a_store_fault(fault: Fault, tmp_path: Path) -> None:
    """It returns 503 and is not ready; no attempt is lost or repeated, and no restart is needed."""
    within: tuple[str, ...] = ()
    if fault is full:
        within = (*ON_A_SMALL_DISK, MOUNTED, str(tmp_path))
        if not _can(*within, "true"):
            pytest.skip("a separate disk needs user namespaces: run as root, or allow them")
    if fault is read_only:
        (tmp_path / "file").touch()
        if not _can("chattr", "+i", str(tmp_path / "file")):
            pytest.skip("needs root, and a file system that supports chattr +i")
        _can("chattr", "-i", str(tmp_path / "file"))
    gate = threading.Event()

    def respond_slowly(_path: str, _number: int) -> int:
        gate.wait(60)
        return 200

    with target(respond_slowly) as to, service(tmp_path, within=within) as running:
        accepted = {running.post(targetUrl=f"{to.url}/{n}")["taskId"] for n in range(RUNNING)}
        for n in range(LATER):
            accepted.add(running.post(targetUrl=f"{to.url}/later/{n}", delayMs=2000)["taskId"])
        running.wait_for(lambda: len(to.seen) >= RUNNING)
        more = 0
        with fault(running):
            while True:  # the WAL file may have space for a few more
                status, answer, headers = running.reply(
                    "POST",
                    "/retry-tasks",
                    {"targetUrl": f"{to.url}/more/{more}", "body": "x" * 9999},
                )
                if status != 201:
                    break
                more += 1
                accepted.add(answer["taskId"])
            assert 503 == status
            assert 1 <= int(headers["retry-after"])
            running.wait_for(lambda: running.request("GET", "/readyz")[0] == 503)
            assert 200 == running.request("GET", "/healthz")[0]
            assert "store" in running.request("GET", "/readyz")[1]["failing"]
            gate.set()  # attempts end, and their results cannot be written
            for _ in range(50):
                assert 503 == running.request("GET", "/readyz")[0]
                time.sleep(0.05)

        running.wait_for(lambda: running.request("GET", "/readyz")[0] == 200)
        running.wait_for(
            lambda: all(running.task(one)["status"] == "SUCCEEDED" for one in accepted)
        )
        assert accepted == {task["taskId"] for task in running.all_tasks()}
        assert RUNNING + LATER + more == len(to.seen)
        assert {1} == {len(requests) for requests in to.seen.values()}
        assert {1} == {task["attemptNumber"] for task in running.all_tasks()}
        running.wait_until_finished(running.post(targetUrl=f"{to.url}/after")["taskId"])
