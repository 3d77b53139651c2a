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

import json
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from tarry.core.checks import check_positive
from tarry.core.explain import format_duration
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.simulator.metrics import quantile
from tarry.tuning import rules
from tarry.tuning.comparison import verdict
from tarry.tuning.estimates import beyond, needed
from tarry.tuning.formatting import counted, percent
from tarry.tuning.timeouts import SLOW, timeout

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary
    from tarry.tuning.comparison import Replay
    from tarry.tuning.evidence import Evidence
if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.tuning.evidence import Evidence

if TYPE_CHECKING:
    from tarry.tuning.evidence import Evidence
    from tarry.tuning.rules import Line

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
    said = list(of_log(evidence))
    if latency_budget is not None:
        latency_budget = check_positive("latency_budget", latency_budget)
        said.extend(of_latency_budget(evidence, latency_budget))
    current = current or Defence()
    budget = rules.budget(evidence, current)
    hedge = rules.hedging(evidence, current)
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


_QUICK = 0.001
"""A dependency seldom answers sooner; durations in seconds, taken for milliseconds, do."""
_MOST = 0.9
"""Retries multiply the attempts of an outage: two thirds of a useful log may lie in some."""


def of_log(evidence: Evidence) -> Iterator[str]:
    """Say what is odd about a log."""
    middle = quantile(evidence.healthy, 0.5)
    if middle < _QUICK:
        yield f"durationMs has a median of {format_duration(middle)}: are these seconds?"
    if not evidence.calls:
        yield (
            f"none of the {counted(evidence.attempts, 'attempt')} is a first one (attemptNumber 1)"
            ": without the beginnings of calls, neither calls nor their retries can be counted"
        )
    within = sum(outage.behind - outage.first for outage in evidence.outages)
    if within > _MOST * evidence.attempts:
        many = len(evidence.outages)
        where = "one single outage" if many == 1 else f"{many:,} outages"
        yield (
            f"{percent(within / evidence.attempts)} of the attempts lie in {where}: "
            "the log says little about a healthy dependency; take one of a longer time"
        )


def of_latency_budget(evidence: Evidence, budget: float) -> Iterator[str]:
    """Say which attempts cannot end in time; refuse a budget that most of them break."""
    healthy = evidence.healthy
    if len(healthy) < needed(0.5):
        return
    middle = quantile(healthy, 0.5)
    if budget < middle:
        msg = (
            f"a latency budget of {format_duration(budget)} is shorter than half of the healthy "
            f"attempts (median {format_duration(middle)}): it cannot be met by retrying"
        )
        raise ConfigurationError(msg)
    late = beyond(healthy, budget)
    if late > 1 - SLOW:
        slow = (
            f", p99.5 {format_duration(quantile(healthy, SLOW))}"
            if len(healthy) >= needed(SLOW)
            else ""
        )
        yield (
            f"a latency budget of {format_duration(budget)} is shorter than {percent(late)} of the "
            f"healthy attempts (median {format_duration(middle)}{slow}): these cannot end in time"
        )


_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.5": 0.995, "p99.9": 0.999}


def record(evidence: Evidence, proposal: Proposal, runs: Replay | None = None) -> str:
    """Write it all down. Times are seconds; what was never reached is null."""
    plain: dict[str, Any] = {
        "log": {
            "attempts": evidence.attempts,
            "calls": evidence.calls,
            "span": evidence.span,
            "success_rate": evidence.success_rate,
            "attempts_per_call": evidence.attempts_per_call,
            "healthy": _quantiles(evidence.healthy),
            "calls_that_succeeded": _quantiles(evidence.call_times),
            "failure_rate": evidence.fault_share,
            "retry_ratio": evidence.healthy_retry_ratio,
            "most_at_once": evidence.most_at_once,
            "odds": [one._asdict() for one in evidence.odds],
            "outages": [
                {"start": one.start, "end": one.end, "share": one.share} for one in evidence.outages
            ],
            "hedges": [one._asdict() for one in evidence.hedges],
        },
        "remarks": list(proposal.remarks),
        "lines": [line._asdict() for line in proposal.lines],
        "policy": proposal.defence.to_dict(),
    }
    if runs is not None:
        plain["simulated"] = {
            "duration": runs.duration,
            "rate": runs.rate,
            "outages": runs.outages,
            "concurrency": runs.concurrency,
            "old": _metrics(runs.old),
            "new": _metrics(runs.new),
            "verdict": verdict(runs.old, runs.new),
        }
    return json.dumps(plain, indent=2, allow_nan=False)


def _quantiles(ordered: Any) -> dict[str, Any]:
    values = {name: quantile(ordered, q) for name, q in _QUANTILES.items()} if ordered else {}
    return {"count": len(ordered), **values}


def _metrics(summary: Summary) -> dict[str, float | None]:
    return {name: one if isfinite(one) else None for name, one in summary.metrics().items()}
