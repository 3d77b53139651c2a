"""The rules for the fields of a policy. Each takes the policy as the rules before have left it."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.core.explain import format_duration
from tarry.simulator.metrics import quantile
from tarry.tuning.estimates import needed, rounded
from tarry.tuning.evidence import TAIL
from tarry.tuning.formatting import INTERVAL, counted, percent, setting

if TYPE_CHECKING:
    from tarry.policyfile.defence import Defence
    from tarry.tuning.evidence import Evidence, Hedge

if TYPE_CHECKING:
    from tarry.core.policy import Policy
    from tarry.tuning.evidence import Evidence, Odds

TRIES = 200
FEW = 30
"""Tries that are enough to say that an attempt helps, if they say so clearly."""
OUTAGES = 3
WORTH = 0.01
SHORTEST_DELAY = 0.01
LONGEST_DELAY = 3600.0
_OWN_DELAYS = "the backoff has delays of its own"
_NO_LONGER = "the latency budget: no wait can be longer"


def base(evidence: Evidence, policy: Policy, latency_budget: float | None) -> Line:
    """With full jitter a wait is half its ceiling on average: the first is one round trip."""
    field, now, healthy = "initial_delay", policy.initial_delay, evidence.healthy
    if not isinstance(policy.backoff, str):
        return kept(field, now, _OWN_DELAYS)
    if len(healthy) < TRIES:
        there = counted(len(healthy), "healthy attempt")
        return too_little(field, now, there, f"{TRIES} needed for the median")
    trip = quantile(healthy, 0.5)
    proposed = min(max(rounded(2 * trip), SHORTEST_DELAY), policy.max_delay)
    why = "two healthy round trips: the first wait is one, on average"
    if proposed == SHORTEST_DELAY:
        why = f"two healthy round trips, and no less than {format_duration(SHORTEST_DELAY)}"
    if latency_budget is not None and latency_budget < proposed:
        proposed, why = latency_budget, _NO_LONGER
    return Line(field, now, proposed, why, f"median {format_duration(trip)} of {len(healthy):,}")


def cap(evidence: Evidence, policy: Policy, latency_budget: float | None) -> Line:
    """A call that waits when the dependency is back is late by at most a quarter of the outage."""
    field, now = "max_delay", policy.max_delay
    if not isinstance(policy.backoff, str):
        return kept(field, now, _OWN_DELAYS)
    lengths = sorted(outage.length for outage in evidence.outages)
    if len(lengths) < OUTAGES:
        there = counted(len(lengths), "outage")
        return too_little(field, now, there, f"{OUTAGES} needed for a usual length")
    usual = median(lengths)
    proposed = min(rounded(usual / 4), LONGEST_DELAY)
    why = "a quarter of a usual outage: no call comes back later"
    if latency_budget is not None and latency_budget < proposed:
        proposed, why = latency_budget, _NO_LONGER
    if proposed < policy.initial_delay:
        proposed, why = policy.initial_delay, "no less than initial_delay"
    low, high = format_duration(lengths[0]), format_duration(lengths[-1])
    found = f"{len(lengths)} outages of {low} to {high}, median {format_duration(usual)}"
    return Line(field, now, proposed, why, found)


def attempts(evidence: Evidence, policy: Policy, latency_budget: float | None) -> Line:
    """As many as have odds: those that the latency budget has no time for, total_budget ends."""
    line = _by_odds(evidence, policy.max_attempts)
    if latency_budget is None or policy.attempt_timeout is None:
        return line
    longest = line.proposed * policy.attempt_timeout
    longest += sum(map(policy.ceiling, range(1, line.proposed)))
    if longest <= latency_budget:
        return line
    bound = f"{line.proposed} can take {format_duration(longest)}, which total_budget bounds"
    return line._replace(reason=f"{line.reason}; {bound}")


def total(evidence: Evidence, policy: Policy, latency_budget: float | None) -> Line | None:
    """The user's word; the log has no opinion. An attempt that has begun may still end later."""
    if latency_budget is None:
        return None
    times = evidence.call_times
    found = ""
    if len(times) >= needed(0.99):
        found = f"calls that succeeded took {format_duration(quantile(times, 0.99))} at p99"
    why = "the latency budget: no retry that is expected to end later"
    return Line("total_budget", policy.total_budget, latency_budget, why, found)


