"""The `tarry` command line. The packages that a command needs are imported when it runs."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from tarry.errors import TarryError

__all__ = ["main"]

_EXTRAS = {
    **dict.fromkeys(("serve", "config", "demo", "backup", "migrate", "keys"), "service"),
    **dict.fromkeys(("send", "tasks", "dead", "downstreams", "tail", "top"), "cli,client"),
    **dict.fromkeys(("health", "workers", "secrets"), "cli,client"),
    "simulate": "sim",
}
"""The extras that install the packages of a command, by command; `cli` for all other commands."""


def main() -> None:
    """Run the `tarry` command and exit; `tarry.cli.exit_codes` lists the exit codes."""
    try:
        for name in ("rich", "typer"):
            import_module(name)
    except ImportError:
        command = "".join(sys.argv[1:2])  # "" if there is none
        extra = _EXTRAS.get(command, "cli")
        need = "tarry's command line needs typer and rich"
        sys.stderr.write(f"{need}: pip install 'tarry[{extra}]'\n")
        sys.exit(1)
    from tarry.cli.app import app
    from tarry.cli.exit_codes import EXIT_INTERRUPTED, error_message, exit_code_of

    # On SIGTERM raise SystemExit, so that a simulation stops its worker processes.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(128 + signal.SIGTERM))
    try:
        try:
            app(prog_name="tarry")
        finally:  # flush here, so that a closed pipe raises here, not when Python exits
            if sys.__stdout__ is not None:
                sys.__stdout__.flush()
    except TarryError as error:
        from tarry.cli.output import to_printable_line

        sys.stderr.write(f"error: {to_printable_line(error_message(error))}\n")
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Python flushes stdout again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
