"""Describes a defence with its worst case load, and warns about its settings.

A defence is a policy or hedging, with its breaker, budget and limiter. `Policy.explain` describes
the policy alone. This module adds the rest, and how a budget limits the load.
"""

from __future__ import annotations

from inspect import signature
from math import ceil, floor
from typing import TYPE_CHECKING, Any

from tarry.core.budget import PRICES, RatioBudget
from tarry.core.outcome import PERMANENT_SERVER_ERRORS
from tarry.core.policy import POLICY_FIELDS, STATUS_CLASSES
from tarry.core.text import format_duration
from tarry.policyfile.defence import Defence, component_arguments
from tarry.policyfile.translation import BudgetSummary, format_value, summarize_budget

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tarry.core.hedging import Hedging
    from tarry.core.policy import Policy

_LOWEST_ERROR_STATUS = 400
_MIN_USEFUL_DELAY_S = 0.005
"""Most calls take longer than such a short delay, in which no dependency can recover."""
_MANY_ATTEMPTS = 100
_MIN_SUSPICIOUS_S = {
    "initial_delay": 100.0,
    "throttled_delay": 100.0,
    "attempt_timeout": 500.0,
    "max_delay": 1000.0,
    "total_budget": 1000.0,
    "max_hint": 1000.0,
    "hedging.after": 100.0,
    "breaker.window": 1000.0,
    "breaker.slow_after": 100.0,
    "breaker.open_for": 1000.0,
    "breaker.max_open": 1000.0,
}
"""The smallest values that may have been meant as milliseconds. Delays are often 100 ms, limits a
second or more. Limits of some minutes are common, such as a timeout of 100 s."""
_QUARTER_HOUR_S, _HOUR_S = 900, 3600
_PERMANENT_STATUSES = frozenset(
    {*range(400, 408), *range(410, 418), 422, 426, 428, 431, 451, *PERMANENT_SERVER_ERRORS}
)
"""Statuses for which the same request fails again (RFC 9110, RFC 6585), unlike 409 and 423."""
_FEW_STATUSES = 10
"""A class of statuses is listed as a whole if fewer of its statuses than this are missing."""
_PERMANENT_CODES = frozenset({
    "ALREADY_EXISTS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE",
    "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED",
})  # fmt: skip


def explain(defence: Defence) -> str:
    """Return a description of a defence as text."""
    hedging = defence.hedging
    lines = [defence.policy.explain()] if hedging is None else _explain_hedging(hedging)
    repeats = "retries" if hedging is None else "hedges"
    budget = summarize_budget(defence)
    if hedging is None and defence.policy.max_attempts == 1:
        lines += [] if budget is None else ["budget: not used, because nothing is retried"]
    elif budget is not None:
        lines.append(f"budget: {_explain_budget(budget, repeats)}")
    elif hedging is None or hedging.max_extra_load is None:
        ratio = signature(RatioBudget).parameters["ratio"].default
        lines.append(
            f'budget: none; with kind = "ratio", the load would be about {1 + ratio:g} x the calls'
        )
    breaker = component_arguments(defence, "breaker")
    if breaker is not None:
        lines.append(f"breaker: {_explain_breaker(breaker)}")
    limiter = component_arguments(defence, "limiter")
    if defence.limiter is not None and limiter is not None:
        lines.append(f"limiter: {_explain_limiter(defence.limiter['kind'], limiter)}")
    return "\n".join(lines)


def _explain_hedging(hedging: Hedging) -> list[str]:
    attempts = hedging.max_attempts
    if isinstance(hedging.after, float):
        after = format_duration(hedging.after)
    else:
        quantile = _format_percent(hedging.quantile or 0.0).removesuffix(" %")
        after = f"the measured p{quantile} latency (once {hedging.min_samples} calls are measured)"
    rule = (
        f"hedging: at most {attempts} attempts of a call, and the first result is used; another "
        f"attempt (a hedge) starts after {after} without a result, or when an attempt fails"
    )
    hint = f"a server may ask for a wait of up to {format_duration(hedging.max_hint)}"
    load = f"{attempts} x the calls while every attempt is slow or fails"
    if (extra := hedging.max_extra_load) is not None:
        load = f"{1 + extra:g} x the calls: hedges add {_format_percent(extra)} at most"
    return [rule, hint, f"worst case load: {load}"]


