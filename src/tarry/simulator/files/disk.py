"""Whole files: read within a bound, and written so that nobody ever reads half of one."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from errno import EISDIR, ENOENT
from secrets import token_hex
from shutil import copymode
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


def read_text(path: Path, largest: int) -> str:
    """Read a file of UTF-8 and at most so many bytes."""
    try:
        with path.open("rb") as file:
            raw = file.read(largest + 1)
    except FileNotFoundError:
        msg = f"{path}: there is no such file"
        raise ConfigurationError(msg) from None
    except OSError as error:
        msg = f"{path}: cannot be read: {error.strerror}"
        raise ConfigurationError(msg) from None
    if len(raw) > largest:
        msg = f"{path}: too large; at most {largest:,} bytes are read"
        raise ConfigurationError(msg)
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        msg = f"{path}:{line}: must be UTF-8, got the byte 0x{raw[error.start]:02x}"
        raise ConfigurationError(msg) from None


def check_place(path: Path) -> None:
    """Refuse a path where no file can be, before anything is made for it."""
    with _refused(path):
        if path.is_dir():
            raise OSError(EISDIR, "Is a folder")
        if not path.parent.is_dir():
            raise OSError(ENOENT, "No such folder")


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the path, then put it in place in one step."""
    check_place(path)
    with _refused(path):
        if path.exists() and not path.is_file():  # a pipe or a device is not to be replaced
            path.write_bytes(content)
        else:
            _replace(path.resolve(), content)  # a link stays one


def _replace(path: Path, content: bytes) -> None:
    # Not a temporary file of the standard library: those are for their owner's eyes alone.
    beside = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        beside.write_bytes(content)
        if path.exists():
            copymode(path, beside)
        beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


@contextmanager
def _refused(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        msg = f"{path} cannot be written: {error.strerror or error}"
        raise ConfigurationError(msg) from error
