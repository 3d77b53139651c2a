"""Backup of a SQLite store and of the folder with large bodies, while the service runs.

The database is copied first, and the bodies after it: a body is written before the row of its task,
so all bodies of the copied tasks exist then. A body can be missing only if its task was deleted in
the meantime.

A backup of `FILE` is the database `FILE`, and the folder `FILE.bodies` if there are bodies. `FILE`
gets its name last, so it exists only if the backup is complete. While an older backup is replaced,
the folder has the bodies of both backups; at the end, those of the older one are removed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tarry.errors import ConfigurationError
from tarry.service.payloads import create_folder, sync_folder
from tarry.service.stores.sqlite.backup import copy_database, iter_body_refs, read_task_count

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    ReportProgress = Callable[[int, int], None]
    """Called with the number of copied items, and the number of all items."""

_PARTIAL_SUFFIX = ".partial"
"""Suffix of the names of incomplete files."""


class Backup(msgspec.Struct, frozen=True):
    """The result of a backup."""

    task_count: int
    size: int
    """Size of the database in bytes."""
    body_count: int
    """Number of copied bodies that belong to tasks."""
    missing_body_count: int
    """Number of bodies of tasks that were not in the folder."""


def bodies_folder_of(file: Path) -> Path:
    """Return the folder for the bodies of a backup."""
    return Path(f"{file}.bodies")


def back_up(
    store: Path,
    bodies: Path | None,
    file: Path,
    *,
    overwrite: bool,
    on_progress: ReportProgress,
) -> Backup:
    """Write a backup of the SQLite file `store` and of the folder `bodies` to `file`.

    If `bodies` is None, the bodies are in object storage and are not copied. `on_progress`
    is called for the pages of the database first, then for the bodies.
    """
    _check_target(store, file, overwrite=overwrite)
    try:
        create_folder(file.parent.absolute())
        return _write_backup(store, bodies, file, overwrite, on_progress)
    except OSError as error:
        raise ConfigurationError(f"cannot write the backup {file}: {error}") from error


def _write_backup(
    store: Path,
    bodies: Path | None,
    file: Path,
    overwrite: bool,  # noqa: FBT001 - as in `back_up`
    on_progress: ReportProgress,
) -> Backup:
    folder = bodies_folder_of(file)
    missing_count = 0
    with _partial_file(file) as partial:
        copy_database(store, partial, on_progress)
        task_count, size = read_task_count(partial), partial.stat().st_size
        refs: set[str] = set() if bodies is None else set(iter_body_refs(partial))
        if bodies is not None:
            _copy_files(bodies, folder, on_progress)
            missing_count = _count_missing(refs, folder, bodies)
        _check_target(store, file, overwrite=overwrite)  # the copy may have taken hours
        partial.replace(file)
        sync_folder(file.parent)
    if bodies is not None:
        _remove_other_files(folder, bodies, refs)
    return Backup(task_count, size, len(refs) - missing_count, missing_count)


def _check_target(store: Path, file: Path, *, overwrite: bool) -> None:
    if file.resolve() == store.resolve():
        raise ConfigurationError(f"{file} is the store itself: name another file for the backup")
    if file.is_dir():
        raise ConfigurationError(f"{file} is a folder: name a file in it, such as {file}/tarry.db")
    if file.exists() and not overwrite:
        raise ConfigurationError(f"{file} exists: name another file, or replace it with --force")
    for suffix in ("-wal", "-journal"):
        # SQLite would apply the changes in this file to the new backup, and damage it.
        if Path(f"{file}{suffix}").exists():
            raise ConfigurationError(
                f"{file}{suffix} exists, so {file} is in use as a store, or was when its process "
                "ended: name another file for the backup"
            )


@contextmanager
def _partial_file(file: Path) -> Generator[Path]:
    """Create a private temporary file next to `file`; delete it unless it was renamed."""
    descriptor, name = tempfile.mkstemp(_PARTIAL_SUFFIX, f".{file.name}.", file.parent)
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        with suppress(FileNotFoundError):
            Path(name).unlink()


def _copy_files(source: Path, target: Path, on_progress: ReportProgress) -> None:
    """Copy all files of a folder, except those that `target` has already."""
    refs = list(_iter_files(source))
    if refs:
        create_folder(target, 0o700)
    for number, ref in enumerate(refs, 1):
        with suppress(FileNotFoundError):  # deleted since it was listed
            _copy_file(source / ref, target / ref)
        on_progress(number, len(refs))


def _copy_file(source: Path, target: Path) -> None:
    status = source.stat()
    with suppress(FileNotFoundError):
        existing = target.stat()
        if (existing.st_size, existing.st_mtime_ns) == (status.st_size, status.st_mtime_ns):
            return
    create_folder(target.parent, 0o700)
    with _partial_file(target) as partial:
        shutil.copyfile(source, partial, follow_symlinks=False)
        os.utime(partial, ns=(status.st_atime_ns, status.st_mtime_ns))
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.replace(target)
        sync_folder(target.parent)


def _iter_files(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files of a folder; symbolic links are ignored."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if not path.is_symlink() and not name.endswith(_PARTIAL_SUFFIX):
                yield path.relative_to(folder).as_posix()


def _count_missing(refs: set[str], folder: Path, bodies: Path) -> int:
    """Return how many of these bodies are missing; raise if `bodies` is not their folder."""
    missing = [ref for ref in refs if not (folder / ref).exists()]
    # The marker of the storage is never deleted, see `tarry.service.payloads`.
    for storage_id in {ref.split("/")[1] for ref in missing}:
        if not (folder / ".tarry" / "places" / storage_id).exists():
            raise ConfigurationError(
                f"{len(missing)} bodies of the store are not in {bodies}: set `bodies` as for "
                "`tarry serve` (TARRY_BODIES, --config or --set bodies=FOLDER)"
            )
    return len(missing)


def _remove_other_files(folder: Path, bodies: Path, refs: set[str]) -> None:
    """Remove copied bodies of an older backup: those that are neither in `bodies` nor in `refs`."""
    for ref in list(_iter_files(folder)):
        if ref not in refs and not (bodies / ref).exists():
            with suppress(FileNotFoundError):
                (folder / ref).unlink()
