"""Attempt logs: what each attempt of each call came to, read from CSV or JSONL.

The columns are those of the service's attempt log, in camelCase or snake_case: taskId,
attemptNumber (from 1), startedAt (epoch milliseconds), durationMs, and outcome or responseStatus.
An outcome that is left out follows from the status by the tables of the core; an attempt without
a status has had no answer, and is transient. Further columns are not looked at.

A log comes from anywhere: what is read is bounded, and every refusal has the file and the line.
"""

from __future__ import annotations

import csv
import json
import re
from array import array
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias, cast

from tarry.core.checks import check_number
from tarry.core.outcome import Kind, outcome_of_status
from tarry.errors import ConfigurationError, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


MOST_ATTEMPTS = 5_000_000
KINDS = tuple(Kind)

_HIGHEST_NUMBER = 1_000_000
_YEAR = 366 * 86_400_000.0
_LATEST = 1e14
_SECONDS = (1e9, 1e10)
"""As milliseconds these are days of 1970; as seconds, they are our time."""


class Attempt(NamedTuple):
    """One attempt. Times are seconds; `start` is counted from the epoch."""

    task: str
    number: int
    start: float
    duration: float
    kind: Kind


class AttemptLog:
    """Attempts in the order in which they started, as columns: millions fit into memory."""

    __slots__ = ("durations", "kinds", "numbers", "starts", "tasks")

    def __init__(self, attempts: Iterable[Attempt] = ()) -> None:
        self.tasks: array[int] = array("Q")
        """A digest of each task's id: enough to tell which attempts belong to one call."""
        self.numbers: array[int] = array("L")
        self.starts: array[float] = array("d")
        self.durations: array[float] = array("d")
        self.kinds: array[int] = array("B")
        """Positions in `KINDS`."""
        ordered, last = True, (0.0, 0)
        for attempt in attempts:
            self.tasks.append(_digest(attempt.task))
            self.numbers.append(attempt.number)
            self.starts.append(attempt.start)
            self.durations.append(attempt.duration)
            self.kinds.append(KINDS.index(attempt.kind))
            here = (attempt.start, attempt.number)
            ordered, last = ordered and last <= here, here
        if not ordered:
            self._sort()

    def __len__(self) -> int:
        """Return how many attempts there are."""
        return len(self.starts)

    def _sort(self) -> None:
        # Two stable sorts: a key of pairs would need ten times the memory of the columns.
        order = sorted(range(len(self)), key=self.numbers.__getitem__)
        order.sort(key=self.starts.__getitem__)
        for name in self.__slots__:
            column = getattr(self, name)
            arranged = column[:0]
            arranged.extend(map(column.__getitem__, order))
            setattr(self, name, arranged)


def read_attempts(path: Path | str) -> AttemptLog:
    """Read a log; its suffix tells the format, or its first line when that does not."""
    path = Path(path)
    number_of_line = 0
    try:
        with path.open("rb") as file:
            lines = Lines(file)
            try:
                log = AttemptLog(_attempts(rows_of(lines, path.suffix)))
            finally:
                number_of_line = lines.number
    except FileNotFoundError:
        msg = f"{path}: there is no such file"
        raise ConfigurationError(msg) from None
    except OSError as error:
        msg = f"{path}: cannot be read: {error.strerror}"
        raise ConfigurationError(msg) from None
    except ConfigurationError as error:
        msg = f"{path}:{number_of_line}: {error}"
        raise ConfigurationError(msg) from None
    if not len(log):
        only = "only a header or blank lines" if number_of_line else "the file is empty"
        msg = f"{path}: there are no attempts in it: {only}"
        raise ConfigurationError(msg)
    return log


def _attempts(rows: Iterable[Row]) -> Iterator[Attempt]:
    for position, row in enumerate(rows):
        if position == MOST_ATTEMPTS:
            msg = f"more than {MOST_ATTEMPTS:,} attempts; take a shorter time"
            raise ConfigurationError(msg)
        yield _attempt(row)


def _attempt(row: Row) -> Attempt:
    task = row["taskId"]
    if isinstance(task, bool) or not isinstance(task, (str, int)) or task == "":
        msg = f"column taskId must be a text or a whole number, got {short_repr(task)}"
        raise ConfigurationError(msg)
    start = _between("startedAt", row["startedAt"], 0, _LATEST)
    if _SECONDS[0] <= start < _SECONDS[1]:
        msg = f"column startedAt must be epoch milliseconds, got {start:.0f}: these are seconds"
        raise ConfigurationError(msg)
    return Attempt(
        str(task),
        _whole("attemptNumber", row["attemptNumber"], 1, _HIGHEST_NUMBER),
        start / 1000,
        _between("durationMs", row["durationMs"], 0, _YEAR) / 1000,
        _kind(row.get("outcome"), row.get("responseStatus")),
    )


def _between(column: str, value: object, low: float, high: float) -> float:
    if isinstance(value, float) and low <= value <= high:  # as nearly all are
        return value
    if value is None or isinstance(value, str):
        msg = (
            f"column {column} must be a number, got {'nothing' if not value else short_repr(value)}"
        )
        raise ConfigurationError(msg)
    result = check_number(f"column {column}", value)
    if not low <= result <= high:
        msg = f"column {column} must be from {low:,.0f} to {high:,.0f}, got {short_repr(value)}"
        raise ConfigurationError(msg)
    return result


def _whole(column: str, value: object, low: int, high: int) -> int:
    """Take 2.0 for 2: a table with gaps writes its whole numbers so."""
    result = _between(column, value, low, high)
    if result != int(result):
        msg = f"column {column} must be a whole number, got {short_repr(value)}"
        raise ConfigurationError(msg)
    return int(result)


def _kind(outcome: object, status: object) -> Kind:
    if outcome is None or outcome == "":
        if status is None:
            return Kind.TRANSIENT
        return _kind_of(_whole("responseStatus", status, 100, 599))
    name = outcome.lower() if isinstance(outcome, str) else ""
    if name not in KINDS:
        msg = f"column outcome must be one of {', '.join(KINDS)}, got {short_repr(outcome)}"
        raise ConfigurationError(msg)
    return Kind(name)


@lru_cache
def _kind_of(status: int) -> Kind:
    return outcome_of_status(status, now=0.0).kind


def _digest(task: str) -> int:
    return int.from_bytes(blake2b(task.encode("utf-8", "replace"), digest_size=8).digest(), "big")


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
            msg = f"must be a JSON object, got {short_repr(row)}{cut}"
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
        columns = ", ".join(short_repr(name) for name in there)
        msg = f"column {missing[0]} is missing; there are {columns or 'none'}"
        raise ConfigurationError(msg)
