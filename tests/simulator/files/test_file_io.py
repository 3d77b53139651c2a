"""Reading and writing files: complete content, at the right place, with the right permissions."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import pytest

from tarry.errors import ConfigurationError
from tarry.simulator.files.file_io import read_text, write_atomically


def test_new_file_has_default_permissions(tmp_path: Path) -> None:
    """A new file has the usual permissions, and no temporary file is left."""
    usual, path = tmp_path / "usual", tmp_path / "new"
    usual.touch()

    write_atomically(path, b"new")

    assert b"new" == path.read_bytes()
    assert usual.stat().st_mode == path.stat().st_mode
    assert {usual, path} == set(tmp_path.iterdir())


def test_existing_file_keeps_its_permissions(tmp_path: Path) -> None:
    """Replacing a file keeps its permissions."""
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    path.chmod(0o600)

    write_atomically(path, b"new")

    assert (b"new", 0o600) == (path.read_bytes(), path.stat().st_mode & 0o777)


def test_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    """Writing to a symbolic link writes its target."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"old")
    link.symlink_to(path)

    write_atomically(link, b"new")

    assert (True, b"new") == (link.is_symlink(), path.read_bytes())


def test_pipe_is_not_replaced(tmp_path: Path) -> None:
    """A pipe or device is written to and not replaced by a file."""
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
def test_unwritable_path_is_rejected(tmp_path: Path, place: str, expected: str) -> None:
    """The error has the path and the reason."""
    path = tmp_path / place

    with pytest.raises(ConfigurationError) as caught:
        write_atomically(path, b"new")

    assert f"{path} cannot be written: {expected}" == str(caught.value)


def test_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write leaves the old file, and no temporary file."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(_self: Path, _target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        write_atomically(path, b"new")

    assert [b"old"] == [one.read_bytes() for one in tmp_path.iterdir()]
