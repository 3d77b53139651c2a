"""Run the command as a user does, in a process of its own or, which is quicker, in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from tarry.cli.app import app
from tarry.errors import ConfigurationError

ROOT = Path(__file__).parents[2]


def tarry(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `tarry` in the root of the repository, 80 columns wide."""
    return subprocess.run(
        [sys.executable, "-m", "tarry", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", **environment},
    )


def simulate(*arguments: object, width: int = 80) -> Result:
    """Run `tarry simulate` in this process; a mistake is raised."""
    result = CliRunner(env={"COLUMNS": str(width), "TERM": "dumb"}).invoke(
        app, ["simulate", *map(str, arguments)]
    )
    if isinstance(result.exception, ConfigurationError):
        raise result.exception
    return result
