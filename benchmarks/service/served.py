"""`tarry serve` in a process of its own, on a SQLite file (synchronous=FULL), as a user runs it."""

from __future__ import annotations

import http.client
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.service.processes import Group

SERVE = (sys.executable, "-m", "tarry", "serve", "--dev")
STARTS_WITHIN_S = 30.0


def environ(folder: Path, port: int) -> dict[str, str]:
    """Return what the service, and those who look for it, have to know."""
    return {"TARRY_STORE": f"sqlite:{folder / 'tarry.db'}", "TARRY_PORT": str(port)}


def address(port: int | str = "") -> str:
    """Return the address of the service; the default port is in the environment."""
    return f"http://127.0.0.1:{port or os.environ['TARRY_PORT']}"


def is_ready(port: int | str = "") -> bool:
    """Return whether the service accepts tasks."""
    where = address(port).removeprefix("http://")
    connection = http.client.HTTPConnection(where, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def await_ready(port: int | str = "", check: Callable[[], None] = lambda: None) -> None:
    """Wait until it takes tasks; `check` raises when there is nothing to wait for."""
    deadline = time.monotonic() + STARTS_WITHIN_S
    while not is_ready(port):
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"tarry serve is not ready after {STARTS_WITHIN_S:g} s")
        time.sleep(0.05)


def start(group: Group, port: int) -> int:
    """Start the service and wait until it is ready; return its process id."""
    process = group.start(SERVE)
    await_ready(port, group.check)
    return process.pid
