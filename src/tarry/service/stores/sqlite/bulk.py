"""Statements for many rows: the fewer they are, the less they cost, and the less they wait.

Each one that is run has its price, whatever it does, and lets go of the interpreter, which the
event loop may then keep for a while. Rows that are there are changed by an INSERT that conflicts
with them: an UPDATE takes many rows only FROM a table, and SQLite would make two for it each time.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence

    from tarry.service.stores.sqlite.ledger import View

    Row = tuple[Any, ...]

_MOST = 64
"""Rows in one. Each number of rows is another statement, which SQLite keeps when it has prepared
it (`cached_statements`)."""


class Bulk:
    """A statement in whose text `{rows}` stands for rows, each of which is written as `row`."""

    def __init__(self, text: str, row: str) -> None:
        self._texts = [text.format(rows=", ".join([row] * size)) for size in range(_MOST + 1)]

    def parts(
        self, view: View, rows: Sequence[Row]
    ) -> Iterator[tuple[Sequence[Row], sqlite3.Cursor]]:
        """Run it part by part, in order; each part comes with what it gave."""
        for begin in range(0, len(rows), _MOST):
            part = rows[begin : begin + _MOST]
            yield part, view.execute(self._texts[len(part)], list(chain.from_iterable(part)))

    def run(self, view: View, rows: Sequence[Row]) -> None:
        """Run it for all rows."""
        for _ in self.parts(view, rows):
            pass
