"""Fixtures for empty database files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.stores.sqlite.harness import DatabaseFile


@pytest.fixture
def two_database_files(tmp_path: Path) -> Iterator[list[DatabaseFile]]:
    """Yield two empty database files."""
    files = [DatabaseFile(tmp_path / "batch.db"), DatabaseFile(tmp_path / "single.db")]
    yield files
    for file in files:
        file.database.close()


@pytest.fixture
def database_file(two_database_files: list[DatabaseFile]) -> DatabaseFile:
    """Return an empty database file."""
    return two_database_files[0]
