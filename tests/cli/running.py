"""Run the command as a user does, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
