"""The HTTP server to which all candidates send requests, compiled from target.c."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).with_name("target.c")


class TaskRequests(NamedTuple):
    """The requests of one task: first arrival, and time from its 503 to the next attempt."""

    arrived_at: float
    """Epoch milliseconds."""
    gap_ms: float | None
    """None if the task got no 503."""


class Target:
    """A running target."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port

    def reset(self) -> None:
        self._request("POST", "/reset")

    def stats(self) -> dict[str, float]:
        return json.loads(self._request("GET", "/stats"))

    def log(self) -> dict[int, TaskRequests]:
        """Return the requests of each task, by the number of the task."""
        rows = (line.split() for line in self._request("GET", "/log").splitlines())
        return {
            int(task): TaskRequests(float(arrived), float(gap) if float(gap) >= 0 else None)
            for task, arrived, gap in rows
        }

    def _request(self, method: str, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request(method, path)
            return connection.getresponse().read()
        finally:
            connection.close()


@contextmanager
def running_target(folder: Path) -> Iterator[Target]:
    """Compile the target and run it in a separate process."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SystemExit("the target needs a C compiler: install cc, gcc or clang")
    program = folder / "target"
    subprocess.run([compiler, "-O2", "-o", str(program), str(SOURCE)], check=True)
    process = subprocess.Popen(
        [str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Target(int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait()
