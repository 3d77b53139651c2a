"""Read attempt logs from CSV and JSONL files.

The columns are those of the service's attempt log, in camelCase or snake_case: taskId,
attemptNumber (from 1), startedAt (epoch milliseconds), durationMs, and outcome or responseStatus.
If a row has no outcome, the status is classified as in the library. If it has no status either, the
attempt got no response, and its outcome is transient. Other columns, and rows with the outcome
`lost`, are ignored.

The number of attempts and the length of a line are limited, because a log may come from an
untrusted source. Errors name the file and the line.
"""

from __future__ import annotations

import csv
import json
import re
from array import array
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias, cast

from tarry.core.checks import check_number
from tarry.core.outcome import Kind, outcome_of_status
from tarry.errors import ConfigurationError, short_repr

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAX_ATTEMPTS = 5_000_000
MAX_LINE_BYTES = 1_000_000
OUTCOME_KINDS = tuple(Kind)
REQUIRED_COLUMNS = ("taskId", "attemptNumber", "startedAt", "durationMs")

_COLUMNS = (*REQUIRED_COLUMNS, "responseStatus", "outcome")
_COLUMN_BY_SPELLING = {name: name for name in _COLUMNS} | {
    re.sub(r"(?=[A-Z])", "_", name).lower(): name for name in _COLUMNS
}
_TEXT_COLUMNS = ("taskId", "outcome")
_LOST = "lost"  # the outcome of an attempt of the service whose process has crashed
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
_MAX_ATTEMPT_NUMBER = 1_000_000
_MAX_DURATION_MS = 366 * 86_400_000.0
_MAX_STARTED_AT_MS = 1e14
_MIN_LIKELY_SECONDS, _MAX_LIKELY_SECONDS = 1e9, 1e10
"""A startedAt in this range is probably in seconds, from 2001 to 2286. In milliseconds, it would be
in early 1970."""

Row: TypeAlias = "Mapping[str, object]"
"""The known columns of a row, by their camelCase names."""


class LoggedAttempt(NamedTuple):
    """One attempt. `start` is in seconds since the epoch, `duration` in seconds."""

    task: str
    number: int
    start: float
    duration: float
    kind: Kind


class AttemptLog:
    """Attempts ordered by start time, stored as one array per column to save memory."""

    __slots__ = ("durations", "kinds", "numbers", "starts", "tasks")

    def __init__(self, attempts: Iterable[LoggedAttempt] = ()) -> None:
        self.tasks: array[int] = array("Q")
        """A digest of each task id: attempts with the same digest belong to the same task."""
        self.numbers: array[int] = array("L")
        self.starts: array[float] = array("d")
        self.durations: array[float] = array("d")
        self.kinds: array[int] = array("B")
        """The outcome kind of each attempt, as an index into `OUTCOME_KINDS`."""
        is_sorted, previous_key = True, (0.0, 0)
        for attempt in attempts:
            task = attempt.task.encode("utf-8", "replace")
            self.tasks.append(int.from_bytes(blake2b(task, digest_size=8).digest(), "big"))
            self.numbers.append(attempt.number)
            self.starts.append(attempt.start)
            self.durations.append(attempt.duration)
            self.kinds.append(OUTCOME_KINDS.index(attempt.kind))
            sort_key = (attempt.start, attempt.number)
            is_sorted, previous_key = is_sorted and previous_key <= sort_key, sort_key
        if not is_sorted:
            self._sort()

    def __len__(self) -> int:
        return len(self.starts)

    def _sort(self) -> None:
        # Two stable sorts order by start, then by number. One sort by (start, number) would need
        # ten times the memory of the columns, because of the tuples.
        order = sorted(range(len(self)), key=self.numbers.__getitem__)
        order.sort(key=self.starts.__getitem__)
        for name in self.__slots__:
            column = getattr(self, name)
            ordered = column[:0]
            ordered.extend(map(column.__getitem__, order))
            setattr(self, name, ordered)


def read_attempt_log(path: Path | str) -> AttemptLog:
    """Read a log. The suffix selects CSV or JSONL; for any other suffix, the first line does."""
    path = Path(path)
    line_number = 0
    try:
        with path.open("rb") as file:
            lines = LineReader(file)
            try:
                log = AttemptLog(read_attempts(read_rows(lines, path.suffix)))
            finally:
                line_number = lines.number
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}:{line_number}: {error}") from None
    if not len(log):
        cause = "only a header or blank lines" if line_number else "the file is empty"
        raise ConfigurationError(f"{path}: the log has no attempts: {cause}")
    return log


