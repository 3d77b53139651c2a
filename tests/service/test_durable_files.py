from __future__ import annotations

import os
from pathlib import Path

import pytest

from tarry.service.durable_files import create_file, create_folder
from tests.service.payload_cases import Synced


def test_new_file_and_every_folder_on_its_way_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contents go first, then the names that lead to them, also in a folder made anew."""
    folder = tmp_path / "new"
    synced = Synced(monkeypatch)
    create_file(folder, "a/b", b"x")

    assert b"x" == (folder / "a/b").read_bytes()
    assert 0o600 == (folder / "a/b").stat().st_mode & 0o777
    assert synced.are([tmp_path, folder, folder / "a/b", folder / "a", folder])


def test_folders_that_were_there_are_synced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who made them may not have come that far; those above are none of ours."""
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    synced = Synced(monkeypatch)
    create_file(folder, "a/b", b"x")

    assert synced.are([folder / "a/b", folder / "a", folder])


@pytest.mark.parametrize("good", [0, 1, 2])
def test_file_that_cannot_be_synced_is_not_kept(
    good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its contents nor its name may be lost."""
    (tmp_path / "a").mkdir()
    Synced(monkeypatch, good=good)
    with pytest.raises(OSError, match="no sync"):
        create_file(tmp_path, "a/b", b"x")

    assert [] == [*(tmp_path / "a").iterdir()]


def test_file_that_is_there_stays(tmp_path: Path) -> None:
    """It is somebody else's."""
    (tmp_path / "a").write_bytes(b"first")
    with pytest.raises(FileExistsError):
        create_file(tmp_path, "a", b"second")

    assert b"first" == (tmp_path / "a").read_bytes()


def test_mode_is_of_the_folder_alone(tmp_path: Path) -> None:
    """Those above it may have been meant for more."""
    mask = os.umask(0o022)
    try:
        create_folder(tmp_path / "above/folder", 0o700)
    finally:
        os.umask(mask)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("above", "above/folder")]

    assert [0o755, 0o700] == modes
