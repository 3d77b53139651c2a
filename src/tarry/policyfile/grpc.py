"""gRPC service configs, the JSON configuration of a channel (gRFC A6): export and import.

A service config has attempts, backoff, codes and a deadline for each service or method, and a
throttle. It has no timeout for one attempt, no choice of jitter and no breaker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.hedging import Hedging
from tarry.core.outcome import GRPC_CODES, RETRYABLE_CODES, RETRYABLE_STATUSES
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError
from tarry.policyfile import translation
from tarry.policyfile.defence import Defence
from tarry.policyfile.documents import DocumentTable, format_proto, parse_proto
from tarry.policyfile.translation import Exported, Imported, Losses, Severity, format_value

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_ATTEMPTS = 5
_MAX_TOKENS = 1000
_MIN_TOKEN_RATIO = 0.001
_MIN_BACKOFF_S = 0.005
"""With 1 or 2 ms the C core can lose the retry, and then the call hangs (grpc/grpc#41036)."""
_JITTERS = {
    "none": "gRPC waits 0.8 to 1.2 times the ceiling",
    "full": "gRPC waits 0.8 to 1.2 times the ceiling: twice as long, and much less spread",
}
_UNSUPPORTED_ROOT_KEYS = ("loadBalancingConfig", "loadBalancingPolicy", "healthCheckConfig")
_ROOT_KEYS = ("methodConfig", "retryThrottling", *_UNSUPPORTED_ROOT_KEYS)
_UNSUPPORTED_KEYS = ("waitForReady", "maxRequestMessageBytes", "maxResponseMessageBytes")
_METHOD_CONFIG_KEYS = ("name", "timeout", "retryPolicy", "hedgingPolicy", *_UNSUPPORTED_KEYS)
_RETRY_POLICY_FIELDS = {
    "maxAttempts": "max_attempts",
    "initialBackoff": "initial_delay",
    "maxBackoff": "max_delay",
    "backoffMultiplier": "multiplier",
    "retryableStatusCodes": "retryable_codes",
}
"""The keys of a retryPolicy and the corresponding fields of a policy."""
_HEDGING_POLICY_KEYS = ("maxAttempts", "hedgingDelay", "nonFatalStatusCodes")
_MIN_MULTIPLIER = 1.0
_PUSHBACK = ("pushback", "gRPC follows a pushback of any length")
"""The arguments `hint` and `source` of `Losses.add_for_hint`."""


def to_grpc(defence: Defence, *, service: str | None = None, method: str | None = None) -> Exported:
    """Export to a service config for one method, one service or, without both, for all calls."""
    _check_names(service, method)
    losses = Losses("gRPC")
    names = {"service": service, "method": method}
    config: dict[str, Any] = {"name": [{key: name for key, name in names.items() if name}]}
    if defence.hedging is not None:
        config["hedgingPolicy"] = _hedging_policy(defence.hedging, losses)
    else:
        _add_policy(config, defence.policy, losses)
    document: dict[str, Any] = {"methodConfig": [config]}
    repeats = "retryPolicy" in config or "hedgingPolicy" in config
    throttle = _retry_throttling(defence, losses) if repeats else None
    if throttle is not None:
        document["retryThrottling"] = throttle
    losses.add_for_breaker(defence, "a service config has none")
    losses.add_for_limiter(defence)
    return Exported((document,), losses.by_severity())


def _check_names(service: str | None, method: str | None) -> None:
    if method is not None and not service:
        raise ConfigurationError("method", f"needs service: name the service of {method!r} too")


def _add_policy(config: dict[str, Any], policy: Policy, losses: Losses) -> None:
    timeout = losses.call_timeout(policy)
    if timeout is not None:
        config["timeout"] = format_proto("total_budget", timeout)
    if policy.max_attempts == 1:
        return
    # An attempt timeout that is not shorter than the call's timeout has no effect of its own.
    if policy.attempt_timeout is not None and (timeout is None or policy.attempt_timeout < timeout):
        instead = "gRPC has no timeout for one attempt"
        losses.add("attempt_timeout", policy.attempt_timeout, instead)
    codes = sorted(policy.retryable_codes - {"OK"})
    if not codes:
        instead = "gRPC requires at least one code, so there is no retryPolicy and no retry"
        losses.add("retryable_codes", codes, instead, Severity.CRITICAL)
        return
    first, longest = (max(_MIN_BACKOFF_S, delay) for delay in translation.delay_bounds(policy))
    multiplier = _multiplier(policy)
    config["retryPolicy"] = {
        "maxAttempts": _limit_attempts("max_attempts", policy.max_attempts, losses),
        "initialBackoff": format_proto("initial_delay", first),
        "maxBackoff": format_proto("max_delay", longest),
        "backoffMultiplier": multiplier,
        "retryableStatusCodes": codes,
    }
    retries = min(policy.max_attempts, _MAX_ATTEMPTS) - 1
    target_delays = [min(longest, first * multiplier**k) for k in range(retries)]
    losses.add_for_delays(policy, target_delays, retries)
    jitter = policy.jitter if isinstance(policy.jitter, str) else ""
    losses.add("jitter", policy.jitter, _JITTERS.get(jitter, _JITTERS["none"]))
    if policy.retryable_statuses != RETRYABLE_STATUSES:
        statuses, instead = policy.retryable_statuses, "gRPC has no HTTP statuses"
        losses.add("retryable_statuses", statuses, instead, Severity.LOAD)
    instead = "gRPC follows a pushback of any length, and ignores RetryInfo"
    losses.add("max_hint", policy.max_hint, instead, Severity.DETAIL)
    throttling = "RESOURCE_EXHAUSTED"
    losses.add_for_throttling(policy, throttling if throttling in codes else None, "code")


def _multiplier(policy: Policy) -> float:
    """Return the multiplier of an exponential backoff, or the average growth of another one."""
    if policy.backoff == "exponential":
        return policy.multiplier
    delays = translation.first_ceilings(policy)[: _MAX_ATTEMPTS - 1]
    if len(delays) == 1:
        return 1.0
    growth = max(delays[-1], 0.001) / max(delays[0], 0.001)
    factor: float = growth ** (1 / (len(delays) - 1))
    return round(max(factor, 0.001), 6)


def _limit_attempts(field: str, attempts: int, losses: Losses) -> int:
    if attempts > _MAX_ATTEMPTS:
        losses.add(field, attempts, f"gRPC makes at most {_MAX_ATTEMPTS}", Severity.LOAD)
    return min(attempts, _MAX_ATTEMPTS)


def _hedging_policy(hedging: Hedging, losses: Losses) -> dict[str, Any]:
    after = translation.hedging_delay(hedging, "grpc")
    if hedging.max_extra_load is not None:
        instead = "gRPC bounds hedges by retryThrottling only"
        losses.add("hedging.max_extra_load", hedging.max_extra_load, instead, Severity.LOAD)
    instead = "gRPC follows a pushback of any length"
    losses.add("hedging.max_hint", hedging.max_hint, instead, Severity.DETAIL)
    instead = "Java and .NET hedge; grpcio and C++ ignore a hedgingPolicy"
    losses.add("hedging", after, instead, Severity.CRITICAL)
    return {
        "maxAttempts": _limit_attempts("hedging.max_attempts", hedging.max_attempts, losses),
        "hedgingDelay": format_proto("hedging.after", after),
        "nonFatalStatusCodes": sorted(RETRYABLE_CODES),
    }


def _retry_throttling(defence: Defence, losses: Losses) -> dict[str, Any] | None:
    """Return the throttle for the budget. Retries stop when half of its tokens are used."""
    budget = translation.summarize_budget(defence)
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
    losses.add("budget.kind", budget.kind, instead, Severity.LOAD)
    return {"maxTokens": tokens, "tokenRatio": ratio}


def from_grpc(
    document: Mapping[str, Any], *, service: str | None = None, method: str | None = None
) -> Imported:
    """Import the settings of a service config for a method, a service or all calls."""
    _check_names(service, method)
    root = _root(document)
    losses = Losses("gRPC")
    config = _find_config(root.tables("methodConfig"), service, method, losses)
    budget = _throttle_budget(root)
    policy = Policy(max_attempts=1)
    hedging: Hedging | None = None
    fields_set: tuple[str, ...] = ()
    if config is not None:
        config.check_spelling(_METHOD_CONFIG_KEYS)
        timeout = config.seconds("timeout", read=parse_proto)
        retry, hedge = config.table("retryPolicy"), config.table("hedgingPolicy")
        if retry is not None and hedge is not None:
            rule = "must have a retryPolicy or a hedgingPolicy, not both"
            raise ConfigurationError(config.path, rule)
        if hedge is not None:
            hedging = _hedging(hedge, losses)
            if timeout is not None:
                instead = "set a deadline for the call, because hedging has no timeout"
                losses.add(config.path_of("timeout"), timeout, instead)
        else:
            if retry is not None:
                policy, fields_set = _policy(retry, losses), tuple(_RETRY_POLICY_FIELDS.values())
            policy = losses.apply_call_timeout(policy, timeout, config.path_of("timeout"))
        losses.add_unread(config, "name")
    losses.add_unread(root)
    defence = Defence(policy if hedging is None else None, hedging=hedging, budget=budget)
    return Imported(defence, tuple(losses), fields_set)


def _root(document: Mapping[str, Any]) -> DocumentTable:
    root = DocumentTable("", document)
    root.check_spelling(_ROOT_KEYS)
    keys = root.keys()
    if not any(key in _ROOT_KEYS for key in keys):
        found = f"it has {format_value(keys)}, and no methodConfig"
        hint = ": --from istio?" if "kind" in keys else ""
        msg = f"this is not a gRPC service config: {found}{hint}"
        raise ConfigurationError(msg)
    return root


def _find_config(
    configs: list[DocumentTable], service: str | None, method: str | None, losses: Losses
) -> DocumentTable | None:
    """Return the entry that a gRPC channel would use: the most specific entry that matches."""
    names: dict[tuple[str, str], DocumentTable] = {}
    for config in configs:
        for name in config.tables("name"):
            name.check_spelling(("service", "method"))
            key = name.text("service", ""), name.text("method", "")
            if key in names:
                raise ConfigurationError(name.path, f"has the same name as {names[key].path}")
            names[key] = config
    if service is None and len(configs) == 1:
        return configs[0]
    if service is None and not configs:
        return None
    wanted = service or "", method or ""
    specific = sorted(_format_name(key) for key in names if any(key))
    for key in (wanted, (wanted[0], ""), ("", "")):
        if key in names:
            chosen = names[key]
            if service is None:
                for config in configs:
                    if config is not chosen:
                        instead = "import it by its --service and --method"
                        losses.add(config.path, "not read", instead)
            elif key != wanted:
                instead = (
                    f"no entry has this name, so the entry of {_format_name(key)} is imported; "
                    f"the entries have the names {format_value(specific)}"
                )
                losses.add(chosen.path, _format_name(wanted), instead)
            return chosen
    known = f"name one of {format_value(specific)}" if specific else "it names no service"
    msg = f"methodConfig has no entry for {_format_name(wanted)}: {known}"
    raise ConfigurationError(msg)


def _format_name(name: tuple[str, str]) -> str:
    return "/".join(filter(None, name)) or "all calls"


def _policy(retry: DocumentTable, losses: Losses) -> Policy:
    retry.check_spelling(_RETRY_POLICY_FIELDS)
    attempts = _attempts(retry, losses)
    first = _required_seconds(retry, "initialBackoff")
    longest = _required_seconds(retry, "maxBackoff")
    multiplier = retry.number("backoffMultiplier")
    if multiplier <= 0:
        rule = "must be greater than 0"
        raise ConfigurationError(retry.path_of("backoffMultiplier"), rule, multiplier)
    if multiplier < _MIN_MULTIPLIER:
        instead = "imported as 1: delays do not shrink in tarry"
        losses.add(retry.path_of("backoffMultiplier"), multiplier, instead)
    codes = _codes(retry, "retryableStatusCodes")
    if not codes:
        rule = "must name at least one code, got none"
        raise ConfigurationError(retry.path_of("retryableStatusCodes"), rule)
    instead = "gRPC waits 0.8 to 1.2 times the ceiling; imported as equal jitter, 0.5 to 1"
    losses.add(retry.path, "jitter", instead)
    losses.add_unread(retry)
    policy = Policy(
        max_attempts=attempts,
        initial_delay=min(first, longest),
        multiplier=max(_MIN_MULTIPLIER, multiplier),
        max_delay=longest,
        jitter="equal",
        retryable_codes=codes,
        throttled_delay=min(first, longest),
    )
    losses.add_for_hint(retry.path, *_PUSHBACK, policy.max_hint)
    return policy


def _hedging(hedge: DocumentTable, losses: Losses) -> Hedging:
    hedge.check_spelling(_HEDGING_POLICY_KEYS)
    attempts = _attempts(hedge, losses)
    codes = _codes(hedge, "nonFatalStatusCodes")
    if codes != RETRYABLE_CODES:
        instead = "which errors start the next copy is an argument of the call"
        losses.add(hedge.path_of("nonFatalStatusCodes"), codes, instead)
    delay = hedge.seconds("hedgingDelay", above=-1.0, read=parse_proto) or 0.0
    losses.add_unread(hedge)
    hedging = Hedging(after=delay, max_attempts=attempts)
    losses.add_for_hint(hedge.path, *_PUSHBACK, hedging.max_hint)
    return hedging


def _attempts(table: DocumentTable, losses: Losses) -> int:
    attempts = table.count("maxAttempts", minimum=2)
    if attempts > _MAX_ATTEMPTS:
        losses.add(table.path_of("maxAttempts"), attempts, "imported as 5, as gRPC uses it")
    return min(attempts, _MAX_ATTEMPTS)


def _required_seconds(table: DocumentTable, key: str) -> float:
    seconds = table.seconds(key, read=parse_proto)
    if seconds is None:
        raise ConfigurationError(table.path_of(key), 'must be given, such as "0.1s"')
    return seconds


def _codes(table: DocumentTable, key: str) -> frozenset[str]:
    """Return the names of codes. The document has names, in upper or lower case, or numbers."""
    codes: set[str] = set()
    for i, code in enumerate(table.items(key)):
        name = code.upper() if isinstance(code, str) else code
        if isinstance(code, int) and not isinstance(code, bool) and 0 <= code < len(GRPC_CODES):
            name = GRPC_CODES[code]
        if name not in GRPC_CODES:
            rule = f"must be a gRPC status code, got {code!r:.60}"
            raise ConfigurationError(f"{table.path_of(key)}[{i}]", rule)
        codes.add(name)
    return frozenset(codes)


def _throttle_budget(root: DocumentTable) -> dict[str, Any] | None:
    throttling = root.table("retryThrottling")
    if throttling is None:
        return None
    throttling.check_spelling(("maxTokens", "tokenRatio"))
    tokens = throttling.count("maxTokens", minimum=1)
    if tokens > _MAX_TOKENS:
        rule = f"must be at most {_MAX_TOKENS}, got {tokens}"
        raise ConfigurationError(throttling.path_of("maxTokens"), rule)
    ratio = throttling.number("tokenRatio", minimum=_MIN_TOKEN_RATIO)
    return {"kind": "throttle", "max_tokens": tokens, "token_ratio": float(ratio)}
