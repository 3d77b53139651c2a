"""Runs `tarry serve` in a separate process, by default with SQLite (synchronous=FULL)."""

from __future__ import annotations

import http.client
import json
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


def store_url(folder: Path) -> str:
    """Return the URL of the SQLite store in a folder."""
    return f"sqlite:{folder / 'tarry.db'}"


def environ(folder: Path, port: int, url: str = "") -> dict[str, str]:
    """Return the environment variables for the service and its clients.

    The default store is the SQLite store in the folder.
    """
    return {"TARRY_STORE": url or store_url(folder), "TARRY_PORT": str(port)}


def address(port: int | str = "") -> str:
    """Return the address of the service; the default port is in TARRY_PORT."""
    return f"http://127.0.0.1:{port or os.environ['TARRY_PORT']}"


def is_ready(port: int | str = "") -> bool:
    """Return whether the service accepts tasks."""
    return _get("/readyz", port) is not None


def count_processes(port: int | str = "") -> int:
    """Return the number of processes that use the store."""
    response = _get("/workers", port)
    return 0 if response is None else len(json.loads(response)["items"])


def _get(path: str, port: int | str) -> bytes | None:
    """Return the body of a response; None if the service is not ready to respond."""
    host_and_port = address(port).removeprefix("http://")
    connection = http.client.HTTPConnection(host_and_port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    except OSError:
        return None
    finally:
        connection.close()


def wait_until_ready(
    port: int | str = "", check: Callable[[], None] = lambda: None, processes: int = 1
) -> None:
    """Wait until the service accepts tasks; `check` raises an error if its process has ended.

    If the service has several processes, all of them must have started.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_ready(port) or (processes > 1 and count_processes(port) < processes):
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"tarry serve is not ready after {START_TIMEOUT_S:g} s")
        time.sleep(0.05)


def start(group: ProcessGroup, port: int, processes: int = 1) -> int:
    """Start the service, wait until all its processes are ready; return the id of the first."""
    workers = ("--workers", str(processes)) if processes > 1 else ()
    process = group.start((*SERVE_COMMAND, *workers))
    wait_until_ready(port, group.check, processes)
    return process.pid
