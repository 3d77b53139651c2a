"""Fixtures: empty database files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.stores.sqlite.harness import DatabaseFile


@pytest.fixture
def two_files(tmp_path: Path) -> Iterator[list[DatabaseFile]]:
    """Yield two empty database files."""
    files = [DatabaseFile(tmp_path / "whole.db"), DatabaseFile(tmp_path / "singly.db")]
    yield files
    for file in files:
        file.database.close()


@pytest.fixture
def one_file(two_files: list[DatabaseFile]) -> DatabaseFile:
    """Yield one empty database file."""
    return two_files[0]