class LineReader:
    """Iterates over the lines of a UTF-8 file; `number` is the number of the last line read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.number: int = 0

    def __iter__(self) -> Iterator[str]:
        while raw := self._file.readline(MAX_LINE_BYTES + 1):
            self.number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise ConfigurationError(f"a line must have at most {MAX_LINE_BYTES:,} bytes")
            try:
                yield raw.decode("utf-8-sig" if self.number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                msg = f"must be UTF-8, got the byte 0x{raw[error.start]:02x}"
                raise ConfigurationError(msg) from None


def read_rows(lines: Iterable[str], suffix: str) -> Iterator[Row]:
    """Yield the rows of a CSV or JSONL log. The caller adds the file and line to errors."""
    nonblank_lines: Iterator[str] = (line for line in lines if line.strip())
    is_csv = suffix.lower() == ".csv"
    if suffix.lower() not in {".csv", ".jsonl", ".ndjson"}:
        first_line = next(nonblank_lines, "")
        is_csv = not first_line.lstrip().startswith(("{", "["))
        nonblank_lines = chain(filter(None, (first_line,)), nonblank_lines)
    return _parse_csv(nonblank_lines) if is_csv else _parse_jsonl(nonblank_lines)


def _parse_csv(lines: Iterator[str]) -> Iterator[Row]:
    reader = csv.reader(lines, strict=True)
    try:
        cells = next(reader, None)
        if cells is None:
            return
        header = [cell.strip() for cell in cells]
        names = [_COLUMN_BY_SPELLING.get(cell, "") for cell in header]
        _check_columns(names, header)
        for name in filter(None, names):
            if names.count(name) > 1:
                raise ConfigurationError(f"column {name} appears twice")
        for cells in reader:
            if len(cells) != len(names):
                msg = f"must have {len(names)} columns as the first line has, got {len(cells)}"
                raise ConfigurationError(msg)
            row = zip(names, cells, strict=True)
            yield {name: _parse_cell(name, cell.strip()) for name, cell in row if name}
    except csv.Error as error:
        raise ConfigurationError(f"must be CSV: {error}") from None


def _parse_cell(name: str, cell: str) -> object:
    """Return the value as in a JSON log. An empty cell is None, or "" in a text column."""
    if name in _TEXT_COLUMNS:
        return cell
    return float(cell) if _NUMBER.fullmatch(cell) else cell or None


def _parse_jsonl(lines: Iterator[str]) -> Iterator[Row]:
    for text in lines:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            row = text.strip()
        if not isinstance(row, dict):
            question = "" if text.endswith("\n") else "; is the end of the file cut off?"
            raise ConfigurationError(f"must be a JSON object, got {short_repr(row)}{question}")
        fields = cast("dict[str, Any]", row)
        columns = ((_COLUMN_BY_SPELLING.get(name), value) for name, value in fields.items())
        known = {name: value for name, value in columns if name}
        _check_columns(known, fields)
        yield known


def _check_columns(known: Iterable[str], actual: Iterable[str]) -> None:
    """Raise if a required column is not `known`; the error lists the `actual` columns."""
    recognised = set(known)
    missing = [name for name in REQUIRED_COLUMNS if name not in recognised]
    if not recognised & {"outcome", "responseStatus"}:
        missing.append("outcome or responseStatus")
    if missing:
        columns = ", ".join(short_repr(name) for name in actual)
        raise ConfigurationError(f"column {missing[0]} is missing; there are {columns or 'none'}")


def read_attempts(rows: Iterable[Row]) -> Iterator[LoggedAttempt]:
    """Yield the attempts of rows, except lost attempts, whose duration and outcome are unknown."""
    for position, row in enumerate(rows):
        if row.get("outcome") == _LOST:
            continue
        if position == MAX_ATTEMPTS:
            msg = f"more than {MAX_ATTEMPTS:,} attempts; use a log of a shorter period"
            raise ConfigurationError(msg)
        yield _parse_attempt(row)


def _parse_attempt(row: Row) -> LoggedAttempt:
    task = row["taskId"]
    if isinstance(task, bool) or not isinstance(task, (str, int)) or task == "":
        msg = f"column taskId must be a string or an integer, got {short_repr(task)}"
        raise ConfigurationError(msg)
    start_ms = _parse_number("startedAt", row["startedAt"], 0, _MAX_STARTED_AT_MS)
    if _MIN_LIKELY_SECONDS <= start_ms < _MAX_LIKELY_SECONDS:
        msg = f"column startedAt must be epoch milliseconds, got {start_ms:.0f}: probably seconds"
        raise ConfigurationError(msg)
    return LoggedAttempt(
        str(task),
        _parse_integer("attemptNumber", row["attemptNumber"], 1, _MAX_ATTEMPT_NUMBER),
        start_ms / 1000,
        _parse_number("durationMs", row["durationMs"], 0, _MAX_DURATION_MS) / 1000,
        _parse_kind(row.get("outcome"), row.get("responseStatus")),
    )


def _parse_number(column: str, value: object, low: float, high: float) -> float:
    if isinstance(value, float) and low <= value <= high:  # the fast path: nearly all values
        return value
    if value is None or isinstance(value, str):
        got = short_repr(value) if value else "nothing"
        raise ConfigurationError(f"column {column} must be a number, got {got}")
    result = check_number(f"column {column}", value)
    if not low <= result <= high:
        msg = f"column {column} must be from {low:,.0f} to {high:,.0f}, got {short_repr(value)}"
        raise ConfigurationError(msg)
    return result


def _parse_integer(column: str, value: object, low: int, high: int) -> int:
    """Return an integer. Accepts 2.0, because pandas writes 2 as 2.0 in a column with gaps."""
    result = _parse_number(column, value, low, high)
    if result != int(result):
        raise ConfigurationError(f"column {column} must be a whole number, got {short_repr(value)}")
    return int(result)


def _parse_kind(outcome: object, status: object) -> Kind:
    if outcome is None or outcome == "":
        if status is None:
            return Kind.TRANSIENT
        return _kind_of_status(_parse_integer("responseStatus", status, 100, 599))
    name = outcome.lower() if isinstance(outcome, str) else ""
    if name not in OUTCOME_KINDS:
        kinds = ", ".join(OUTCOME_KINDS)
        msg = f"column outcome must be one of {kinds}, got {short_repr(outcome)}"
        raise ConfigurationError(msg)
    return Kind(name)


@lru_cache
def _kind_of_status(status: int) -> Kind:
    return outcome_of_status(status, now=0.0).kind