def _by_odds(evidence: Evidence, now: int) -> Line:
    field = "max_attempts"
    odds = {one.number: one for one in evidence.odds}
    usual = {one.number: one for one in evidence.healthy_odds}
    last: Odds | None = None
    number = 2
    while (one := odds.get(number)) is not None and (one.tries >= TRIES or number <= now):
        speaks = _that_speaks(usual.get(number), one, len(evidence.outages))
        if speaks is None:
            break
        if speaks.high < WORTH:
            why = f"attempt {number} succeeds {percent(speaks.share)} of the time: drop it"
            return Line(field, now, number - 1, why, _found(speaks))
        last = speaks
        number += 1
    if number <= now or last is None:
        tries = one.tries if one else 0
        if tries < TRIES:
            there = f"attempt {number} was made {counted(tries, 'time')}"
            return too_little(field, now, there, f"{TRIES} needed")
        tries = usual[number].tries if number in usual else 0
        there = f"attempt {number} was made {counted(tries, 'time')} outside outages"
        return too_little(field, now, there, f"{TRIES} needed, or {OUTAGES} outages")
    if last.low < WORTH:
        up_to = f"{_counts(last)}, {INTERVAL} up to {percent(last.high)}"
        return Line(field, now, last.number, f"attempt {last.number} cannot be ruled out: {up_to}")
    why = f"attempt {last.number} still succeeds {percent(last.share)} of the time"
    return Line(field, now, last.number, why, _found(last))


def _that_speaks(usual: Odds | None, over_all: Odds, outages: int) -> Odds | None:
    """Return the odds that say whether an attempt is worth it, or None: too little data.

    A usual day is asked first; what an attempt costs in an outage is the budget's business. The
    tries of one outage fail together: however many they are, they are one sample.
    """
    if usual is not None and (usual.tries >= TRIES or (usual.tries >= FEW and usual.low >= WORTH)):
        return usual
    if over_all.tries >= TRIES and (over_all.high >= WORTH or outages >= OUTAGES):
        return over_all
    return None


def _found(odds: Odds) -> str:
    return f"{_counts(odds)} ({INTERVAL} {percent(odds.low)} to {percent(odds.high)})"


def _counts(odds: Odds) -> str:
    return f"{odds.successes:,} of {odds.tries:,}"


class Line(NamedTuple):
    """One number of a proposal. Values are plain: seconds, counts, tables."""

    field: str
    current: Any
    proposed: Any
    reason: str
    evidence: str = ""
    enough: bool = True
    """False: too little data, so the current value stays."""
    advice: bool = False
    """True: not part of the proposed defence."""


def kept(field: str, value: Any, why: str, evidence: str = "", *, enough: bool = True) -> Line:
    """Leave a value as it is, and say why."""
    stays = "left out" if value is None else f"kept at {setting(field, value)}"
    return Line(field, value, value, f"{why}; {stays}", evidence, enough)


def too_little(field: str, value: Any, there: str, need: str) -> Line:
    """Leave a value as it is, because a number that the log does not have is not guessed."""
    return kept(field, value, f"too little data: {there}, {need}", enough=False)


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
        f"p99.9 of {len(healthy):,}: {format_duration(quantile(healthy, TAIL))}, hedged after "
        f"{format_duration(best.delay)}: {format_duration(best.tail)}"
    )
    if best.saving < LEAST_SAVING:
        why = f"a second copy would not pay ({bargain(best)})"
        return kept(field, now, why, found)._replace(advice=advice)
    instead = "advice, instead of retries: " if advice else ""
    return Line(field, now, best.percentile, f"{instead}{bargain(best)}", found, advice=advice)


def bargain(hedge: Hedge) -> str:
    """Say what a hedge gives and takes: "p95: -38 % p99.9 for +4.1 % load"."""
    return f"{hedge.percentile}: -{percent(hedge.saving)} p99.9 for +{percent(hedge.load)} load"
