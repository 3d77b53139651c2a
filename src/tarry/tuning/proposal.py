"""Propose a defence from the statistics of a log (`Evidence`), with a reason for each value.

A defence is a policy, or hedging, with an optional breaker, retry budget and limiter. The proposed
value of each field, and the data that each rule needs, are listed in docs/tuning.md. If the log has
too little data for a rule, the current value is kept, and the reason says so.

For a policy of one attempt, no delays and no retry budget are proposed. A call is either retried or
hedged, so for a defence with a policy, hedging is only advice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from tarry.core.checks import check_positive
from tarry.core.text import format_count, format_duration
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.simulator.metrics import quantile
from tarry.tuning import rules
from tarry.tuning.comparison import describe_changes
from tarry.tuning.evidence import required_samples, share_above
from tarry.tuning.rules import TIMEOUT_QUANTILE, format_percent, suggest_attempt_timeout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tarry.simulator.metrics import Summary
    from tarry.tuning.comparison import Comparison
    from tarry.tuning.evidence import AttemptSuccessRate, Evidence
    from tarry.tuning.rules import Suggestion

_DELAY_FIELDS = ("initial_delay", "max_delay")
_POLICY_RULES = (
    suggest_attempt_timeout,
    rules.suggest_initial_delay,
    rules.suggest_max_delay,
    rules.suggest_max_attempts,
    rules.suggest_total_budget,
)
_MIN_PLAUSIBLE_MEDIAN_S = 0.001
"""A lower median suggests that the log has durations in seconds instead of milliseconds."""
_MAX_OUTAGE_SHARE = 0.9
"""If a larger share of the attempts lies in outages, the user gets a warning. The limit is high,
because retries multiply the attempts of an outage."""
_JSON_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.5": 0.995, "p99.9": 0.999}
_JSON_KEYS = {"attempts": "tries", "basis": "evidence"}
"""The JSON keys of `AttemptSuccessRate` and `Suggestion` that differ from the attribute's name."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The suggestions, and the defence before and after they are applied."""

    suggestions: tuple[Suggestion, ...]
    current: Defence
    proposed: Defence
    """The current defence with all suggestions applied, except those that are only advice."""
    warnings: tuple[str, ...] = ()
    """Possible mistakes in the log or in the latency target."""


def propose(
    evidence: Evidence,
    current: Defence | None = None,
    latency_target: float | None = None,
    *,
    has_known_units: bool = False,
) -> Proposal:
    """Propose a defence.

    `current` is the defence that is used now; by default, the default policy. `latency_target` is
    the time that a call may take in total, in seconds. With `has_known_units`, there is no
    warning that very short durations may be in seconds instead of milliseconds.
    """
    warnings = list(_log_warnings(evidence, has_known_units=has_known_units))
    if latency_target is not None:
        latency_target = check_positive("latency_target", latency_target)
        warnings.extend(_latency_target_warnings(evidence, latency_target))
    current = current or Defence()
    hedge_suggestion = rules.suggest_hedging(evidence, current)
    limiter_suggestion = rules.suggest_limiter(evidence, current)
    advice = () if limiter_suggestion is None else (limiter_suggestion,)
    parts: dict[str, Any] = {
        "breaker": current.breaker,
        "limiter": current.limiter,
    }
    if current.hedging is not None:
        budget_suggestion = rules.suggest_retry_budget(evidence, current)
        parts["budget"] = budget_suggestion.proposed
        hedging = replace(current.hedging, after=hedge_suggestion.proposed)
        if latency_target is not None:
            warnings.append("a hedged call has no total_budget: the latency target has no effect")
        proposed = Defence(hedging=hedging, **parts)
        suggested = (*advice, hedge_suggestion, budget_suggestion)
        return Proposal(suggested, current, proposed, tuple(warnings))
    policy = current.policy
    suggestions: list[Suggestion] = []
    for rule in _POLICY_RULES:
        suggestion = rule(evidence, policy, latency_target)
        if suggestion is not None:
            policy = policy.replace(**{suggestion.field: suggestion.proposed})
            suggestions.append(suggestion)
    if policy.max_attempts == 1:
        policy = policy.replace(**{name: getattr(current.policy, name) for name in _DELAY_FIELDS})
        suggestions = [each for each in suggestions if each.field not in _DELAY_FIELDS]
        parts["budget"] = current.budget
    else:
        suggestions = [
            rules.drop_unreachable_max_delay(each, policy) if each.field == "max_delay" else each
            for each in suggestions
        ]
        policy = policy.replace(
            **{each.field: each.proposed for each in suggestions if each.field == "max_delay"}
        )
        budget_suggestion = rules.suggest_retry_budget(evidence, current, policy.max_attempts)
        parts["budget"] = budget_suggestion.proposed
        suggestions.append(budget_suggestion)
    proposed = Defence(policy, **parts)
    return Proposal((*advice, *suggestions, hedge_suggestion), current, proposed, tuple(warnings))


