"""SQL statements that take many rows at once.

Three costs decide how the store writes, because the event loop may share the interpreter with it:

* Each executed statement, and each row that is fetched, releases the GIL, and the event loop may
  then keep it for a while. One statement for many rows made batches 18 % and single tasks 7 %
  faster.
* Existing rows are changed with INSERT ... ON CONFLICT DO UPDATE. An UPDATE can take many rows only
  FROM a table of values, for which SQLite would build two temporary tables each time.
* `sqlite3` looks for an adapter for every parameter that is not an int, float, str or bytearray,
  which costs about ten times as much as binding it. So bytes are passed as bytearray, and
  parameters that are mostly None are passed as a sentinel that SQL turns into NULL
  (`NULLABLE_NUMBER`, `NULLABLE_TEXT`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator

    Execute = Callable[[str, list[Any]], sqlite3.Cursor]

_CHUNK_SIZES = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Numbers of rows for which a statement exists. Preparing a statement takes longer than running it
twice, so there are only twelve, which stay in the statement cache; most batches need two of them.
"""

NULLABLE_NUMBER, NULL_NUMBER = "nullif(?, '')", ""
"""Placeholder for a number that may be NULL, and the parameter that stands for NULL."""
NULLABLE_TEXT, NULL_TEXT = "nullif(?, 0)", 0
"""Placeholder for a text that may be NULL, and the parameter that stands for NULL: a number, which
differs from every text, even from '0'."""


class MultiRowStatement:
    """A statement for any number of rows.

    `{rows}` in `text` is replaced by the rows, each of them written as `row`: "(?, ?)".
    """

    def __init__(self, text: str, row: str) -> None:
        self._texts = {size: text.format(rows=", ".join([row] * size)) for size in _CHUNK_SIZES}
        self._parameters_per_row = row.count("?")

    def execute_chunks(
        self, execute: Execute, parameters: list[Any]
    ) -> Iterator[tuple[int, sqlite3.Cursor]]:
        """Execute the statement chunk by chunk; yield the number of rows and the cursor of each.

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
