"""The table of the job, and the comparison of tarry's rows with the best peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.service.candidates import (
    CANDIDATES,
    CLIENT,
    CLIENT_THREADS,
    OTHER_STORES,
    TARRY_BATCH,
    TARRY_SINGLE,
    is_peer,
)
from benchmarks.service.limits import LimitCheck

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.service.job import Row

TITLES = (
    *("tasks/s", "x best", "CPU ms", "x best", "enqueuer"),
    *("gap p50", "gap p99", "duplicates"),
)
MIN_RATES = {
    TARRY_SINGLE: 2.0,
    TARRY_BATCH: 3.0,
    CLIENT: 2.0,
    CLIENT_THREADS: 1.5,
    **dict.fromkeys(OTHER_STORES, 2.0),
}
"""Lower limits of the tasks per second, relative to the fastest peer."""
MAX_CPU = {
    TARRY_SINGLE: 0.5,
    TARRY_BATCH: 0.5,
    CLIENT: 0.6,
    **dict.fromkeys(OTHER_STORES, 1.0),
}
"""Upper limits of the processor time, relative to the peer with the least."""
MAX_GAP_P99_MS = 150.0
_NAME_WIDTH = max(map(len, CANDIDATES))


class Report:
    """The table of the job; ratios are to the fastest peer and to the peer with the least CPU.

    A row of tarry with its store in a server is compared with the peers that use this server, every
    other row with all peers.
    """

    def __init__(self, rows: dict[str, Row]) -> None:
        self._rows = rows
        self._peers = [name for name, row in rows.items() if is_peer(name) and row.runs]

    def _best_peers(self, name: str | None = None) -> tuple[str | None, str | None]:
        """Return the fastest peer and the one with the least CPU, to compare a row with."""
        server = OTHER_STORES.get(name or "")
        peers = [peer for peer in self._peers if server in {None, CANDIDATES[peer].server}]
        fastest = max(peers, key=lambda peer: self._rows[peer].median("rate"), default=None)
        least_cpu = min(peers, key=lambda peer: self._rows[peer].median("cpu"), default=None)
        return fastest, least_cpu

    def check_limits(self, name: str) -> list[LimitCheck]:
        """Return the limit checks of a row; peers have none."""
        if name not in MIN_RATES:
            return []
        row = self._rows[name]
        fastest, least_cpu = self._best_peers(name)
        rate = self._ratio(name, fastest, "rate")
        checks = [LimitCheck("x tasks/s", rate, minimum=MIN_RATES[name])]
        if name in MAX_CPU:
            cpu = self._ratio(name, least_cpu, "cpu")
            checks.append(LimitCheck("x CPU", cpu, maximum=MAX_CPU[name]))
        gap = row.median("gap_p99") if row.runs else None
        return [*checks, LimitCheck("gap p99 ms", gap, maximum=MAX_GAP_P99_MS)]

    def table_lines(self) -> Iterator[str]:
        """Yield the lines of the table, the fastest candidate first."""
        yield f"\n{'job':{_NAME_WIDTH}}" + "".join(f"{title:>11}" for title in TITLES)
        finished = {name: row for name, row in self._rows.items() if row.runs}
        for name in sorted(finished, key=lambda name: -finished[name].median("rate")):
            yield f"{name:{_NAME_WIDTH}}{''.join(f'{cell:>11}' for cell in self._cells(name))}"
        for name, row in self._rows.items():
            if row.error:
                first, *rest = row.error.splitlines()
                yield f"{name:{_NAME_WIDTH}}  failed: {first}"
                yield from (f"{'':{_NAME_WIDTH + 2}}{line}" for line in rest)
        for name in ("", *OTHER_STORES):
            fastest, least_cpu = self._best_peers(name)
            if fastest is not None and (not name or name in self._rows):
                suffix = f", for {name}" if name else ""
                yield f"best peer: {fastest} in tasks/s, {least_cpu} in CPU{suffix}"
        for name in self._rows:
            yield from (f"{name:{_NAME_WIDTH}}  {check}" for check in self.check_limits(name))

    def _cells(self, name: str) -> list[str]:
        row = self._rows[name]
        fastest, least_cpu = self._best_peers(name)
        return [
            f"{row.median('rate'):,.0f}",
            _format_ratio(self._ratio(name, fastest, "rate")),
            f"{row.median('cpu'):.3f}",
            _format_ratio(self._ratio(name, least_cpu, "cpu")),
            f"{row.median('enqueuer_cpu'):.3f}",
            f"{row.median('gap_p50'):,.0f}",
            f"{row.median('gap_p99'):,.0f}",
            f"{sum(run.duplicates for run in row.runs)}",
        ]

    def _ratio(self, name: str, other: str | None, figure: str) -> float | None:
        if other is None or not self._rows[name].runs:
            return None
        return self._rows[name].ratio(self._rows[other], figure)


def _format_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
