"""The rules for what stands beside a policy: its retry budget, or hedging in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.explain import duration
from tarry.simulator.meter import quantile
from tarry.tuning.estimates import needed, rounded
from tarry.tuning.evidence import TAIL
from tarry.tuning.line import Line, kept, too_little
from tarry.tuning.words import counted, percent

if TYPE_CHECKING:
    from tarry.tuning.evidence import Evidence, Hedge
    from tarry.wire.defence import Defence

CALLS = 1_000
LEAST_RATIO, MOST_RATIO = 0.02, 0.2
MOST_LOAD = 0.05
LEAST_SAVING = 0.1


def budget(evidence: Evidence, current: Defence) -> Line:
    """It stops no retry outside outages, and bounds those of an outage."""
    now = None if current.budget is None else dict(current.budget)
    if evidence.healthy_calls < CALLS:
        there = counted(evidence.healthy_calls, "call") + " outside outages"
        return too_little("budget", now, there, f"{CALLS:,} needed for the retry ratio")
    measured = evidence.healthy_retry_ratio
    ratio = min(max(rounded(2 * measured), LEAST_RATIO), MOST_RATIO)
    proposed: dict[str, Any] = {"kind": "ratio"}
    if now is not None and now.get("kind") == "ratio":
        proposed |= now
    proposed["ratio"] = ratio
    why = "twice the retries of the time outside outages"
    if ratio in {LEAST_RATIO, MOST_RATIO}:
        why += f", and {'no less' if ratio == LEAST_RATIO else 'no more'} than {percent(ratio)}"
    found = (
        f"{percent(measured)} of {evidence.healthy_calls:,} calls outside outages, "
        f"{percent(evidence.retries / evidence.calls)} over all"
    )
    return Line("budget", now, proposed, why, found)


def hedging(evidence: Evidence, current: Defence) -> Line:
    """The earliest percentile whose load is small; for a policy it is advice."""
    field, now = "hedging.after", None if current.hedging is None else current.hedging.after
    healthy = evidence.healthy
    advice = current.hedging is None
    if len(healthy) < needed(TAIL):
        there = counted(len(healthy), "healthy attempt")
        line = too_little(field, now, there, f"{needed(TAIL):,} needed for p99.9")
        return line._replace(advice=advice)
    best = next(one for one in evidence.hedges if one.load <= MOST_LOAD)
    found = (
        f"p99.9 of {len(healthy):,}: {duration(quantile(healthy, TAIL))}, hedged after "
        f"{duration(best.delay)}: {duration(best.tail)}"
    )
    if best.saving < LEAST_SAVING:
        why = f"a second copy would not pay ({bargain(best)})"
        return kept(field, now, why, found)._replace(advice=advice)
    instead = "advice, instead of retries: " if advice else ""
    return Line(field, now, best.percentile, f"{instead}{bargain(best)}", found, advice=advice)


def bargain(hedge: Hedge) -> str:
    """Say what a hedge gives and takes: "p95: -38 % p99.9 for +4.1 % load"."""
    return f"{hedge.percentile}: -{percent(hedge.saving)} p99.9 for +{percent(hedge.load)} load"