def _explain_budget(budget: BudgetSummary, repeats: str) -> str:
    """Describe a budget; `repeats` names the attempts that it limits: "retries" or "hedges"."""
    arguments = budget.arguments
    if budget.kind == "ratio":
        per_second = arguments["min_per_second"]
        minimum = f", plus {per_second:g} per second" if per_second else ""
        return (
            f"{repeats} are at most {_format_percent(arguments['ratio'])} of the calls in the last "
            f"{format_duration(arguments['window'])}{minimum}; "
            f"worst case load: {1 + arguments['ratio']:g} x the calls{minimum}"
        )
    if budget.kind == "token":
        prices = PRICES[arguments["preset"]]
        return (
            f"{repeats} take {prices.retry:g} of {arguments['capacity']:g} tokens each, and a "
            f"success of a first attempt adds {prices.first_attempt_success:g}; without any "
            f"success, they stop after {floor(budget.retries_without_success)} {repeats}, and then "
            "the load is 1 x the calls"
        )
    tokens = arguments["max_tokens"]
    return (
        f"a failure takes 1 of {tokens} tokens, a success adds {arguments['token_ratio']:g}, and "
        f"{repeats} stop when {tokens / 2:g} or fewer are left; without any success, they stop "
        f"after {ceil(budget.retries_without_success)} failures, and then the load is 1 x the calls"
    )


def _explain_breaker(breaker: Mapping[str, Any]) -> str:
    rate, min_calls = _format_percent(breaker["failure_rate"]), breaker["min_calls"]
    window = format_duration(breaker["window"])
    attempts = f"the attempts of at least {min_calls} calls"
    if breaker["count_retries"]:
        attempts = f"at least {min_calls} attempts"
    conditions = f"of {attempts} in the last {window}, at least {rate} failed"
    if breaker["min_span"]:
        conditions += f" over at least {format_duration(breaker['min_span'])}"
    if breaker["slow_after"] is not None:
        slow, after = _format_percent(breaker["slow_rate"]), format_duration(breaker["slow_after"])
        conditions += f" or at least {slow} took longer than {after}"
    if breaker["consecutive"] is not None:
        conditions += f", or when {breaker['consecutive']} attempts in a row failed"
    if breaker["timeouts"] is not None:
        conditions += (
            f", or when {breaker['timeouts']} attempts in a row timed out and no attempt succeeded"
        )
    period = format_duration(breaker["open_for"])
    if breaker["growth"] > 1:
        longest = format_duration(breaker["max_open"])
        period += f" ({breaker['growth']:g} x as long each further time, up to {longest})"
    if breaker["spread"]:
        period += f", plus a random part of up to {_format_percent(breaker['spread'])}"
    count = breaker["close_after"] or breaker["probes"]
    probes = "1 probe (test call) has" if count == 1 else f"{count} probes (test calls) have"
    return (
        f"opens when, {conditions}; then it rejects attempts for {period}, and closes when "
        f"{probes} succeeded"
    )


def _explain_limiter(kind: str, arguments: Mapping[str, Any]) -> str:
    if kind == "in-flight":
        return (
            f"at most {arguments['limit']} attempts at a time, others are rejected; after an "
            f"outage the limit grows from 1 within {format_duration(arguments['ramp'])}"
        )
    if kind == "aimd":
        return (
            f"at most {arguments['initial']} attempts at a time at first, others are rejected; "
            f"the limit adapts between {arguments['min_limit']} and {arguments['max_limit']}, and "
            f"a failure multiplies it by {arguments['decrease_factor']:g}"
        )
    if kind == "adaptive-limit":
        rate = arguments["max_rate"]
        ceiling = "" if rate is None else f" and {rate:g} per second"
        return (
            f"at most {arguments['max_in_flight']} attempts at a time{ceiling}; after an outage, "
            "and once attempts are refused, a rate that follows the capacity of the dependency; an "
            f"attempt that would wait longer than {format_duration(arguments['max_wait'])} is "
            "rejected"
        )
    return (
        "no limit before the first throttled response; then an adaptive rate of attempts, and an "
        f"attempt that would wait longer than {format_duration(arguments['max_wait'])} is rejected"
    )


def _format_percent(ratio: float) -> str:
    return f"{100 * ratio:.4g} %"


