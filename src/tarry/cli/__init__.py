"""The command line. Each command is a module that imports its dependencies only when it runs."""

from __future__ import annotations

import signal
import sys
from importlib import import_module

from tarry.errors import TarryError

__all__ = ["main"]


def main() -> None:
    """Run `tarry`; `exit_codes` lists the exit codes."""
    try:
        for name in ("rich", "typer"):
            import_module(name)
    except ImportError:
        sys.stderr.write("tarry's command line needs typer and rich: pip install 'tarry[sim]'\n")
        sys.exit(1)
    from tarry.cli.app import app
    from tarry.cli.exit_codes import EXIT_INTERRUPTED, error_message, exit_code_of

    # SystemExit, so that the worker processes of a simulation are stopped.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(128 + signal.SIGTERM))
    try:
        app(prog_name="tarry")
        sys.stdout.flush()  # inside the try block: a closed pipe raises here, not at exit
    except TarryError as error:
        from tarry.cli.output import printable

        sys.stderr.write(f"error: {printable(error_message(error))}\n")
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stdout = None  # otherwise Python flushes stdout at exit, which fails again
        sys.exit(1)
