"""A defence as text: its policy, breaker, budget and limiter, and the resulting worst case load.

`Policy.explain` describes the policy alone. This module adds how a budget limits the load.
"""

from __future__ import annotations

from math import ceil, floor
from typing import TYPE_CHECKING, Any

from tarry.core.budget import RatioBudget
from tarry.core.text import format_duration
from tarry.policyfile.defence import LIMITERS
from tarry.policyfile.export.budgets import BudgetSummary, summarize_budget, token_prices
from tarry.policyfile.export.common import breaker_arguments, with_defaults

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.core.hedging import Hedging
    from tarry.policyfile.defence import Defence


def explain(defence: Defence) -> str:
    """Return a description of a defence for people."""
    hedging = defence.hedging
    lines = [defence.policy.explain()] if hedging is None else _explain_hedging(hedging)
    repeats = "retries" if hedging is None else "copies"
    budget = summarize_budget(defence)
    if hedging is None and defence.policy.max_attempts == 1:
        lines += [] if budget is None else ["budget: not used, because nothing is retried"]
    elif budget is not None:
        lines.append(f"budget: {_explain_budget(budget, repeats)}")
    elif hedging is None or hedging.max_extra_load is None:
        ratio = with_defaults(RatioBudget, {})["ratio"]
        lines.append(
            f'budget: none; one would bound that load: kind = "ratio" keeps it near {1 + ratio:g} x'
        )
    breaker = breaker_arguments(defence)
    if breaker is not None:
        lines.append(f"breaker: {_explain_breaker(breaker)}")
    if defence.limiter is not None:
        lines.append(f"limiter: {_explain_limiter(defence.limiter)}")
    return "\n".join(lines)


def _explain_hedging(hedging: Hedging) -> list[str]:
    copies = hedging.max_attempts
    if isinstance(hedging.after, float):
        after = format_duration(hedging.after)
    else:
        quantile = _format_percent(hedging.quantile or 0.0).removesuffix(" %")
        after = f"the live p{quantile} of the latency (known from {hedging.min_samples} calls on)"
    rule = (
        f"hedging: at most {copies} copies of a call, and the first result is used; another copy "
        f"is sent after {after} without a result, or when one fails"
    )
    hint = f"a server may ask for a wait of up to {format_duration(hedging.max_hint)}"
    load = f"worst case load: {copies} x the calls while every copy is slow or fails"
    if hedging.max_extra_load is not None:
        extra = hedging.max_extra_load
        percent = _format_percent(extra)
        load = f"worst case load: {1 + extra:g} x the calls: copies add {percent} at most"
    return [rule, hint, load]


def _explain_budget(budget: BudgetSummary, repeats: str) -> str:
    arguments = budget.arguments
    if budget.kind == "ratio":
        per_second = arguments["min_per_second"]
        minimum = f", plus {per_second:g} a second" if per_second else ""
        return (
            f"{repeats} are at most {_format_percent(arguments['ratio'])} of the calls of the last "
            f"{format_duration(arguments['window'])}{minimum}: "
            f"{1 + arguments['ratio']:g} x the calls{minimum}"
        )
    if budget.kind == "token":
        price, gain = token_prices(arguments["preset"])
        return (
            f"{repeats} take {price:g} of {arguments['capacity']:g} tokens each, and a success "
            f"adds {gain:g}; while none succeeds there are {floor(budget.burst)} {repeats}, and "
            "then none: 1 x the calls"
        )
    tokens = arguments["max_tokens"]
    return (
        f"a failure takes 1 of {tokens} tokens, a success gives {arguments['token_ratio']:g}, and "
        f"there are {repeats} only while more than {tokens / 2:g} are left; while none succeeds, "
        f"none after {ceil(budget.burst)} failures: 1 x the calls"
    )


def _explain_breaker(breaker: Mapping[str, Any]) -> str:
    rate, min_calls = _format_percent(breaker["failure_rate"]), breaker["min_calls"]
    when = [f"{rate} of at least {min_calls} calls in {format_duration(breaker['window'])} failed"]
    if breaker["consecutive"] is not None:
        when.append(f"{breaker['consecutive']} in a row failed")
    if breaker["slow_after"] is not None:
        slow, after = _format_percent(breaker["slow_rate"]), format_duration(breaker["slow_after"])
        when.append(f"{slow} took longer than {after}")
    longer = ""
    if breaker["growth"] > 1:
        longest = format_duration(breaker["max_open"])
        longer = f", {breaker['growth']:g} x as long each further time, {longest} at most"
    spread = (
        f", plus a random part of up to {_format_percent(breaker['spread'])}"
        if breaker["spread"]
        else ""
    )
    return (
        f"opens when {', or '.join(when)}; then it sends nothing for "
        f"{format_duration(breaker['open_for'])}{longer}{spread}, and closes when "
        f"{breaker['probes']} probes have succeeded"
    )


def _explain_limiter(limiter: Mapping[str, Any]) -> str:
    kind = limiter["kind"]
    others = {name: value for name, value in limiter.items() if name != "kind"}
    arguments = with_defaults(LIMITERS[kind], others)
    if kind == "in-flight":
        return (
            f"at most {arguments['limit']} attempts at a time, others are rejected; after an "
            f"outage the limit grows from 1 within {format_duration(arguments['ramp'])}"
        )
    if kind == "aimd":
        return (
            f"at most {arguments['initial']} attempts at a time at first, others are rejected; "
            f"the limit adapts between {arguments['min_limit']} and {arguments['max_limit']}, and "
            f"a failure makes it {arguments['backoff']:g} x as large"
        )
    return (
        "no limit before the first throttled response; then an adaptive rate of attempts, and an "
        f"attempt that would wait longer than {format_duration(arguments['max_wait'])} is rejected"
    )


def _format_percent(share: float) -> str:
    return f"{100 * share:.4g} %"