def find_warnings(defence: Defence) -> list[str]:
    """Return a warning for each setting that is valid but probably a mistake."""
    warnings = list(_warn_about_milliseconds(defence))
    if defence.hedging is not None:
        return warnings
    policy = defence.policy
    warnings += _warn_about_outcomes(policy)
    return [*warnings, *_warn_about_delays(policy), *_warn_about_time(policy)]


def _warn_about_milliseconds(defence: Defence) -> Iterator[str]:
    breaker = component_arguments(defence, "breaker") or {}
    values = {f"breaker.{name}": value for name, value in breaker.items()}
    json_names: dict[str, str | None] = {}
    if defence.hedging is not None:
        values["hedging.after"] = defence.hedging.after
    else:
        values |= {field.name: getattr(defence.policy, field.name) for field in POLICY_FIELDS}
        json_names = {field.name: field.json_name for field in POLICY_FIELDS}
    for name, min_seconds in _MIN_SUSPICIOUS_S.items():
        value = values.get(name)
        if isinstance(value, (int, float)) and value >= min_seconds and _looks_like_ms(value):
            alternative = f" or {json_names[name]} = {value:.0f}" if name in json_names else ""
            yield (
                f"{name} = {value:g} is {format_duration(value)}, because times are in seconds: "
                f"for {value:.0f} ms, write {name} = {value / 1000:g}{alternative}"
            )


def _looks_like_ms(value: float) -> bool:
    """Return whether a value is typical of milliseconds (500, 30000), but not of seconds.

    Long times in seconds are usually minutes that divide an hour (300), or quarter hours (5400).
    """
    divides_hour = value % 60 == 0 and _HOUR_S % value == 0
    return value % 50 == 0 and value % _QUARTER_HOUR_S != 0 and not divides_hour


def _warn_about_outcomes(policy: Policy) -> Iterator[str]:
    # Most statuses of a class are listed on purpose, as in "5xx" or the preset `webhook`.
    retryable = policy.retryable_statuses
    classes = (set(statuses) for statuses in STATUS_CLASSES.values())
    listed_classes = (statuses for statuses in classes if len(statuses - retryable) < _FEW_STATUSES)
    single_statuses = retryable.difference(*listed_classes)
    non_errors = {status for status in single_statuses if status < _LOWEST_ERROR_STATUS}
    if non_errors:
        statuses = format_value(non_errors)
        yield f"retryable_statuses has {statuses}: responses without an error are retried"
    if "OK" in policy.retryable_codes:
        yield "retryable_codes has OK, which has no effect: a success is never retried"
    for field, permanent in (
        ("retryable_statuses", single_statuses & _PERMANENT_STATUSES),
        ("retryable_codes", policy.retryable_codes & _PERMANENT_CODES),
    ):
        if permanent:
            yield f"{field} has {format_value(permanent)}: the same request fails again"


def _warn_about_delays(policy: Policy) -> Iterator[str]:
    if policy.max_attempts == 1:
        return
    if policy.jitter == "none":
        yield 'jitter is "none": clients that fail together retry together'
    if policy.initial_delay < _MIN_USEFUL_DELAY_S:
        delay = f"{policy.initial_delay:g} is {format_duration(policy.initial_delay)}"
        yield f"initial_delay = {delay}: too short for a dependency to recover"
    attempts = policy.max_attempts
    if attempts > _MANY_ATTEMPTS and policy.total_budget is None:
        times = f"one call may be sent {attempts} times"
        yield f"max_attempts = {attempts}: {times}; set total_budget to limit the time"


def _warn_about_time(policy: Policy) -> Iterator[str]:
    total = policy.total_budget
    if total is None or policy.max_attempts == 1:
        return
    # The bounds of the first delay; a ceiling is the delay before jitter.
    shortest, longest = (policy.delay(policy.ceiling(1), None, random) for random in (0.0, 1.0))
    if shortest >= total:
        yield (
            f"total_budget = {total:g} leaves no time for any retry: the first delay is at least "
            f"{format_duration(shortest)}"
        )
    elif longest > total:
        yield (
            f"total_budget = {total:g} may be shorter than the first delay, which is up to "
            f"{format_duration(longest)}: there is no retry if this delay is "
            f"{format_duration(total)} or longer"
        )
