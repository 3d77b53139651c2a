"""Creation of files and folders that survive a crash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tarry.service.payloads import create_file, create_folder
from tests.service.body_store_cases import SyncRecorder


def test_a_new_file_and_its_folders_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content is synced before each folder of the path; new folders are synced as well."""
    folder = tmp_path / "new"
    synced = SyncRecorder(monkeypatch)
    create_file(folder, "a/b", b"x")

    assert b"x" == (folder / "a/b").read_bytes()
    assert 0o600 == (folder / "a/b").stat().st_mode & 0o777
    assert synced.has_synced([tmp_path, folder, folder / "a/b", folder / "a", folder])


def test_existing_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders below the root are synced, because another process may have just created them."""
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    synced = SyncRecorder(monkeypatch)
    create_file(folder, "a/b", b"x")

    assert synced.has_synced([folder / "a/b", folder / "a", folder])


@pytest.mark.parametrize("successes", [0, 1, 2])
def test_a_file_that_cannot_be_synced_is_deleted(
    successes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed sync of the file or of a folder raises OSError and deletes the file."""
    (tmp_path / "a").mkdir()
    SyncRecorder(monkeypatch, successes=successes)
    with pytest.raises(OSError, match="no sync"):
        create_file(tmp_path, "a/b", b"x")

    assert [] == [*(tmp_path / "a").iterdir()]


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    """Creating an existing file raises FileExistsError."""
    (tmp_path / "a").write_bytes(b"first")
    with pytest.raises(FileExistsError):
        create_file(tmp_path, "a", b"second")

    assert b"first" == (tmp_path / "a").read_bytes()


def test_new_folders_of_a_file_are_private(tmp_path: Path) -> None:
    """Other users cannot list the folders, whose names are tenants."""
    create_file(tmp_path, "a/b/c", b"x")

    assert [0o700] * 2 == [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")]


def test_the_mode_applies_to_the_last_folder_only(tmp_path: Path) -> None:
    """New parent folders have the default mode."""
    mask = os.umask(0o022)
    try:
        create_folder(tmp_path / "above/folder", 0o700)
    finally:
        os.umask(mask)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("above", "above/folder")]

    assert [0o755, 0o700] == modes