def to_json(evidence: Evidence, proposal: Proposal, comparison: Comparison | None = None) -> str:
    """Return the results as JSON text. Times are in seconds; infinite and NaN metrics are null."""
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
            "odds": list(map(_to_dict, evidence.attempt_success_rates)),
            "outages": [
                {"start": outage.start, "end": outage.end, "share": outage.share}
                for outage in evidence.outages
            ],
            "hedges": [hedge._asdict() for hedge in evidence.hedges],
        },
        "warnings": list(proposal.warnings),
        "suggestions": list(map(_to_dict, proposal.suggestions)),
        "policy": proposal.proposed.to_dict(),
    }
    if comparison is not None:
        data["simulated"] = {
            "duration": comparison.duration,
            "rate": comparison.rate,
            "outages": comparison.outages,
            "concurrency": comparison.concurrency,
            "old": _metrics(comparison.current),
            "new": _metrics(comparison.proposed),
            "changes": describe_changes(comparison.current, comparison.proposed),
        }
    return json.dumps(data, indent=2, allow_nan=False)


def _log_warnings(evidence: Evidence, *, has_known_units: bool) -> Iterator[str]:
    """Yield a warning for each possible mistake in a log."""
    median = quantile(evidence.success_durations, 0.5)
    if median < _MIN_PLAUSIBLE_MEDIAN_S and not has_known_units:
        yield f"durationMs has a median of {format_duration(median)}: are these seconds?"
    if not evidence.calls:
        yield (
            f"none of the {format_count(evidence.attempts, 'attempt')} has attemptNumber 1: "
            "without the first attempts, calls and their retries cannot be counted"
        )
    # `first` and `stop` are indexes into the log, `start` and `end` are times.
    in_outages = sum(outage.stop - outage.first for outage in evidence.outages)
    if in_outages > _MAX_OUTAGE_SHARE * evidence.attempts:
        count = len(evidence.outages)
        outages = "one single outage" if count == 1 else f"{count:,} outages"
        yield (
            f"{format_percent(in_outages / evidence.attempts)} of the attempts lie in {outages}: "
            "the log says little about the time outside outages; use a log of a longer period"
        )


def _latency_target_warnings(evidence: Evidence, target: float) -> Iterator[str]:
    """Warn if many successful attempts took longer than the target; raise if more than half did."""
    durations = evidence.success_durations
    if len(durations) < required_samples(0.5):
        return
    median = quantile(durations, 0.5)
    measured = f"median {format_duration(median)}"
    took_longer = (
        "of the successful attempts outside outages took longer than the latency target of"
    )
    if target < median:
        msg = f"half {took_longer} {format_duration(target)} ({measured}): retries cannot meet it"
        raise ConfigurationError(msg)
    missed = share_above(durations, target)
    if missed > 1 - TIMEOUT_QUANTILE:
        if len(durations) >= required_samples(TIMEOUT_QUANTILE):
            measured += f", p99.5 {format_duration(quantile(durations, TIMEOUT_QUANTILE))}"
        yield f"{format_percent(missed)} {took_longer} {format_duration(target)} ({measured})"


def _to_dict(item: AttemptSuccessRate | Suggestion) -> dict[str, Any]:
    return {_JSON_KEYS.get(name, name): value for name, value in item._asdict().items()}


def _quantiles(ordered: Sequence[float]) -> dict[str, float]:
    values = {name: quantile(ordered, q) for name, q in _JSON_QUANTILES.items()} if ordered else {}
    return {"count": len(ordered), **values}


def _metrics(summary: Summary) -> dict[str, float | None]:
    return {name: value if isfinite(value) else None for name, value in summary.metrics().items()}
