"""A policy from evidence, each number with its reason.

attempt_timeout   the p99.5 of healthy attempts.
initial_delay     twice the median of healthy attempts, at least 10 ms.
max_delay         a quarter of the median outage.
max_attempts      up to the last attempt that has odds of success: on a usual day at least 1 %
                  for certain, or else over all 1 % possibly (by Wilson's interval). And as many
                  as fit into the latency budget, each with its timeout and the longest wait.
total_budget      the latency budget.
budget            a ratio: twice the retries for each call outside outages, from 2 % to 20 %.
hedging.after     the earliest percentile that adds at most 5 % of requests, if it saves a tenth
                  of the p99.9. A call is retried or hedged, so beside a policy it is advice.

A number that the log is too small for is not guessed: the line says so, and the value stays. A
quantile takes five samples beyond it (1,000 for p99.5, 5,000 for p99.9), the median and the odds
of an attempt 200, the usual length of an outage 3, the retry ratio 1,000 calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tarry.core.checks import positive
from tarry.tuning import beside, rules
from tarry.wire.defence import Defence

if TYPE_CHECKING:
    from tarry.tuning.evidence import Evidence
    from tarry.tuning.line import Line

_RULES = (rules.timeout, rules.base, rules.cap, rules.attempts, rules.total)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The lines, and the defence that they come to."""

    lines: tuple[Line, ...]
    current: Defence
    defence: Defence


def propose(
    evidence: Evidence, current: Defence | None = None, latency_budget: float | None = None
) -> Proposal:
    """Propose a defence for what the log has seen; without a current one, the defaults are it.

    `latency_budget`: the seconds that a call may take in all.
    """
    if latency_budget is not None:
        latency_budget = positive("latency_budget", latency_budget)
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
        return Proposal((hedge, budget), current, Defence(hedging=hedging, **around))
    policy = current.policy
    lines: list[Line] = []
    for rule in _RULES:
        line = rule(evidence, policy, latency_budget)
        if line is not None:
            policy = policy.replace(**{line.field: line.proposed})
            lines.append(line)
    return Proposal((*lines, budget, hedge), current, Defence(policy, **around))
