"""What a run came to: counts, quantiles and time series, gathered while it goes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def metrics(self) -> dict[str, float]:
        """Return every number by its name."""
        return {name: float(getattr(self, name)) for name in METRICS}


METRICS = (
    "calls",
    "succeeded",
    "failed",
    "unfinished",
    "attempts",
    "requests",
    "failures",
    "crashes",
    "success_rate",
    "amplification",
    "peak_load",
    "recovered",
    "recovered_after",
    "p50",
    "p99",
    "p999",
)
