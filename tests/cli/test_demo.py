"""`tarry demo` in a terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tarry.cli.demo import (
    DROP_CONNECTION,
    RESPONSES_BY_PATH,
    TOO_MANY_REQUESTS,
    FlakyTargets,
)

COMMAND = [sys.executable, "-m", "tarry", "demo"]


def run_in_terminal(folder: Path) -> tuple[int, str]:
    """Run the demo in a pseudo-terminal; return the exit code and the screen output."""
    terminal, child_terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "TMPDIR": str(folder)}
    with subprocess.Popen(
        COMMAND, stdout=child_terminal, stderr=child_terminal, env=environment
    ) as process:
        os.close(child_terminal)
        screen = b""
        while chunk := _read_chunk(terminal):
            screen += chunk
    os.close(terminal)
    return process.returncode, screen.decode()


def _read_chunk(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the demo has closed its end
        return b""


@pytest.mark.long_run
def test_all_calls_are_delivered(tmp_path: Path) -> None:
    """The demo prints lines in a pipe and a table in a terminal, and removes its files."""
    piped = subprocess.Popen(
        COMMAND,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    code, screen = run_in_terminal(tmp_path)
    out, err = piped.communicate()

    attempts = sum(len(failures) + 1 for failures in RESPONSES_BY_PATH.values())
    retried = sum(bool(failures) for failures in RESPONSES_BY_PATH.values())
    calls = len(RESPONSES_BY_PATH)
    summary = f"All {calls} calls were delivered, in {attempts} attempts: {retried} were retried"
    assert (0, 0, "") == (code, piped.returncode, err)
    assert attempts == out.count(": attempt ")
    assert "mail 12: attempt 4 got 503; stopped: no attempts left\n" in out
    assert "\nIt is a dead letter: no attempt follows until it is replayed" in out
    assert "mail 12: attempt 5 got 200\n" in out
    assert summary in out
    assert summary in " ".join(screen.split())
    for text in ("next attempt", "last result", "PENDING", "SUCCEEDED", "EXHAUSTED", "reset"):
        assert text in screen
    assert [] == list(tmp_path.iterdir())


def test_service_that_does_not_start_is_reported(tmp_path: Path) -> None:
    """When the service does not start, the demo prints the service's error."""
    environment = {**os.environ, "TARRY_LEASE_MS": "1", "TMPDIR": str(tmp_path)}

    result = subprocess.run(COMMAND, capture_output=True, text=True, check=False, env=environment)

    assert 4 == result.returncode
    assert "error: the service did not start: " in result.stderr
    assert "TARRY_LEASE_MS: lease_ms must be at least" in result.stderr
    assert [] == list(tmp_path.iterdir())


def test_targets_send_the_scripted_responses() -> None:
    """Each request gets its scripted response, then 200; after the fix always 200."""
    responses = {"/a/1": ("503", DROP_CONNECTION, TOO_MANY_REQUESTS), "/a/2": ("503", "503")}
    with FlakyTargets(responses).run() as flaky:
        sent = [flaky.next_response("/a/1", "k") for _ in range(5)]
        before = flaky.next_response("/a/2", "k")
        flaky.is_fixed = True
        after = flaky.next_response("/a/2", "k")

    assert ["503", DROP_CONNECTION, TOO_MANY_REQUESTS, "200", "200"] == sent
    assert ["503", "200"] == [before, after]
    assert ["k", "k"] == flaky.idempotency_keys["/a/2"]
