"""Read text files up to a size limit, and write files atomically."""

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


def read_text(path: Path, max_bytes: int) -> str:
    """Return the content of a UTF-8 file of at most `max_bytes` bytes."""
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except FileNotFoundError:
        msg = f"{path}: there is no such file"
        raise ConfigurationError(msg) from None
    except OSError as error:
        msg = f"{path}: cannot be read: {error.strerror}"
        raise ConfigurationError(msg) from None
    if len(raw) > max_bytes:
        msg = f"{path}: too large; at most {max_bytes:,} bytes are read"
        raise ConfigurationError(msg)
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        msg = f"{path}:{line}: must be UTF-8, got the byte 0x{raw[error.start]:02x}"
        raise ConfigurationError(msg) from None


def check_writable(path: Path) -> None:
    """Raise if the path is a folder or its folder does not exist, before expensive work starts."""
    with _write_errors(path):
        if path.is_dir():
            raise OSError(EISDIR, "Is a folder")
        if not path.parent.is_dir():
            raise OSError(ENOENT, "No such folder")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it, so that readers never see a partial file."""
    check_writable(path)
    with _write_errors(path):
        if path.exists() and not path.is_file():  # a pipe or a device must not be replaced
            path.write_bytes(content)
        else:
            _replace(path.resolve(), content)  # resolved, so that a symbolic link stays a link


def _replace(path: Path, content: bytes) -> None:
    # `tempfile` is not used, because it creates files that only their owner can read.
    temporary = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        temporary.write_bytes(content)
        if path.exists():
            copymode(path, temporary)
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def _write_errors(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        msg = f"{path} cannot be written: {error.strerror or error}"
        raise ConfigurationError(msg) from error
