"""Files and folders that survive a power cut: on the disk when the call returns."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_new(folder: Path, name: str, data: bytes) -> None:
    """Write a file for its owner alone that is not there yet; `name` is its path in `folder`.

    Each folder on the way is synced every time: another writer may have made it a moment ago.
    """
    path = folder / name
    make_folder(path.parent)
    with open(path, "xb", opener=_private) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            for above in path.parents[: len(path.relative_to(folder).parts)]:
                _sync(above)
        except OSError:
            path.unlink()
            raise


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it that are missing."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode, exist_ok=True)
        _sync(folder.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
