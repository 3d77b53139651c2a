"""The table of the job, and the comparison of tarry's rows with the best peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.service.candidates import BATCHES, SINGLES, is_peer
from benchmarks.service.marks import Mark

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.service.job import Row

HEADS = ("tasks/s", "x best", "CPU ms", "x best", "gap p50", "gap p99", "twice")


class Report:
    """The rows of a race; ratios are to the fastest peer and to the peer with the least CPU."""

    def __init__(self, rows: dict[str, Row]) -> None:
        self._rows = rows
        peers = [name for name, row in rows.items() if is_peer(name) and row.runs]
        self._fastest = max(peers, key=lambda name: rows[name].median("rate"), default=None)
        self._least_cpu = min(peers, key=lambda name: rows[name].median("cpu"), default=None)

    def marks(self, name: str) -> list[Mark]:
        """Return the marks of a row; peers have none."""
        least = {SINGLES: 2.0, BATCHES: 3.0}.get(name)
        if least is None:
            return []
        row = self._rows[name]
        gap = row.median("gap_p99") if row.runs else None
        return [
            Mark("x tasks/s", self._ratio(name, self._fastest, "rate"), least=least),
            Mark("x CPU", self._ratio(name, self._least_cpu, "cpu"), most=0.5),
            Mark("gap p99 ms", gap, most=150.0),
        ]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table, the fastest candidate first."""
        yield f"\n{'job':16}" + "".join(f"{head:>9}" for head in HEADS)
        done = {name: row for name, row in self._rows.items() if row.runs}
        for name in sorted(done, key=lambda name: -done[name].median("rate")):
            yield f"{name:16}{''.join(f'{cell:>9}' for cell in self._cells(name))}"
        for name, row in self._rows.items():
            if row.error:
                first, *rest = row.error.splitlines()
                yield f"{name:16}  out: {first}"
                yield from (f"{'':18}{line}" for line in rest)
        if self._fastest is not None:
            yield f"best peer: {self._fastest} in tasks/s, {self._least_cpu} in CPU"
        for name in self._rows:
            yield from (f"{name:16}  {mark}" for mark in self.marks(name))

    def _cells(self, name: str) -> list[str]:
        row = self._rows[name]
        return [
            f"{row.median('rate'):,.0f}",
            _format_ratio(self._ratio(name, self._fastest, "rate")),
            f"{row.median('cpu'):.3f}",
            _format_ratio(self._ratio(name, self._least_cpu, "cpu")),
            f"{row.median('gap_p50'):,.0f}",
            f"{row.median('gap_p99'):,.0f}",
            f"{sum(run.duplicates for run in row.runs)}",
        ]

    def _ratio(self, name: str, other: str | None, what: str) -> float | None:
        if other is None or not self._rows[name].runs:
            return None
        return self._rows[name].ratio(self._rows[other], what)


def _format_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
