"""The rows of a CSV or JSONL file as plain values, a line at a time.

A refusal here says what is wrong; which line it is on, `Lines` knows.
"""

from __future__ import annotations

import csv
import json
import re
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from tarry.core.checks import short
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

LONGEST_LINE = 1_000_000
REQUIRED = ("taskId", "attemptNumber", "startedAt", "durationMs")
_COLUMNS = (*REQUIRED, "responseStatus", "outcome")
_SPELLINGS = {name: name for name in _COLUMNS} | {
    re.sub(r"(?=[A-Z])", "_", name).lower(): name for name in _COLUMNS
}
_TEXTS = ("taskId", "outcome")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", re.ASCII)

Row: TypeAlias = "Mapping[str, object]"


class Lines:
    """The lines of a file of UTF-8; `number` is the one that was read last."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.number: int = 0

    def __iter__(self) -> Iterator[str]:
        """Read on."""
        while raw := self._file.readline(LONGEST_LINE + 1):
            self.number += 1
            if len(raw) > LONGEST_LINE:
                msg = f"a line must have at most {LONGEST_LINE:,} bytes"
                raise ConfigurationError(msg)
            try:
                yield raw.decode("utf-8-sig" if self.number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                msg = f"must be UTF-8, got the byte 0x{raw[error.start]:02x}"
                raise ConfigurationError(msg) from None


def rows_of(lines: Iterable[str], suffix: str) -> Iterator[Row]:
    """Read rows in the format of the suffix, or in the one that the first line looks like."""
    formats: dict[str, Callable[[Iterator[str]], Iterator[Row]]] = {
        ".csv": _csv_rows,
        ".jsonl": _json_rows,
        ".ndjson": _json_rows,
    }
    filled = (line for line in lines if line.strip())
    known = formats.get(suffix.lower())
    if known is not None:
        return known(filled)
    first = next(filled, "")
    guessed = _json_rows if first.lstrip().startswith(("{", "[")) else _csv_rows
    return guessed(_chained(first, filled))


def _chained(first: str, rest: Iterator[str]) -> Iterator[str]:
    if first:
        yield first
    yield from rest


def _csv_rows(lines: Iterator[str]) -> Iterator[Row]:
    reader = csv.reader(lines, strict=True)
    try:
        cells = next(reader, None)
        if cells is None:
            return
        header = [cell.strip() for cell in cells]
        names = [_SPELLINGS.get(cell, "") for cell in header]
        _complete(names, header)
        for name in filter(None, names):
            if names.count(name) > 1:
                msg = f"column {name} stands twice"
                raise ConfigurationError(msg)
        for cells in reader:
            if len(cells) != len(names):
                msg = f"must have {len(names)} columns as the first line has, got {len(cells)}"
                raise ConfigurationError(msg)
            row = zip(names, cells, strict=True)
            yield {name: _value(name, cell.strip()) for name, cell in row if name}
    except csv.Error as error:
        msg = f"must be CSV: {error}"
        raise ConfigurationError(msg) from None


def _value(name: str, cell: str) -> object:
    """Return what JSON would have given; a cell that is no number stays a text."""
    if name in _TEXTS:
        return cell
    return float(cell) if _NUMBER.fullmatch(cell) else cell or None


def _json_rows(lines: Iterator[str]) -> Iterator[Row]:
    for text in lines:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            row = text.strip()
        if not isinstance(row, dict):
            cut = "" if text.endswith("\n") else "; is the end of the file cut off?"
            msg = f"must be a JSON object, got {short(row)}{cut}"
            raise ConfigurationError(msg)
        plain = cast("dict[str, Any]", row)
        known = {_SPELLINGS[name]: value for name, value in plain.items() if name in _SPELLINGS}
        _complete(known, plain)
        yield known


def _complete(names: Iterable[str], there: Iterable[str]) -> None:
    found = set(names)
    missing = [name for name in REQUIRED if name not in found]
    if not found & {"outcome", "responseStatus"}:
        missing.append("outcome or responseStatus")
    if missing:
        columns = ", ".join(short(name) for name in there)
        msg = f"column {missing[0]} is missing; there are {columns or 'none'}"
        raise ConfigurationError(msg)
