"""A defence in words: the policy, what stands around it, and the load that comes of them together.

The policy knows its own worst case. By how much a budget lowers it is known only here.
"""

from __future__ import annotations

from math import ceil, floor
from typing import TYPE_CHECKING, Any

from tarry.core.budget import RatioBudget
from tarry.core.durations import format_duration
from tarry.policyfile.defence import LIMITERS
from tarry.policyfile.export.budgets import Allowance, allowance, prices
from tarry.policyfile.export.common import breaker_of, filled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.core.hedging import Hedging
    from tarry.policyfile.defence import Defence


def explain(defence: Defence) -> str:
    """Describe a defence for a person who has to decide whether to use it."""
    hedging = defence.hedging
    lines = [defence.policy.explain()] if hedging is None else _hedging(hedging)
    repeats = "retries" if hedging is None else "copies"
    budget = allowance(defence)
    if hedging is None and defence.policy.max_attempts == 1:
        lines += [] if budget is None else ["budget: not used, because nothing is retried"]
    elif budget is not None:
        lines.append(f"budget: {_budget(budget, repeats)}")
    elif hedging is None or hedging.max_extra_load is None:
        near = filled(RatioBudget, {})["ratio"]
        lines.append(
            f'budget: none; one would bound that load: kind = "ratio" keeps it near {1 + near:g} x'
        )
    breaker = breaker_of(defence)
    if breaker is not None:
        lines.append(f"breaker: {_breaker(breaker)}")
    if defence.limiter is not None:
        lines.append(f"limiter: {_limiter(defence.limiter)}")
    return "\n".join(lines)


def _hedging(hedging: Hedging) -> list[str]:
    most = hedging.max_attempts
    if isinstance(hedging.after, float):
        after = format_duration(hedging.after)
    else:
        quantile = _percent(hedging.quantile or 0.0).removesuffix(" %")
        after = f"the live p{quantile} of the latency (known from {hedging.min_samples} calls on)"
    sent = (
        f"hedging: {most} copies of a call at most, and the first answer wins; another one is sent "
        f"after {after} without an answer, or when one fails"
    )
    hint = f"a server may ask for a wait of up to {format_duration(hedging.max_hint)}"
    load = f"worst case load: {most} x the calls while every copy is slow or fails"
    if hedging.max_extra_load is not None:
        extra = hedging.max_extra_load
        load = f"worst case load: {1 + extra:g} x the calls: copies add {_percent(extra)} at most"
    return [sent, hint, load]


def _budget(budget: Allowance, repeats: str) -> str:
    given = budget.arguments
    if budget.kind == "ratio":
        least = given["min_per_second"]
        floor_too = f", plus {least:g} a second" if least else ""
        return (
            f"{repeats} are at most {_percent(given['ratio'])} of the calls of the last "
            f"{format_duration(given['window'])}{floor_too}: "
            f"{1 + given['ratio']:g} x the calls{floor_too}"
        )
    if budget.kind == "token":
        price, gain = prices(given["preset"])
        return (
            f"{repeats} take {price:g} of {given['capacity']:g} tokens each, and a success gives "
            f"{gain:g}; while none succeeds there are {floor(budget.burst)} {repeats}, and then "
            "none: 1 x the calls"
        )
    tokens = given["max_tokens"]
    return (
        f"a failure takes 1 of {tokens} tokens, a success gives {given['token_ratio']:g}, and "
        f"there are {repeats} only while more than {tokens / 2:g} are left; while none succeeds, "
        f"none after {ceil(budget.burst)} failures: 1 x the calls"
    )


def _breaker(breaker: Mapping[str, Any]) -> str:
    rate, least = _percent(breaker["failure_rate"]), breaker["min_calls"]
    when = [f"{rate} of at least {least} calls in {format_duration(breaker['window'])} failed"]
    if breaker["consecutive"] is not None:
        when.append(f"{breaker['consecutive']} in a row failed")
    if breaker["slow_after"] is not None:
        slow, after = _percent(breaker["slow_rate"]), format_duration(breaker["slow_after"])
        when.append(f"{slow} took longer than {after}")
    longer = ""
    if breaker["growth"] > 1:
        longest = format_duration(breaker["max_open"])
        longer = f", {breaker['growth']:g} x as long each further time, {longest} at most"
    spread = f", plus up to {_percent(breaker['spread'])}, drawn" if breaker["spread"] else ""
    return (
        f"opens when {', or '.join(when)}; then it sends nothing for "
        f"{format_duration(breaker['open_for'])}{longer}{spread}, and closes when "
        f"{breaker['probes']} probes have succeeded"
    )


def _limiter(limiter: Mapping[str, Any]) -> str:
    kind = limiter["kind"]
    rest = {name: value for name, value in limiter.items() if name != "kind"}
    given = filled(LIMITERS[kind], rest)
    if kind == "in-flight":
        return (
            f"at most {given['limit']} attempts at a time, others are refused; after an outage "
            f"the cap grows from 1 within {format_duration(given['ramp'])}"
        )
    if kind == "aimd":
        return (
            f"at most {given['initial']} attempts at a time at first, others are refused; the cap "
            f"finds itself between {given['min_limit']} and {given['max_limit']}, and a failure "
            f"makes it {given['backoff']:g} x as large"
        )
    return (
        "no limit before the first throttled answer; then a rate of attempts that finds itself, "
        f"and what would wait for longer than {format_duration(given['max_wait'])} is refused"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
