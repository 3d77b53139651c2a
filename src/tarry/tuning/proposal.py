"""Propose a policy from evidence, each value with its reason.

attempt_timeout   the p99.5 of healthy attempts; attempts that a timeout has cut off count as the
                  longest. The current timeout is kept if the log does not contradict it.
initial_delay     twice the median of healthy attempts, at least 10 ms.
max_delay         a quarter of the median outage.
max_attempts      up to the last attempt that succeeds often enough: outside outages at least 1 %
                  for certain, or else overall possibly 1 % (by Wilson's interval). The attempts of
                  one outage fail together, so that none is dropped with fewer than three outages.
                  None is dropped for the latency target: total_budget limits the time.
total_budget      the latency target. One that is below the median of healthy attempts is rejected.
budget            a ratio: twice the retries per call outside outages, from 2 % to 20 %.
hedging.after     the earliest percentile that adds at most 5 % of requests, if it saves a tenth
                  of the p99.9. A call is retried or hedged, so next to a policy it is advice.

For a policy of one attempt nothing is proposed for waits and retries, because it has none.

A value is not guessed if the log is too small for it: the current value is kept, and the reason
says so. A quantile needs five samples beyond it (1,000 for p99.5, 5,000 for p99.9), the median and
the odds of an attempt need 200 samples, the median outage needs 3, the retry ratio 1,000 calls.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from tarry.core.checks import check_positive
from tarry.core.durations import format_duration
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.simulator.metrics import quantile
from tarry.tuning import rules
from tarry.tuning.comparison import describe_changes
from tarry.tuning.estimates import required_samples, share_above
from tarry.tuning.formatting import format_count, format_percent
from tarry.tuning.timeouts import TIMEOUT_QUANTILE, suggest_attempt_timeout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tarry.simulator.metrics import Summary
    from tarry.tuning.comparison import Comparison
    from tarry.tuning.evidence import Evidence
    from tarry.tuning.rules import Suggestion

_RETRY_FIELDS = ("initial_delay", "max_delay")
_POLICY_RULES = (
    suggest_attempt_timeout,
    rules.suggest_initial_delay,
    rules.suggest_max_delay,
    rules.suggest_max_attempts,
    rules.suggest_total_budget,
)
_MIN_PLAUSIBLE_MEDIAN_S = 0.001
"""Few dependencies respond faster; durations in seconds that were meant as milliseconds do."""
_MAX_OUTAGE_SHARE = 0.9
"""Retries multiply the attempts of an outage, so that a useful log may have two thirds in one."""
_JSON_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.5": 0.995, "p99.9": 0.999}


@dataclass(frozen=True, slots=True)
class Proposal:
    """The suggestions, and the defence that results from them."""

    suggestions: tuple[Suggestion, ...]
    current: Defence
    defence: Defence
    warnings: tuple[str, ...] = ()
    """Doubts about the log or the latency target."""


def propose(
    evidence: Evidence, current: Defence | None = None, latency_target: float | None = None
) -> Proposal:
    """Propose a defence; without a current one, the default policy is the current one.

    `latency_target`: the seconds that a call may take in total.
    """
    warnings = list(_log_warnings(evidence))
    if latency_target is not None:
        latency_target = check_positive("latency_target", latency_target)
        warnings.extend(_latency_target_warnings(evidence, latency_target))
    current = current or Defence()
    budget = rules.suggest_retry_budget(evidence, current)
    hedge = rules.suggest_hedging(evidence, current)
    parts: dict[str, Any] = {
        "breaker": current.breaker,
        "budget": budget.proposed,
        "limiter": current.limiter,
    }
    if current.hedging is not None:
        hedging = replace(current.hedging, after=hedge.proposed)
        if latency_target is not None:
            warnings.append("a hedged call has no total_budget: the latency target has no effect")
        defence = Defence(hedging=hedging, **parts)
        return Proposal((hedge, budget), current, defence, tuple(warnings))
    policy = current.policy
    suggestions: list[Suggestion] = []
    for rule in _POLICY_RULES:
        suggestion = rule(evidence, policy, latency_target)
        if suggestion is not None:
            policy = policy.replace(**{suggestion.field: suggestion.proposed})
            suggestions.append(suggestion)
    if policy.max_attempts == 1:
        policy = policy.replace(**{name: getattr(current.policy, name) for name in _RETRY_FIELDS})
        suggestions = [one for one in suggestions if one.field not in _RETRY_FIELDS]
        parts["budget"] = current.budget
    else:
        suggestions.append(budget)
    defence = Defence(policy, **parts)
    return Proposal((*suggestions, hedge), current, defence, tuple(warnings))


def to_json(evidence: Evidence, proposal: Proposal, comparison: Comparison | None = None) -> str:
    """Return evidence, proposal and comparison as JSON. Times are seconds; infinity is null."""
    data: dict[str, Any] = {
        "log": {
            "attempts": evidence.attempts,
            "calls": evidence.calls,
            "span": evidence.span,
            "success_rate": evidence.success_rate,
            "attempts_per_call": evidence.attempts_per_call,
            "healthy_attempts": _quantiles(evidence.success_durations),
            "successful_calls": _quantiles(evidence.call_durations),
            "failure_rate": evidence.failure_rate,
            "retry_ratio": evidence.healthy_retry_ratio,
            "max_concurrency": evidence.max_concurrency,
            "odds": [odds._asdict() for odds in evidence.odds],
            "outages": [
                {"start": outage.start, "end": outage.end, "share": outage.share}
                for outage in evidence.outages
            ],
            "hedges": [hedge._asdict() for hedge in evidence.hedges],
        },
        "warnings": list(proposal.warnings),
        "suggestions": [suggestion._asdict() for suggestion in proposal.suggestions],
        "policy": proposal.defence.to_dict(),
    }
    if comparison is not None:
        data["simulated"] = {
            "duration": comparison.duration,
            "rate": comparison.rate,
            "outages": comparison.outages,
            "concurrency": comparison.concurrency,
            "old": _metrics(comparison.old),
            "new": _metrics(comparison.new),
            "changes": describe_changes(comparison.old, comparison.new),
        }
    return json.dumps(data, indent=2, allow_nan=False)


def _log_warnings(evidence: Evidence) -> Iterator[str]:
    """Yield what looks wrong with a log."""
    median = quantile(evidence.success_durations, 0.5)
    if median < _MIN_PLAUSIBLE_MEDIAN_S:
        yield f"durationMs has a median of {format_duration(median)}: are these seconds?"
    if not evidence.calls:
        yield (
            f"none of the {format_count(evidence.attempts, 'attempt')} has attemptNumber 1: "
            "without the first attempts, calls and their retries cannot be counted"
        )
    in_outages = sum(outage.stop - outage.first for outage in evidence.outages)
    if in_outages > _MAX_OUTAGE_SHARE * evidence.attempts:
        count = len(evidence.outages)
        outages = "one single outage" if count == 1 else f"{count:,} outages"
        yield (
            f"{format_percent(in_outages / evidence.attempts)} of the attempts lie in {outages}: "
            "the log says little about a healthy dependency; use a log of a longer period"
        )


def _latency_target_warnings(evidence: Evidence, target: float) -> Iterator[str]:
    """Yield which healthy attempts miss the target; raise if half of them do."""
    durations = evidence.success_durations
    if len(durations) < required_samples(0.5):
        return
    median = quantile(durations, 0.5)
    found = f"median {format_duration(median)}"
    if target < median:
        msg = (
            f"a latency target of {format_duration(target)} is shorter than half of the healthy "
            f"attempts ({found}): it cannot be met by retrying"
        )
        raise ConfigurationError(msg)
    missed = share_above(durations, target)
    if missed > 1 - TIMEOUT_QUANTILE:
        if len(durations) >= required_samples(TIMEOUT_QUANTILE):
            found += f", p99.5 {format_duration(quantile(durations, TIMEOUT_QUANTILE))}"
        yield (
            f"a latency target of {format_duration(target)} is shorter than "
            f"{format_percent(missed)} of the healthy attempts ({found}): these cannot end in time"
        )


def _quantiles(ordered: Sequence[float]) -> dict[str, float]:
    values = {name: quantile(ordered, q) for name, q in _JSON_QUANTILES.items()} if ordered else {}
    return {"count": len(ordered), **values}


def _metrics(summary: Summary) -> dict[str, float | None]:
    return {name: value if isfinite(value) else None for name, value in summary.metrics().items()}
