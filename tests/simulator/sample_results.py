"""Sample study results with every kind of plot, and with values that are hard to draw."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import exp, inf, sin
from typing import Any

from tarry.simulator.study import Column, Plot, Study, StudyResults, StudyRow

VARIANTS = (
    "none",
    "full",
    "equal",
    "decorrelated",
    "full jitter with a token budget and a breaker in every process",
)
COLUMNS = (
    Column("success_rate", "calls that succeeded", "%"),
    Column("amplification", "requests per call", "x"),
    Column("recovered_after", "recovered after", "s"),
    Column("p99", "p99 of a call", "ms"),
    Column("requests", "requests"),
)
SERIES = Plot(
    "series",
    "requests",
    "Requests at the server",
    y_title="requests a second",
    spans=((20.0, 40.0, "frozen"), (110.0, 125.0, "maintenance"), (200.0, 210.0, "too late")),
)
BARS = Plot("bars", "recovered_after", "Time to recovery")
LINES = Plot(
    "lines", "amplification", "Load for each call", x="clients", y_title="requests per call"
)
PLOTS = (SERIES, BARS, Plot("bars", "amplification", "Requests for each call"))


@dataclass
class SampleTrial:
    """A trial with these metrics and time series."""

    metric_values: dict[str, float]
    series: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    bucket: float = 1.0

    def metrics(self) -> dict[str, float]:
        """Return the value of each metric by its name."""
        return self.metric_values


def sample_study(**changes: Any) -> Study:
    """Return the study "storm" with these fields changed."""
    fields: dict[str, Any] = {
        "name": "storm",
        "question": "A dependency is down for twenty seconds. What do the retries of 500 clients "
        "do to it when it returns?",
        "lesson": "Backoff alone moves the storm, it does not end it: clients that failed together "
        "come back together.\n\nJitter spreads them, a budget bounds them.",
        "run": lambda **_: [],
        "variant_parameter": "jitter",
        "variants": VARIANTS,
        "columns": COLUMNS,
        "plots": PLOTS,
        "parameters": {"clients": 500, "outage": 20.0, "capacity": 100},
        "trial_count": 1,
    }
    return Study(**{**fields, **changes})


def sample_trial(number: int, clients: int = 500, points: int = 120) -> SampleTrial:
    """Return a trial for the variant with this index; the result is deterministic."""
    amplitude = clients / (1 + number**2)
    requests = [
        max(0.0, round(amplitude * (1 + sin(t * (1 + number) / 4)) * exp(-max(0, t - 40) / 30)))
        for t in range(points)
    ]
    return SampleTrial(
        {
            "success_rate": (0.4, 0.95, 0.9996, 1.0, 1.0)[number % 5],
            "amplification": 1 + 3 * clients / 500 / (1 + number),
            "recovered_after": (inf, 31.25, 18.0, 9.5, 0.0)[number % 5],
            "p99": (12.5, 4.25, 2.0, 1.1, 0.052)[number % 5],
            "requests": sum(requests),
        },
        {"requests": requests},
        {"attempts": number},
    )


def sample_results(**changes: Any) -> StudyResults:
    """Return results with one row for each variant."""
    study = sample_study(**changes)
    rows = [
        StudyRow(name, {}, [sample_trial(number)]) for number, name in enumerate(study.variants)
    ]
    return StudyResults(study, 7, 1, rows)


def swept_results(values: dict[str, tuple[Any, ...]], **changes: Any) -> StudyResults:
    """Return results with one row for each variant at each point of a sweep."""
    study = sample_study(**changes)
    rows = [
        StudyRow(
            name, dict(zip(values, point, strict=True)), [sample_trial(number, 10 + 90 * index)] * 2
        )
        for index, point in enumerate(product(*values.values()))
        for number, name in enumerate(study.variants)
    ]
    return StudyResults(study, 7, 2, rows)
