"""Run commands in this process as `tarry` does: arguments in; exit code and both streams out."""

from __future__ import annotations

import io
import json
import logging
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

import pytest

from tarry import cli


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, as one document."""
        return json.loads(self.out)


class Keyboard(io.TextIOWrapper):
    """A standard input, of a person or of a pipe."""

    def __init__(self, typed: bytes, *, is_person: bool) -> None:
        super().__init__(io.BytesIO(typed))
        self._is_person = is_person

    def isatty(self) -> bool:
        """Say whether somebody can be asked."""
        return self._is_person


def tarry(*arguments: object, typed: bytes = b"", is_person: bool = False) -> Done:
    """Run a command to its end."""
    out, err = io.StringIO(), io.StringIO()
    handler, logger = signal.getsignal(signal.SIGTERM), logging.getLogger("tarry")
    code: Any = 0
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(logger, "handlers", [*logger.handlers])
            patch.setattr(sys, "argv", ["tarry", *map(str, arguments)])
            patch.setattr(sys, "stdin", Keyboard(typed, is_person=is_person))
            cli.main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    return Done(code, out.getvalue(), err.getvalue())
