"""The command line: one file for each command, each importing what it needs when it runs."""

from __future__ import annotations

import signal
import sys
from importlib import import_module

from tarry.errors import TarryError

__all__ = ["main"]


def main() -> None:
    """Run `tarry`; the exit codes are in `failures`."""
    try:
        for name in ("rich", "typer"):
            import_module(name)
    except ImportError:
        sys.stderr.write("tarry's command line needs typer and rich: pip install 'tarry[sim]'\n")
        sys.exit(1)
    from tarry.cli.app import app
    from tarry.cli.exit_codes import INTERRUPTED, code_of, words_of

    signal.signal(signal.SIGTERM, _terminated)
    try:
        app(prog_name="tarry")
        sys.stdout.flush()  # here, where a reader that has left can be told from a fault
    except TarryError as error:
        from tarry.cli.output import plain

        sys.stderr.write(f"error: {plain(words_of(error))}\n")
        sys.exit(code_of(error))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stdout = None
        sys.exit(1)


def _terminated(_signal: int, _frame: object) -> None:
    """Leave as after Ctrl-C, so that no process of a simulation stays behind."""
    sys.exit(128 + signal.SIGTERM)
