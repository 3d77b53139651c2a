"""Latency of adding a task, without and with readers of `/events` (see `ingest`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.service import ingest
from benchmarks.service.limits import LimitCheck, quantile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

READERS = 100
MAX_P99_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class EventsResult:
    """Results of the two runs."""

    without_readers: ingest.IngestResult
    with_readers: ingest.IngestResult


def run(seconds: float, progress: Callable[[str], None]) -> EventsResult:
    """Run the service without readers, and then with readers."""
    return EventsResult(
        ingest.run(seconds, progress), ingest.run(seconds, progress, event_readers=READERS)
    )


def table_lines(result: EventsResult) -> Iterator[str]:
    """Yield the lines of the table."""
    counts = result.with_readers.event_counts
    yield from ingest.table_lines(result.without_readers)
    yield from ingest.table_lines(result.with_readers)
    yield f"{READERS} readers: {counts.events:,} events, missed events {counts.missed} times"


def check_limits(result: EventsResult) -> list[LimitCheck]:
    """Return the check of the time of a POST."""
    without, with_readers = (
        quantile(run.times_ms, 0.99) for run in (result.without_readers, result.with_readers)
    )
    ratio = with_readers / without
    return [LimitCheck(f"POST p99 with {READERS} readers, ratio", ratio, maximum=MAX_P99_RATIO)]
