"""Whole files: what is written is whole, and lands where it was asked for."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import pytest

from tarry.errors import ConfigurationError
from tarry.simulator.files.file_io import read_text, write_atomically


def test_new_file_is_for_all_who_may(tmp_path: Path) -> None:
    """It has the rights that any other new file has, and nothing is left beside it."""
    usual, path = tmp_path / "usual", tmp_path / "new"
    usual.touch()

    write_atomically(path, b"new")

    assert b"new" == path.read_bytes()
    assert usual.stat().st_mode == path.stat().st_mode
    assert {usual, path} == set(tmp_path.iterdir())


def test_file_that_was_there_keeps_its_rights(tmp_path: Path) -> None:
    """What was hidden stays hidden."""
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    path.chmod(0o600)

    write_atomically(path, b"new")

    assert (b"new", 0o600) == (path.read_bytes(), path.stat().st_mode & 0o777)


def test_link_stays_a_link(tmp_path: Path) -> None:
    """The file behind it is written."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"old")
    link.symlink_to(path)

    write_atomically(link, b"new")

    assert (True, b"new") == (link.is_symlink(), path.read_bytes())


def test_pipe_is_written_into(tmp_path: Path) -> None:
    """Also a device: to put a file in its place would be a nasty surprise."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = Thread(target=lambda: read.append(read_text(pipe, 100)))
    reader.start()

    write_atomically(pipe, b"new")

    reader.join()
    assert (["new"], True) == (read, pipe.is_fifo())


@pytest.mark.parametrize(
    ("place", "expected"),
    [("no/such/file", "No such folder"), (".", "Is a folder"), ("n" * 300, "File name too long")],
    ids=["no folder", "a folder", "a long name"],
)
def test_place_where_no_file_can_be_is_refused(tmp_path: Path, place: str, expected: str) -> None:
    """The message has the path and the reason."""
    path = tmp_path / place

    with pytest.raises(ConfigurationError) as caught:
        write_atomically(path, b"new")

    assert f"{path} cannot be written: {expected}" == str(caught.value)


def test_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing beside it."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(_self: Path, _target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        write_atomically(path, b"new")

    assert [b"old"] == [one.read_bytes() for one in tmp_path.iterdir()]
