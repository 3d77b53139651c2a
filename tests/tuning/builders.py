"""Attempt logs with known properties, generated from a seed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import exp
from random import Random
from typing import TYPE_CHECKING, Any

from tarry.core.outcome import Kind
from tarry.tuning.attempt_log import AttemptLog, LoggedAttempt
from tarry.tuning.evidence import analyze_log
from tarry.tuning.proposal import propose

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tarry.tuning.evidence import Evidence
    from tarry.tuning.rules import Suggestion


EPOCH = 1_800_000_000.0
HEADER = "taskId,attemptNumber,startedAt,durationMs,outcome"


@dataclass(frozen=True, kw_only=True)
class LogModel:
    """The dependency and clients of a generated log. Outages are in seconds from its start."""

    calls: int = 3_000
    rate: float = 50.0
    median: float = 0.05
    sigma: float = 0.5
    success_rates: Sequence[float] = (0.98, 0.9, 0.5, 0.2)
    """Success rates of attempts 1, 2, ... outside outages; their number limits the attempts."""
    outages: Sequence[tuple[float, float]] = ()
    timeout: float | None = None
    pause: float = 0.2
    always_failing: float = 0.0
    """The share of the calls of which each attempt fails."""

    def quantile(self, normal: float) -> float:
        """Return the quantile of the latency for this quantile of the normal distribution."""
        return self.median * exp(self.sigma * normal)

    def attempts(self, seed: int = 7) -> Iterator[LoggedAttempt]:
        """Yield the attempts of one call after the other; they are not sorted by time."""
        random_source = Random(seed)
        now = 0.0
        for task in range(self.calls):
            now += random_source.expovariate(self.rate)
            start = now
            hopeless = bool(self.always_failing) and random_source.random() < self.always_failing
            for number, success_rate in enumerate(self.success_rates, 1):
                duration = self.median * exp(self.sigma * random_source.gauss())
                down = any(begin <= start < end for begin, end in self.outages)
                late = self.timeout is not None and duration > self.timeout
                succeeds = random_source.random() < success_rate and not (down or late or hopeless)
                if late and not down:
                    duration = self.timeout or 0.0
                kind = Kind.SUCCESS if succeeds else Kind.TRANSIENT
                yield LoggedAttempt(f"task {task}", number, EPOCH + start, duration, kind)
                if succeeds:
                    break
                start += duration + self.pause * random_source.random()

    def log(self, seed: int = 7) -> AttemptLog:
        """Return the attempts as a log."""
        return AttemptLog(self.attempts(seed))


def write_csv(path: Path, attempts: Iterator[LoggedAttempt]) -> Path:
    """Write attempts as CSV, as the service exports them."""
    lines = [
        f"{a.task},{a.number},{a.start * 1000:.3f},{a.duration * 1000:.6f},{a.kind}"
        for a in attempts
    ]
    path.write_text("\n".join([HEADER, *lines, ""]), encoding="utf-8")
    return path


def write_jsonl(path: Path, attempts: Iterator[LoggedAttempt]) -> Path:
    """Write attempts as JSONL, with statuses instead of outcomes."""
    status = {Kind.SUCCESS: 200, Kind.TRANSIENT: 503}
    rows = [
        {
            "taskId": attempt.task,
            "attemptNumber": attempt.number,
            "startedAt": round(attempt.start * 1000, 3),
            "durationMs": round(attempt.duration * 1000, 6),
            "responseStatus": status[attempt.kind],
        }
        for attempt in attempts
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


LOG_MODEL = LogModel(
    calls=20_000,
    median=0.05,
    success_rates=(0.97, 0.9, 0.5, 0.001),
    outages=((50, 90), (150, 190), (300, 340)),
)
P995 = 2.5758
"""The 99.5th percentile of the normal distribution."""


@cache
def analyze_model(model: LogModel) -> Evidence:
    """Return the evidence of a generated log; the result is cached."""
    return analyze_log(model.log())


def suggestion_for(model: LogModel, field: str, *arguments: Any) -> Suggestion:
    """Return the suggestion for one field."""
    suggestions = propose(analyze_model(model), *arguments).suggestions
    return next(suggestion for suggestion in suggestions if suggestion.field == field)
