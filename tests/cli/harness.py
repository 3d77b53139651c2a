"""Runs commands in this process, which is faster, or in a new process."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner, Result

from tarry import cli
from tarry.cli.app import app
from tarry.errors import ConfigurationError
from tarry.service.app import make_store


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, parsed as one JSON document."""
        return json.loads(self.out)


class FakeStdin(io.TextIOWrapper):
    """Standard input: a terminal or a pipe."""

    def __init__(self, content: bytes, *, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(content))
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        """Return whether this input is a terminal."""
        return self._is_terminal


def run_command(*arguments: object, stdin: bytes = b"", is_terminal: bool = False) -> CommandResult:
    """Run a command in this process and restore logging and signal handlers."""
    out, err = io.StringIO(), io.StringIO()
    handler, logger = signal.getsignal(signal.SIGTERM), logging.getLogger("tarry")
    code: Any = 0
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(logger, "handlers", [*logger.handlers])
            patch.setattr(sys, "argv", ["tarry", *map(str, arguments)])
            patch.setattr(sys, "stdin", FakeStdin(stdin, is_terminal=is_terminal))
            cli.main()
    except SystemExit as exit_:
        code = exit_.code or 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    return CommandResult(code, out.getvalue(), err.getvalue())


def create_store(url: object) -> None:
    """Create an empty store, as the first start of `tarry serve` does."""

    async def main() -> None:
        store = make_store(str(url))
        await store.open()
        await store.close()

    asyncio.run(main())


ROOT = Path(__file__).parents[2]


def run_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `tarry` in the root of the repository, 80 columns wide."""
    return subprocess.run(
        [sys.executable, "-m", "tarry", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", **environment},
    )


def run_simulate(*arguments: object, width: int = 80) -> Result:
    """Run `tarry simulate` in this process; a ConfigurationError is raised."""
    result = CliRunner(env={"COLUMNS": str(width), "TERM": "dumb"}).invoke(
        app, ["simulate", *map(str, arguments)]
    )
    if isinstance(result.exception, ConfigurationError):
        raise result.exception
    return result
