"""gRPC service config: what a channel takes as JSON (gRFC A6).

It has attempts, backoff, codes, a deadline and the throttle, for each service or method. It has
neither a timeout for one attempt, nor a choice of jitter, nor a breaker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.outcome import RETRYABLE_CODES
from tarry.errors import ConfigurationError
from tarry.policyfile.durations import proto
from tarry.policyfile.export.budgets import allowance
from tarry.policyfile.export.common import (
    bounds,
    call_timeout,
    ceilings,
    delay_losses,
    hedging_delay,
    no_breaker,
    no_limiter,
    other_statuses,
    slower_throttled,
)
from tarry.policyfile.losses import Exported, Loss, Rank, ranked

if TYPE_CHECKING:
    from tarry.core.hedging import Hedging
    from tarry.core.policy import Policy
    from tarry.policyfile.defence import Defence

_GRPC = "gRPC"
_MOST_ATTEMPTS = 5
_MOST_TOKENS = 1000
_LEAST_RATIO = 0.001
_SHORTEST_BACKOFF = 0.005
"""With a millisecond or two the C core can lose the retry, and the call hangs (grpc/grpc#41036)."""
_JITTERS = {
    "none": "gRPC draws from 0.8 to 1.2 of the ceiling",
    "full": "gRPC draws from 0.8 to 1.2 of the ceiling: twice the wait, and far less spread",
}


def to_grpc(defence: Defence, *, service: str | None = None, method: str | None = None) -> Exported:
    """Export to a service config, for one method, one service or, without a name, all calls."""
    if method is not None and not service:
        msg = f"method needs service: name the service of {method!r} too"
        raise ConfigurationError(msg)
    losses: list[Loss] = []
    named = {"service": service, "method": method}
    config: dict[str, Any] = {"name": [{key: name for key, name in named.items() if name}]}
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
        losses.append(no_breaker(defence.breaker, "a service config has none"))
    return Exported((document,), ranked([*losses, *no_limiter(defence, _GRPC)]))


def _add_policy(config: dict[str, Any], policy: Policy, losses: list[Loss]) -> None:
    timeout = call_timeout(policy, _GRPC, losses)
    if timeout is not None:
        config["timeout"] = proto("total_budget", timeout)
    if policy.max_attempts == 1:
        return
    # An attempt that may last as long as the call is cut off where gRPC cuts off the call.
    if policy.attempt_timeout is not None and (timeout is None or policy.attempt_timeout < timeout):
        instead = "gRPC has no timeout for one attempt"
        losses.append(Loss("attempt_timeout", policy.attempt_timeout, instead))
    codes = sorted(policy.retryable_codes - {"OK"})
    if not codes:
        instead = "gRPC wants at least one code, so there is no retryPolicy and no retry"
        losses.append(Loss("retryable_codes", codes, instead, Rank.ALARM))
        return
    first, longest = (max(_SHORTEST_BACKOFF, delay) for delay in bounds(policy))
    multiplier = _multiplier(policy)
    config["retryPolicy"] = {
        "maxAttempts": _attempts("max_attempts", policy.max_attempts, losses),
        "initialBackoff": proto("initial_delay", first),
        "maxBackoff": proto("max_delay", longest),
        "backoffMultiplier": multiplier,
        "retryableStatusCodes": codes,
    }
    made = min(policy.max_attempts, _MOST_ATTEMPTS) - 1
    theirs = [min(longest, first * multiplier**k) for k in range(made)]
    losses += delay_losses(policy, _GRPC, theirs, made)
    jitter = policy.jitter if isinstance(policy.jitter, str) else ""
    losses.append(Loss("jitter", policy.jitter, _JITTERS.get(jitter, _JITTERS["none"])))
    losses += other_statuses(policy, _GRPC)
    losses += _unheard(policy)


def _multiplier(policy: Policy) -> float:
    """Return the factor, or the one that leads from the first ceiling to the last."""
    if policy.backoff == "exponential":
        return policy.multiplier
    delays = ceilings(policy)[: _MOST_ATTEMPTS - 1]
    if len(delays) == 1:
        return 1.0
    grown = max(delays[-1], 0.001) / max(delays[0], 0.001)
    factor: float = grown ** (1 / (len(delays) - 1))
    return round(max(factor, 0.001), 6)


def _unheard(policy: Policy) -> list[Loss]:
    instead = "gRPC obeys a pushback of any length, and no RetryInfo"
    losses = [Loss("max_hint", policy.max_hint, instead, Rank.DETAIL)]
    if "RESOURCE_EXHAUSTED" in policy.retryable_codes and slower_throttled(policy):
        instead = "gRPC does not wait longer after RESOURCE_EXHAUSTED than after any other code"
        losses.append(Loss("throttled_delay", policy.throttled_delay, instead))
    if not policy.retry_marked:
        instead = "gRPC retries what a layer below has retried already"
        losses.append(Loss("retry_marked", policy.retry_marked, instead, Rank.DETAIL))
    return losses


def _attempts(field: str, attempts: int, losses: list[Loss]) -> int:
    if attempts > _MOST_ATTEMPTS:
        losses.append(Loss(field, attempts, f"gRPC makes {_MOST_ATTEMPTS} at most", Rank.SENT))
    return min(attempts, _MOST_ATTEMPTS)


def _hedging_policy(hedging: Hedging, losses: list[Loss]) -> dict[str, Any]:
    after = hedging_delay(hedging, "grpc")
    if hedging.max_extra_load is not None:
        instead = "gRPC bounds hedges by retryThrottling only"
        load = Loss("hedging.max_extra_load", hedging.max_extra_load, instead, Rank.SENT)
        losses.append(load)
    instead = "gRPC obeys a pushback of any length"
    losses.append(Loss("hedging.max_hint", hedging.max_hint, instead, Rank.DETAIL))
    instead = "Java and .NET hedge; grpcio and C++ ignore a hedgingPolicy"
    losses.append(Loss("hedging", after, instead, Rank.ALARM))
    return {
        "maxAttempts": _attempts("hedging.max_attempts", hedging.max_attempts, losses),
        "hedgingDelay": proto("hedging.after", after),
        "nonFatalStatusCodes": sorted(RETRYABLE_CODES),
    }


def _throttle(defence: Defence, losses: list[Loss]) -> dict[str, Any] | None:
    """Return the throttle: half its tokens are what can be spent without a success."""
    budget = allowance(defence)
    if budget is None:
        return None
    if budget.kind == "throttle":
        given = budget.arguments
        return {"maxTokens": given["max_tokens"], "tokenRatio": given["token_ratio"]}
    tokens = max(1, min(_MOST_TOKENS, round(2 * budget.burst)))
    ratio = max(_LEAST_RATIO, round(budget.earned, 3))
    instead = (
        f"gRPC has one kind, throttle: {tokens} tokens, a failure takes 1, a success gives "
        f"{ratio:g}, and retries stop at half"
    )
    losses.append(Loss("budget.kind", budget.kind, instead, Rank.SENT))
    return {"maxTokens": tokens, "tokenRatio": ratio}
