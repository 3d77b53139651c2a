"""The command line: one file for each command, each importing what it needs when it runs."""

from __future__ import annotations

import signal
import sys
from importlib import import_module

from tarry.errors import TarryError

__all__ = ["main"]


def main() -> None:
    """Run `tarry`: exit with 1 for a claim that fails, 2 for a mistake, 130 for Ctrl-C."""
    try:
        for name in ("rich", "typer"):
            import_module(name)
    except ImportError:
        sys.stderr.write("tarry's command line needs typer and rich: pip install 'tarry[sim]'\n")
        sys.exit(1)
    from tarry.cli.app import app
    from tarry.cli.words import plain

    signal.signal(signal.SIGTERM, _terminated)
    try:
        app(prog_name="tarry")
        sys.stdout.flush()  # here, where a reader that has left can be told from a fault
    except TarryError as error:
        sys.stderr.write(f"error: {plain(str(error))}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except BrokenPipeError:
        sys.stdout = None
        sys.exit(1)


def _terminated(_signal: int, _frame: object) -> None:
    """Leave as after Ctrl-C, so that no process of a simulation stays behind."""
    sys.exit(128 + signal.SIGTERM)
