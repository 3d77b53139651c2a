"""Statements for many rows, and parameters that are passed cheaply.

Three costs are the reason for them:

* Each executed statement, and each fetched row, releases the GIL. If the event loop runs in the
  same process, it may then keep the GIL for a while, and this thread waits. One statement for many
  rows (`MultiRowStatement`) made batches 18 % and single tasks 7 % faster.
* One UPDATE for many rows would need UPDATE ... FROM (VALUES ...), for which SQLite builds two
  temporary tables. `MultiRowUpdate` changes existing rows without them.
* `sqlite3` looks for an adapter for every parameter that is not an int, float, str or bytearray.
  This costs about ten times as much as binding the parameter. So bytes are passed as bytearray, and
  parameters that are mostly None are passed as a sentinel that SQL turns into NULL
  (`NULL_NUMBER_PARAM`, `NULL_TEXT_PARAM`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from sqlite3 import Cursor

    Execute = Callable[[str, list[Any]], Cursor]

_CHUNK_SIZES = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Numbers of rows for which `MultiRowStatement` has a statement. Preparing a statement takes longer
than running it twice. So there are only a few sizes, whose prepared statements stay cached, and
most batches are split in two."""

NULLABLE_NUMBER_SQL, NULL_NUMBER_PARAM = "nullif(?, '')", ""
"""The SQL placeholder for a number that may be NULL, and the parameter that stands for NULL."""
NULLABLE_TEXT_SQL, NULL_TEXT_PARAM = "nullif(?, 0)", 0
"""The SQL placeholder for a text that may be NULL, and the parameter that stands for NULL. It is a
number, because a number differs from every text, even from '0'."""

_REQUIRED_COLUMNS = {
    "lane": ("tenant", "name"),
    "state": (
        "tenant",
        "lane",
        "policy",
        "status",
        "wake_at",
        "next_attempt_at",
        "first_due_at",
    ),
}
"""The columns of each table that have no default value and must not be NULL."""


class MultiRowStatement:
    """A statement for any number of rows: `[?, ?]` in `text` becomes "(?, ?), (?, ?), ..."."""

    def __init__(self, text: str) -> None:
        before, row, after = re.split(r"[\[\]]", text)
        self._texts = {
            size: before + ", ".join([f"({row})"] * size) + after for size in _CHUNK_SIZES
        }
        self._parameters_per_row = row.count("?")

    def execute_chunks(
        self, execute: Execute, parameters: list[Any]
    ) -> Iterator[tuple[int, Cursor]]:
        """Execute the statement for one chunk of rows after the other; yield its size and cursor.

        `parameters` is a flat list of the parameters of all rows, one row after the other.
        """
        begin, rows_left = 0, len(parameters) // self._parameters_per_row
        for size in _CHUNK_SIZES:
            while rows_left >= size:
                end = begin + size * self._parameters_per_row
                yield size, execute(self._texts[size], parameters[begin:end])
                begin, rows_left = end, rows_left - size

    def execute(self, execute: Execute, parameters: list[Any]) -> None:
        """Execute the statement for all rows."""
        for _ in self.execute_chunks(execute, parameters):
            pass


class MultiRowUpdate(MultiRowStatement):
    """The statement `UPDATE table SET column = ?, ... WHERE key = ?`, for any number of rows.

    Each row has its own parameters, in the order of the text. All rows must exist: SQLite runs the
    statement as an INSERT, of which only the part after ON CONFLICT DO UPDATE is applied. The
    inserted values of required columns that the text does not set are never stored.
    """

    def __init__(self, text: str) -> None:
        match = re.fullmatch(r"\s*UPDATE (\w+) SET (.+)\s+WHERE (\w+) = \?\s*", text, re.DOTALL)
        if match is None:
            msg = f"not an update of rows by their key: {text}"
            raise ValueError(msg)
        table, assignments, key = match.groups()
        values: dict[str, str] = {}
        changes: list[str] = []
        for column, value in re.findall(r"(\w+) = (.+?)(?:,\s+(?=\w+ = )|$)", assignments):
            if "?" in value:
                values[column] = value
                changes.append(f"{column} = excluded.{column}")
            else:
                changes.append(f"{column} = {value}")
        values[key] = "?"
        for column in _REQUIRED_COLUMNS[table]:
            values.setdefault(column, "0")
        super().__init__(
            f"INSERT INTO {table} ({', '.join(values)}) VALUES [{', '.join(values.values())}] "
            f"ON CONFLICT ({key}) DO UPDATE SET {', '.join(changes)}"
        )
