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


class Failed(Exception):
    """A candidate failed; the message has the end of its log."""


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and all its descendants, the ended ones too."""
    total = 0.0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += sum(one.cpu_times()[:4])  # its own, and those of children it waited for
    return total


class Group:
    """Processes with one environment and one log, which end together."""

    def __init__(self, environ: dict[str, str], folder: Path) -> None:
        self._environ = {**os.environ, **environ, "PYTHONUNBUFFERED": "1"}
        self._log = folder / "log"
        self._all: list[subprocess.Popen] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc) -> None:
        for process in self._all:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self, command: tuple[str, ...], **pipes: int) -> subprocess.Popen:
        """Start a process, with children that can be found again."""
        with self._log.open("ab") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, **pipes}
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._environ, start_new_session=True, text=True, **pipes
            )
        self._all.append(process)
        return process

    def finish(self, command: tuple[str, ...]) -> None:
        """Run a process to its end."""
        if self.start(command).wait():
            raise Failed(f"{' '.join(command)} failed:\n{self.last_words()}")

    def check(self) -> None:
        """Raise when a process has ended that should not have."""
        for process in self._all:
            if process.poll():
                raise Failed(f"a process ended with {process.returncode}:\n{self.last_words()}")

    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


class Enqueuer:
    """A process that enqueues tasks on command; see `peers.common.serve`."""

    def __init__(self, group: Group, command: tuple[str, ...], patience: float) -> None:
        self._group = group
        self._patience = patience
        self._process = group.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        if self._answer() != "ready":
            raise Failed(f"the enqueuer is not ready:\n{group.last_words()}")

    def enqueue(self, count: int) -> tuple[float, float]:
        """Enqueue; return when it began (monotonic seconds) and the processor time it took."""
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        result = json.loads(self._answer())
        return result["began"], result["cpu"]

    def _listen(self) -> None:
        for line in self._process.stdout:
            self._said.put(line.strip())
        self._said.put("")

    def _answer(self) -> str:
        try:
            said = self._said.get(timeout=self._patience)
        except queue.Empty:
            raise Failed(f"the enqueuer is silent:\n{self._group.last_words()}") from None
        if not said:
            raise Failed(f"the enqueuer has ended:\n{self._group.last_words()}")
        return said
