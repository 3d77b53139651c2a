"""Writing a file so that nobody ever reads half of it."""

from __future__ import annotations

from contextlib import suppress
from secrets import token_hex
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


def check_place(path: Path) -> None:
    """Refuse a path where no file can be, before anything is made for it."""
    if path.is_dir():
        msg = f"path must be a file, got the folder {path}"
        raise ConfigurationError(msg)
    if not path.parent.is_dir():
        msg = f"path must lie in a folder that exists, got {path}"
        raise ConfigurationError(msg)


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the path, then put it in place in one step."""
    check_place(path)
    # Not a temporary file of the standard library: those are for their owner's eyes alone.
    beside = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        try:
            beside.write_bytes(content)
            beside.replace(path)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
    except OSError as exc:
        msg = f"path must be writable, got {path}: {exc.strerror or exc}"
        raise ConfigurationError(msg) from exc
