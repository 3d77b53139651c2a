"""Durations that were measured: a file with one number on each line, or a column of a CSV file."""

from __future__ import annotations

import csv
from io import StringIO
from math import isfinite
from typing import TYPE_CHECKING, Any

from tarry.core.checks import check_positive
from tarry.errors import ConfigurationError, short_repr
from tarry.simulator.files.disk import read_text
from tarry.simulator.files.schema import check_keys

if TYPE_CHECKING:
    from _csv import Reader
    from collections.abc import Mapping
    from pathlib import Path

    from tarry.simulator.files.documents import Document, Place

LARGEST = 50_000_000
"""Bytes of a file of measurements."""
MOST = 1_000_000
"""Values of a file of measurements."""


def measured(document: Document, place: Place, table: Mapping[str, Any]) -> tuple[float, ...]:
    """Read what `{ kind = "empirical", file = ..., column = ..., scale = ... }` asks for."""
    check_keys(document, place, table, ("kind", "file", "column", "scale"))
    name, column = table["file"], table.get("column")
    for key, value in (("file", name), ("column", column)):
        if value is not None and not isinstance(value, str):
            raise document.refusal((*place, key), f"{key} must be a text, got {short_repr(value)}")
    try:
        scale = check_positive("scale", table.get("scale", 1.0))
    except ConfigurationError as error:
        raise document.refusal((*place, "scale"), str(error)) from None
    try:
        return _read(document.path.parent / name, column, scale)
    except ConfigurationError as error:
        raise document.refusal((*place, "file"), f"file: {error}") from None


def _read(path: Path, column: str | None, scale: float) -> tuple[float, ...]:
    rows = csv.reader(StringIO(read_text(path, LARGEST)))
    try:
        return _values(path, rows, column, scale)
    except csv.Error as error:
        msg = f"{path}:{rows.line_num}: not CSV: {error}"
        raise ConfigurationError(msg) from None


def _values(path: Path, rows: Reader, column: str | None, scale: float) -> tuple[float, ...]:
    index = 0
    if column is not None:
        header = next(rows, list[str]())
        if column not in header:
            msg = f"{path}:1: there is no column {column!r}; there are {', '.join(header)}"
            raise ConfigurationError(msg)
        index = header.index(column)
    values: list[float] = []
    for row in rows:
        if not row:
            continue
        text = row[index] if index < len(row) else ""
        value = _duration(text)
        if value is None:
            msg = f"{path}:{rows.line_num}: must be a number of at least 0, got {short_repr(text)}"
            raise ConfigurationError(msg)
        if len(values) == MOST:
            msg = f"{path}:{rows.line_num}: at most {MOST:,} values are read"
            raise ConfigurationError(msg)
        values.append(value * scale)
    if not values:
        msg = f"{path}: there is no value in it"
        raise ConfigurationError(msg)
    return tuple(values)


def _duration(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) and value >= 0 else None
