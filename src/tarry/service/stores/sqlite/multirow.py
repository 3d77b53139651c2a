"""Statements for many rows: the fewer they are, the less they cost, and the less they wait.

Each one that is run has its price, whatever it does, and lets go of the interpreter, which the
event loop may then keep for a while. Rows that are there are changed by an INSERT that conflicts
with them: an UPDATE takes many rows only FROM a table, and SQLite would make two for it each time.

Values have their price, too. Of each that is not an int, a float, a str or a bytearray, Python asks
how it wants to be written, and it takes longer to ask than to write: so bytes go as bytearrays, and
what is mostly None goes as a value that its column never has (`NUMBER`, `TEXT`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator

    Execute = Callable[[str, list[Any]], sqlite3.Cursor]

_SIZES = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Rows in one. Each number of rows is another statement, and to prepare it takes longer than to run
it twice: so there are few, which are kept (`cached_statements`), and most numbers are two of them.
"""

NULLABLE_NUMBER, NULL_NUMBER = "nullif(?, '')", ""
"""How a number that may be missing is written in a row, and what stands for it then."""
NULLABLE_TEXT, NULL_TEXT = "nullif(?, 0)", 0
"""Likewise for a text: a number is no text, whatever it says."""


class MultiRowStatement:
    """A statement in whose text `{rows}` stands for rows, each of which is written as `row`."""

    def __init__(self, text: str, row: str) -> None:
        self._texts = {size: text.format(rows=", ".join([row] * size)) for size in _SIZES}
        self._width = row.count("?")

    def parts(self, execute: Execute, values: list[Any]) -> Iterator[tuple[int, sqlite3.Cursor]]:
        """Run it part by part, in order; each comes with its number of rows and what it gave.

        `values` are those of all rows, one after the other.
        """
        begin, left = 0, len(values) // self._width
        for size in _SIZES:
            while left >= size:
                end = begin + size * self._width
                yield size, execute(self._texts[size], values[begin:end])
                begin, left = end, left - size

    def run(self, execute: Execute, values: list[Any]) -> None:
        """Run it for all rows."""
        for _ in self.parts(execute, values):
            pass
