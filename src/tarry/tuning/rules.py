"""The rules for the fields of a policy. Each takes the policy as the rules before have left it."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from tarry.core.explain import duration
from tarry.tuning.estimates import needed, quantile, quantile_interval, rounded
from tarry.tuning.line import Line, kept, too_little
from tarry.tuning.words import counted, percent

if TYPE_CHECKING:
    from tarry.core.policy import Policy
    from tarry.tuning.evidence import Evidence, Odds

SLOW = 0.995
TRIES = 200
FEW = 30
"""Tries that are enough to say that an attempt helps, if they say so clearly."""
OUTAGES = 3
WORTH = 0.01
SHORTEST_DELAY = 0.01
LONGEST_DELAY = 3600.0
_SHORTEST_TIMEOUT = 0.001
_CUT = 0.95
"""A failure that took so much of the timeout ran into it; timers are not exact."""
_OWN_DELAYS = "the backoff has delays of its own"


def timeout(evidence: Evidence, policy: Policy, latency_budget: float | None) -> Line:
    """One healthy attempt in 200 is cut off, to be tried again."""
    field, now, healthy = "attempt_timeout", policy.attempt_timeout, evidence.healthy
    if len(healthy) < needed(SLOW):
        there = counted(len(healthy), "healthy attempt")
        return too_little(field, now, there, f"{needed(SLOW):,} needed for p99.5")
    if now is not None:
        # What the timeout has cut off is missing in the sample. Without this question each
        # round of tuning would find a shorter timeout than the last.
        cut = sum(took >= _CUT * now for took in evidence.faults)
        tried = len(healthy) + cut
        if cut > (1 - SLOW) * tried:
            why = (
                f"{percent(cut / tried)} of healthy attempts ran into the timeout, "
                "so p99.5 lies beyond it: raise it and measure again"
            )
            return kept(field, now, why, f"{cut:,} of {tried:,}", enough=False)
    slow = quantile(healthy, SLOW)
    low, high = map(duration, quantile_interval(healthy, SLOW))
    found = f"{duration(slow)} ({low} to {high}) of {len(healthy):,}"
    if latency_budget is not None and slow > latency_budget:
        why = f"the latency budget: p99.5 of healthy attempts is longer, {duration(slow)}"
        return Line(field, now, latency_budget, why, found)
    proposed = max(rounded(slow, up=True), _SHORTEST_TIMEOUT)
    return Line(field, now, proposed, "p99.5 of healthy attempts", found)


def base(evidence: Evidence, policy: Policy, _: float | None) -> Line:
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
        why = f"two healthy round trips, and no less than {duration(SHORTEST_DELAY)}"
    return Line(field, now, proposed, why, f"median {duration(trip)} of {len(healthy):,}")


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
        proposed, why = latency_budget, "the latency budget: no wait can be longer"
    low, high = duration(lengths[0]), duration(lengths[-1])
    found = f"{len(lengths)} outages, median {duration(usual)} ({low} to {high})"
    return Line(field, now, max(proposed, policy.initial_delay), why, found)


def attempts(evidence: Evidence, policy: Policy, latency_budget: float | None) -> Line:
    """As many as have odds, and as fit."""
    line = _by_odds(evidence, policy.max_attempts)
    if latency_budget is None or policy.attempt_timeout is None:
        return line
    most, needs = _that_fit(policy, line.proposed, latency_budget)
    if most == line.proposed:
        return line
    why = f"{most} fit into {duration(latency_budget)}; {most + 1} can take {duration(needs)}"
    found = f"{duration(policy.attempt_timeout)} for each attempt, and the longest waits"
    return Line(line.field, line.current, most, why, found)


def total(evidence: Evidence, policy: Policy, latency_budget: float | None) -> Line | None:
    """The user's word; the log has no opinion."""
    if latency_budget is None:
        return None
    times = evidence.call_times
    found = ""
    if len(times) >= needed(0.99):
        found = f"calls that succeeded took {duration(quantile(times, 0.99))} at p99"
    return Line("total_budget", policy.total_budget, latency_budget, "the latency budget", found)


def _by_odds(evidence: Evidence, now: int) -> Line:
    field = "max_attempts"
    odds = {one.number: one for one in evidence.odds}
    usual = {one.number: one for one in evidence.healthy_odds}
    last: Odds | None = None
    number = 2
    while (one := odds.get(number)) is not None and (one.tries >= TRIES or number <= now):
        well = usual.get(number)
        if well is not None and well.tries >= FEW and well.low >= WORTH:
            last = well  # it helps on a usual day; those of an outage are the budget's business
        elif one.tries < TRIES:
            break
        elif one.high < WORTH:
            why = f"attempt {number} succeeds {percent(one.share)} of the time: drop it"
            return Line(field, now, number - 1, why, _found(one))
        else:
            last = one
        number += 1
    if number <= now or last is None:
        there = f"attempt {number} was made {counted(one.tries if one else 0, 'time')}"
        return too_little(field, now, there, f"{TRIES} needed")
    why = f"attempt {last.number} still succeeds {percent(last.share)} of the time"
    return Line(field, now, last.number, why, _found(last))


def _found(odds: Odds) -> str:
    between = f"{percent(odds.low)} to {percent(odds.high)}"
    return f"{odds.successes:,} of {odds.tries:,} ({between})"


def _that_fit(policy: Policy, most: int, limit: float) -> tuple[int, float]:
    """Return how many attempts fit into the limit at their longest, and what one more takes."""
    each = policy.attempt_timeout or 0.0
    takes, number = each, 1
    while number < most:
        takes += policy.ceiling(number) + each
        if takes > limit:
            break
        number += 1
    return number, takes
