"""A policy from evidence, each number with its reason.

attempt_timeout   the p99.5 of healthy attempts, of which those that a timeout has cut off are the
                  longest. The one in force stays where the log does not speak against it.
initial_delay     twice the median of healthy attempts, at least 10 ms.
max_delay         a quarter of the median outage.
max_attempts      up to the last attempt that has odds of success: on a usual day at least 1 %
                  for certain, or else over all 1 % possibly (by Wilson's interval). The tries of
                  one outage fail together, so that none is dropped for fewer than three. None is
                  dropped for the latency budget: total_budget bounds the time.
total_budget      the latency budget. One that half of the healthy attempts break is refused.
budget            a ratio: twice the retries for each call outside outages, from 2 % to 20 %.
hedging.after     the earliest percentile that adds at most 5 % of requests, if it saves a tenth
                  of the p99.9. A call is retried or hedged, so beside a policy it is advice.

A policy of one attempt has no waits and no retries: nothing is proposed for them.

A number that the log is too small for is not guessed: the line says so, and the value stays. A
quantile takes five samples beyond it (1,000 for p99.5, 5,000 for p99.9), the median and the odds
of an attempt 200, the usual length of an outage 3, the retry ratio 1,000 calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tarry.core.checks import positive
from tarry.tuning import beside, remarks, rules
from tarry.tuning.timeouts import timeout
from tarry.wire.defence import Defence

if TYPE_CHECKING:
    from tarry.tuning.evidence import Evidence
    from tarry.tuning.line import Line

_OF_RETRIES = ("initial_delay", "max_delay")
_RULES = (timeout, rules.base, rules.cap, rules.attempts, rules.total)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The lines, and the defence that they come to."""

    lines: tuple[Line, ...]
    current: Defence
    defence: Defence
    remarks: tuple[str, ...] = ()
    """What to know before believing it."""


def propose(
    evidence: Evidence, current: Defence | None = None, latency_budget: float | None = None
) -> Proposal:
    """Propose a defence for what the log has seen; without a current one, the defaults are it.

    `latency_budget`: the seconds that a call may take in all.
    """
    said = list(remarks.of_log(evidence))
    if latency_budget is not None:
        latency_budget = positive("latency_budget", latency_budget)
        said.extend(remarks.of_latency_budget(evidence, latency_budget))
    current = current or Defence()
    budget = beside.budget(evidence, current)
    hedge = beside.hedging(evidence, current)
    around: dict[str, Any] = {
        "breaker": current.breaker,
        "budget": budget.proposed,
        "limiter": current.limiter,
    }
    if current.hedging is not None:
        hedging = replace(current.hedging, after=hedge.proposed)
        if latency_budget is not None:
            said.append("a hedged call has no total_budget: the latency budget changes nothing")
        defence = Defence(hedging=hedging, **around)
        return Proposal((hedge, budget), current, defence, tuple(said))
    policy = current.policy
    lines: list[Line] = []
    for rule in _RULES:
        line = rule(evidence, policy, latency_budget)
        if line is not None:
            policy = policy.replace(**{line.field: line.proposed})
            lines.append(line)
    if policy.max_attempts == 1:
        policy = policy.replace(**{name: getattr(current.policy, name) for name in _OF_RETRIES})
        lines = [line for line in lines if line.field not in _OF_RETRIES]
        around["budget"] = current.budget
    else:
        lines.append(budget)
    return Proposal((*lines, hedge), current, Defence(policy, **around), tuple(said))
