"""What a run came to: counts, quantiles and time series, gathered while it goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Summary:
    """One run. Times are seconds; `requests` are what reached the last server."""

    calls: int
    """Calls that were begun."""
    succeeded: int
    failed: int
    unfinished: int
    """Calls that still ran or waited when the time was over."""
    attempts: int
    """Attempts that the clients made."""
    requests: int
    failures: int
    """Attempts of the clients that failed."""
    crashes: int
    success_rate: float
    """The share of the calls begun that ended well before the run was over."""
    attempts_per_call: float
    """What the clients send for each call."""
    amplification: float
    """Requests at the last server for each call."""
    peak_load: float
    """The highest rate of requests after the trouble, over the capacity of the last server."""
    recovered_after: float
    """Seconds from the end of the last trouble until all is well and stays so; inf for never."""
    recovered: float
    """1 if all was well again before the end, else 0; the mean of trials is a share."""
    p50: float
    p99: float
    p999: float
    """Quantiles of the time that calls took which ended well, waits included."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Why calls failed: how many for each `tarry.Reason`."""
    bucket: float = 1.0
    series: dict[str, list[float]] = field(default_factory=dict)
    """Per bucket: calls (begun), requests, succeeded, failed, in_progress."""

    def __eq__(self, other: object) -> bool:
        """Compare all that is shown: two numbers without a value are the same here."""
        return isinstance(other, Summary) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def metrics(self) -> dict[str, float]:
        """Return every number by its name."""
        return {name: float(getattr(self, name)) for name in METRICS}


class Metric(NamedTuple):
    """A number for people: how it is written, and what it means."""

    unit: str
    """One of "", "s", "%" and "x"."""
    meaning: str


MEANINGS: dict[str, Metric] = {
    "calls": Metric("", "calls that were begun"),
    "succeeded": Metric("", "calls that ended well before the run was over"),
    "failed": Metric("", "calls that were given up"),
    "unfinished": Metric("", "calls that still ran or waited at the end of the run"),
    "attempts": Metric("", "attempts that the clients made"),
    "requests": Metric("", "what reached the last server"),
    "failures": Metric("", "attempts of the clients that failed"),
    "crashes": Metric("", "how often servers died of their load"),
    "success_rate": Metric("%", "calls that succeeded, of those begun"),
    "attempts_per_call": Metric("x", "what the clients sent for each call"),
    "amplification": Metric("x", "requests at the last server for each call"),
    "peak_load": Metric("x", "busiest second after the trouble, over what the last server can do"),
    "recovered": Metric("%", "the share of runs in which all was well again"),
    "recovered_after": Metric("s", "from the end of the trouble until all is well and stays so"),
    "p50": Metric("s", "half of the calls that succeeded were quicker, waits included"),
    "p99": Metric("s", "99 of 100 calls that succeeded were quicker"),
    "p999": Metric("s", "999 of 1,000 calls that succeeded were quicker"),
}
METRICS = tuple(MEANINGS)
