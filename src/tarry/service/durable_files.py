"""Creation of files and folders that are synced to disk when the call returns."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def create_file(folder: Path, name: str, data: bytes) -> None:
    """Create a file that only its owner can read; `name` is its path relative to `folder`.

    Raise FileExistsError if the file exists. Every folder of the path is synced each time, because
    another process may have created a folder and not synced it yet.
    """
    path = folder / name
    create_folder(path.parent)
    with open(path, "xb", opener=_open_private) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            for parent in path.parents[: len(path.relative_to(folder).parts)]:
                _sync(parent)
        except OSError:
            path.unlink()
            raise


def create_folder(folder: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents."""
    if not folder.is_dir():
        create_folder(folder.parent)
        folder.mkdir(mode, exist_ok=True)
        _sync(folder.parent)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
