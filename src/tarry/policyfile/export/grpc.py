"""Export to a gRPC service config, the JSON configuration of a channel (gRFC A6).

A service config has attempts, backoff, codes and a deadline for each service or method, and a
throttle. It has no timeout for one attempt, no choice of jitter and no breaker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.outcome import RETRYABLE_CODES
from tarry.errors import ConfigurationError
from tarry.policyfile.durations import format_proto
from tarry.policyfile.export.budgets import summarize_budget
from tarry.policyfile.export.common import (
    breaker_left_out,
    call_timeout,
    delay_bounds,
    delay_losses,
    first_ceilings,
    hedging_delay,
    limiter_losses,
    status_losses,
    waits_longer_when_throttled,
)
from tarry.policyfile.losses import Exported, Loss, Severity, sort_losses

if TYPE_CHECKING:
    from tarry.core.hedging import Hedging
    from tarry.core.policy import Policy
    from tarry.policyfile.defence import Defence

_GRPC = "gRPC"
_MAX_ATTEMPTS = 5
_MAX_TOKENS = 1000
_MIN_TOKEN_RATIO = 0.001
_MIN_BACKOFF_S = 0.005
"""With 1 or 2 ms the C core can lose the retry, and then the call hangs (grpc/grpc#41036)."""
_JITTERS = {
    "none": "gRPC waits 0.8 to 1.2 times the ceiling",
    "full": "gRPC waits 0.8 to 1.2 times the ceiling: twice as long, and much less spread",
}


def to_grpc(defence: Defence, *, service: str | None = None, method: str | None = None) -> Exported:
    """Export to a service config for one method, one service or, without both, for all calls."""
    if method is not None and not service:
        raise ConfigurationError("method", f"needs service: name the service of {method!r} too")
    losses: list[Loss] = []
    names = {"service": service, "method": method}
    config: dict[str, Any] = {"name": [{key: name for key, name in names.items() if name}]}
    if defence.hedging is not None:
        config["hedgingPolicy"] = _hedging_policy(defence.hedging, losses)
    else:
        _add_policy(config, defence.policy, losses)
    document: dict[str, Any] = {"methodConfig": [config]}
    repeats = "retryPolicy" in config or "hedgingPolicy" in config
    throttle = _throttle(defence, losses) if repeats else None
    if throttle is not None:
        document["retryThrottling"] = throttle
    if defence.breaker is not None:
        losses.append(breaker_left_out(defence.breaker, "a service config has none"))
    return Exported((document,), sort_losses([*losses, *limiter_losses(defence, _GRPC)]))


def _add_policy(config: dict[str, Any], policy: Policy, losses: list[Loss]) -> None:
    timeout = call_timeout(policy, _GRPC, losses)
    if timeout is not None:
        config["timeout"] = format_proto("total_budget", timeout)
    if policy.max_attempts == 1:
        return
    # An attempt timeout that is not shorter than the call's timeout has no effect of its own.
    if policy.attempt_timeout is not None and (timeout is None or policy.attempt_timeout < timeout):
        instead = "gRPC has no timeout for one attempt"
        losses.append(Loss("attempt_timeout", policy.attempt_timeout, instead))
    codes = sorted(policy.retryable_codes - {"OK"})
    if not codes:
        instead = "gRPC requires at least one code, so there is no retryPolicy and no retry"
        losses.append(Loss("retryable_codes", codes, instead, Severity.CRITICAL))
        return
    first, longest = (max(_MIN_BACKOFF_S, delay) for delay in delay_bounds(policy))
    multiplier = _multiplier(policy)
    config["retryPolicy"] = {
        "maxAttempts": _attempts("max_attempts", policy.max_attempts, losses),
        "initialBackoff": format_proto("initial_delay", first),
        "maxBackoff": format_proto("max_delay", longest),
        "backoffMultiplier": multiplier,
        "retryableStatusCodes": codes,
    }
    retries = min(policy.max_attempts, _MAX_ATTEMPTS) - 1
    target_delays = [min(longest, first * multiplier**k) for k in range(retries)]
    losses += delay_losses(policy, _GRPC, target_delays, retries)
    jitter = policy.jitter if isinstance(policy.jitter, str) else ""
    losses.append(Loss("jitter", policy.jitter, _JITTERS.get(jitter, _JITTERS["none"])))
    losses += status_losses(policy, _GRPC)
    losses += _other_losses(policy)


def _multiplier(policy: Policy) -> float:
    """Return the multiplier of an exponential backoff, or the average growth of another one."""
    if policy.backoff == "exponential":
        return policy.multiplier
    delays = first_ceilings(policy)[: _MAX_ATTEMPTS - 1]
    if len(delays) == 1:
        return 1.0
    growth = max(delays[-1], 0.001) / max(delays[0], 0.001)
    factor: float = growth ** (1 / (len(delays) - 1))
    return round(max(factor, 0.001), 6)


def _other_losses(policy: Policy) -> list[Loss]:
    instead = "gRPC follows a pushback of any length, and ignores RetryInfo"
    losses = [Loss("max_hint", policy.max_hint, instead, Severity.DETAIL)]
    if "RESOURCE_EXHAUSTED" in policy.retryable_codes and waits_longer_when_throttled(policy):
        instead = "gRPC does not wait longer after RESOURCE_EXHAUSTED than after any other code"
        losses.append(Loss("throttled_delay", policy.throttled_delay, instead))
    if not policy.retry_marked:
        instead = "gRPC retries also what a layer below has already retried"
        losses.append(Loss("retry_marked", policy.retry_marked, instead, Severity.DETAIL))
    return losses


def _attempts(field: str, attempts: int, losses: list[Loss]) -> int:
    if attempts > _MAX_ATTEMPTS:
        losses.append(Loss(field, attempts, f"gRPC makes at most {_MAX_ATTEMPTS}", Severity.LOAD))
    return min(attempts, _MAX_ATTEMPTS)


def _hedging_policy(hedging: Hedging, losses: list[Loss]) -> dict[str, Any]:
    after = hedging_delay(hedging, "grpc")
    if hedging.max_extra_load is not None:
        instead = "gRPC bounds hedges by retryThrottling only"
        load = Loss("hedging.max_extra_load", hedging.max_extra_load, instead, Severity.LOAD)
        losses.append(load)
    instead = "gRPC follows a pushback of any length"
    losses.append(Loss("hedging.max_hint", hedging.max_hint, instead, Severity.DETAIL))
    instead = "Java and .NET hedge; grpcio and C++ ignore a hedgingPolicy"
    losses.append(Loss("hedging", after, instead, Severity.CRITICAL))
    return {
        "maxAttempts": _attempts("hedging.max_attempts", hedging.max_attempts, losses),
        "hedgingDelay": format_proto("hedging.after", after),
        "nonFatalStatusCodes": sorted(RETRYABLE_CODES),
    }


def _throttle(defence: Defence, losses: list[Loss]) -> dict[str, Any] | None:
    """Return the throttle for the budget. Retries stop when half of its tokens are used."""
    budget = summarize_budget(defence)
    if budget is None:
        return None
    if budget.kind == "throttle":
        arguments = budget.arguments
        return {"maxTokens": arguments["max_tokens"], "tokenRatio": arguments["token_ratio"]}
    tokens = max(1, min(_MAX_TOKENS, round(2 * budget.burst)))
    ratio = max(_MIN_TOKEN_RATIO, round(budget.earned, 3))
    instead = (
        f"gRPC has one kind, throttle: {tokens} tokens, a failure takes 1, a success adds "
        f"{ratio:g}, and retries stop at half"
    )
    losses.append(Loss("budget.kind", budget.kind, instead, Severity.LOAD))
    return {"maxTokens": tokens, "tokenRatio": ratio}
