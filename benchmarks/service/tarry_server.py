"""Runs `tarry serve` in a separate process, with SQLite (synchronous=FULL)."""

from __future__ import annotations

import http.client
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.service.processes import ProcessGroup

SERVE_COMMAND = (sys.executable, "-m", "tarry", "serve", "--dev")
START_TIMEOUT_S = 30.0


def environ(folder: Path, port: int) -> dict[str, str]:
    """Return the environment variables for the service and its clients."""
    return {"TARRY_STORE": f"sqlite:{folder / 'tarry.db'}", "TARRY_PORT": str(port)}


def address(port: int | str = "") -> str:
    """Return the address of the service; the default port is in TARRY_PORT."""
    return f"http://127.0.0.1:{port or os.environ['TARRY_PORT']}"


def is_ready(port: int | str = "") -> bool:
    """Return whether the service accepts tasks."""
    host_and_port = address(port).removeprefix("http://")
    connection = http.client.HTTPConnection(host_and_port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def wait_until_ready(port: int | str = "", check: Callable[[], None] = lambda: None) -> None:
    """Wait until the service accepts tasks; `check` raises an error if its process has ended."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_ready(port):
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"tarry serve is not ready after {START_TIMEOUT_S:g} s")
        time.sleep(0.05)


def start(group: ProcessGroup, port: int) -> int:
    """Start the service and wait until it is ready; return its process id."""
    process = group.start(SERVE_COMMAND)
    wait_until_ready(port, group.check)
    return process.pid
