"""Starts and stops the processes of a benchmark, and measures their processor time."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).resolve().parents[2]


class BenchmarkError(Exception):
    """A candidate failed; the message has the end of its log."""


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants, including ended ones."""
    total = 0.0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += sum(each.cpu_times()[:4])  # includes its ended children
    return total


class ProcessGroup:
    """Processes with a common environment and log file, which are killed together."""

    def __init__(self, environ: dict[str, str], folder: Path) -> None:
        self._environ = {**os.environ, **environ, "PYTHONUNBUFFERED": "1"}
        self._log = folder / "log"
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self, command: tuple[str, ...], **pipes: int) -> subprocess.Popen:
        """Start a process in a new session, so that it can be killed with its children."""
        with self._log.open("ab") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, **pipes}
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._environ, start_new_session=True, text=True, **pipes
            )
        self._processes.append(process)
        return process

    def run(self, command: tuple[str, ...]) -> None:
        """Run a process to its end; raise `BenchmarkError` if it fails."""
        if self.start(command).wait():
            raise BenchmarkError(f"{' '.join(command)} failed:\n{self.log_tail()}")

    def check(self) -> None:
        """Raise `BenchmarkError` if a process has ended with an error."""
        for process in self._processes:
            if process.poll():
                raise BenchmarkError(
                    f"a process ended with {process.returncode}:\n{self.log_tail()}"
                )

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


class Enqueuer:
    """A process that enqueues tasks on command; see `peers.common.run_enqueuer`."""

    def __init__(self, group: ProcessGroup, command: tuple[str, ...], timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._process = group.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._output_lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read_output, daemon=True).start()
        if self._next_line() != "ready":
            raise BenchmarkError(f"the enqueuer is not ready:\n{group.log_tail()}")

    def enqueue(self, count: int) -> tuple[float, float]:
        """Enqueue tasks; return the start in monotonic seconds, and the processor seconds used."""
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        result = json.loads(self._next_line())
        return result["started"], result["cpu"]

    def _read_output(self) -> None:
        for line in self._process.stdout:
            self._output_lines.put(line.strip())
        self._output_lines.put("")

    def _next_line(self) -> str:
        try:
            line = self._output_lines.get(timeout=self._timeout_s)
        except queue.Empty:
            raise BenchmarkError(
                f"the enqueuer did not respond in time:\n{self._group.log_tail()}"
            ) from None
        if not line:
            raise BenchmarkError(f"the enqueuer has ended:\n{self._group.log_tail()}")
        return line
