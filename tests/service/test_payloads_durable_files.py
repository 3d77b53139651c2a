"""Durable files and folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tarry.service.payloads import create_file, create_folder
from tests.service.payload_cases import SyncRecorder


def test_a_new_file_and_its_folders_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the content, then each folder of its path, also a new one."""
    folder = tmp_path / "new"
    synced = SyncRecorder(monkeypatch)
    create_file(folder, "a/b", b"x")

    assert b"x" == (folder / "a/b").read_bytes()
    assert 0o600 == (folder / "a/b").stat().st_mode & 0o777
    assert synced.is_exactly([tmp_path, folder, folder / "a/b", folder / "a", folder])


def test_existing_folders_are_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have just created them. Folders above the root are not synced."""
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    synced = SyncRecorder(monkeypatch)
    create_file(folder, "a/b", b"x")

    assert synced.is_exactly([folder / "a/b", folder / "a", folder])


@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_file_that_cannot_be_synced_is_deleted(
    good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its content nor its name may be lost after a success."""
    (tmp_path / "a").mkdir()
    SyncRecorder(monkeypatch, good=good)
    with pytest.raises(OSError, match="no sync"):
        create_file(tmp_path, "a/b", b"x")

    assert [] == [*(tmp_path / "a").iterdir()]


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    """FileExistsError is raised."""
    (tmp_path / "a").write_bytes(b"first")
    with pytest.raises(FileExistsError):
        create_file(tmp_path, "a", b"second")

    assert b"first" == (tmp_path / "a").read_bytes()


def test_the_mode_applies_to_the_last_folder_only(tmp_path: Path) -> None:
    """Its parents have the default mode."""
    mask = os.umask(0o022)
    try:
        create_folder(tmp_path / "above/folder", 0o700)
    finally:
        os.umask(mask)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("above", "above/folder")]

    assert [0o755, 0o700] == modes
