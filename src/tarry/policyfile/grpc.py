"""Exports a defence to a gRPC service config, and imports it from one.

A defence is a policy or hedging, with its breaker, budget and limiter. A service config (gRFC A6)
is the configuration of a channel in JSON. It sets attempts, backoff, codes and a timeout for each
service or method, and one retryThrottling (a retry budget) for all calls. It has no timeout for one
attempt, no choice of jitter, no breaker and no limiter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.hedging import Hedging
from tarry.core.outcome import GRPC_CODES, RETRYABLE_CODES, RETRYABLE_STATUSES
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError
from tarry.policyfile import translation
from tarry.policyfile.defence import Defence
from tarry.policyfile.documents import DocumentTable, format_proto_duration, parse_proto_duration
from tarry.policyfile.translation import Converter, Exported, Imported, Severity, format_value

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_ATTEMPTS = 5
_MAX_TOKENS = 1000
_MIN_TOKEN_RATIO = 0.001
_MIN_BACKOFF_S = 0.005
"""With 1 or 2 ms the C core can lose the retry, and then the call hangs (grpc/grpc#41036)."""
_JITTER_EFFECT = "gRPC waits 0.8 to 1.2 times the ceiling"
_FULL_JITTER_EFFECT = f"{_JITTER_EFFECT}: on average twice as long as full jitter"
_UNSUPPORTED_ROOT_KEYS = ("loadBalancingConfig", "loadBalancingPolicy", "healthCheckConfig")
_ROOT_KEYS = ("methodConfig", "retryThrottling", *_UNSUPPORTED_ROOT_KEYS)
_UNSUPPORTED_METHOD_KEYS = ("waitForReady", "maxRequestMessageBytes", "maxResponseMessageBytes")
_METHOD_CONFIG_KEYS = ("name", "timeout", "retryPolicy", "hedgingPolicy", *_UNSUPPORTED_METHOD_KEYS)
_RETRY_POLICY_FIELDS = {
    "maxAttempts": "max_attempts",
    "initialBackoff": "initial_delay",
    "maxBackoff": "max_delay",
    "backoffMultiplier": "multiplier",
    "retryableStatusCodes": "retryable_codes",
}
"""The keys of a retryPolicy and the corresponding fields of a policy."""
_HEDGING_POLICY_KEYS = ("maxAttempts", "hedgingDelay", "nonFatalStatusCodes")
_PUSHBACK_BEHAVIOUR = "gRPC follows a pushback of any length"
"""A pushback is a delay that the server asks for, in the trailer `grpc-retry-pushback-ms`."""


def to_grpc(defence: Defence, *, service: str | None = None, method: str | None = None) -> Exported:
    """Export to a service config for a method or a service, or for all calls if both are None."""
    _check_names(service, method)
    converter = Converter("gRPC")
    names = {"service": service, "method": method}
    config: dict[str, Any] = {"name": [{key: name for key, name in names.items() if name}]}
    if defence.hedging is not None:
        config["hedgingPolicy"] = _export_hedging(defence.hedging, converter)
    else:
        _export_policy(config, defence.policy, converter)
    document: dict[str, Any] = {"methodConfig": [config]}
    has_retries_or_hedges = "retryPolicy" in config or "hedgingPolicy" in config
    retry_throttling = _export_budget(defence, converter) if has_retries_or_hedges else None
    if retry_throttling is not None:
        document["retryThrottling"] = retry_throttling
    converter.report_left_out_breaker(defence, "a service config has no breaker")
    converter.report_left_out_limiter(defence)
    return Exported((document,), converter.sorted_differences())


def _check_names(service: str | None, method: str | None) -> None:
    if method is not None and not service:
        raise ConfigurationError("method", f"requires service: give the service of {method!r}, too")


def _export_policy(config: dict[str, Any], policy: Policy, converter: Converter) -> None:
    timeout = converter.convert_call_timeout(policy)
    if timeout is not None:  # `total_budget` limits the whole call, as this timeout
        config["timeout"] = format_proto_duration("total_budget", timeout)
    if policy.max_attempts == 1:
        return
    # An attempt timeout that is not shorter than the call's timeout has no effect.
    if policy.attempt_timeout is not None and (timeout is None or policy.attempt_timeout < timeout):
        effect = "gRPC has no timeout for one attempt"
        converter.report("attempt_timeout", policy.attempt_timeout, effect)
    codes = sorted(policy.retryable_codes - {"OK"})
    if not codes:
        effect = "gRPC requires at least one code, so there is no retryPolicy and no retry"
        converter.report("retryable_codes", codes, effect, Severity.CRITICAL)
        return
    first, longest = (max(_MIN_BACKOFF_S, delay) for delay in translation.delay_bounds(policy))
    multiplier = _export_multiplier(policy)
    config["retryPolicy"] = {
        "maxAttempts": _limit_attempts("max_attempts", policy.max_attempts, converter),
        "initialBackoff": format_proto_duration("initial_delay", first),
        "maxBackoff": format_proto_duration("max_delay", longest),
        "backoffMultiplier": multiplier,
        "retryableStatusCodes": codes,
    }
    retry_count = min(policy.max_attempts, _MAX_ATTEMPTS) - 1
    grpc_delays = [min(longest, first * multiplier**k) for k in range(retry_count)]
    converter.report_delays(policy, grpc_delays, retry_count)
    effect = _FULL_JITTER_EFFECT if policy.jitter == "full" else _JITTER_EFFECT
    converter.report("jitter", policy.jitter, effect)
    if policy.retryable_statuses != RETRYABLE_STATUSES:
        statuses, effect = policy.retryable_statuses, "gRPC has no HTTP statuses"
        converter.report("retryable_statuses", statuses, effect, Severity.LOAD)
    effect = f"{_PUSHBACK_BEHAVIOUR}, and ignores RetryInfo"
    converter.report("max_hint", policy.max_hint, effect, Severity.DETAIL)
    throttled_code = "RESOURCE_EXHAUSTED" if "RESOURCE_EXHAUSTED" in codes else None
    converter.report_tarry_settings(policy, throttled_code, "code")


def _export_multiplier(policy: Policy) -> float:
    """Return the multiplier of an exponential backoff, or the average growth of another backoff."""
    if policy.backoff == "exponential":
        return policy.multiplier
    ceilings = translation.first_ceilings(policy)[: _MAX_ATTEMPTS - 1]
    if len(ceilings) == 1:
        return 1.0
    growth = max(ceilings[-1], 0.001) / max(ceilings[0], 0.001)
    factor: float = growth ** (1 / (len(ceilings) - 1))
    return round(max(factor, 0.001), 6)


def _limit_attempts(field: str, max_attempts: int, converter: Converter) -> int:
    if max_attempts > _MAX_ATTEMPTS:
        effect = f"gRPC makes at most {_MAX_ATTEMPTS} attempts"
        converter.report(field, max_attempts, effect, Severity.LOAD)
    return min(max_attempts, _MAX_ATTEMPTS)


def _export_hedging(hedging: Hedging, converter: Converter) -> dict[str, Any]:
    after = translation.hedging_delay(hedging, "grpc")
    if hedging.max_extra_load is not None:
        effect = "gRPC limits hedges by retryThrottling only"
        converter.report("hedging.max_extra_load", hedging.max_extra_load, effect, Severity.LOAD)
    converter.report("hedging.max_hint", hedging.max_hint, _PUSHBACK_BEHAVIOUR, Severity.DETAIL)
    effect = "Java and .NET support a hedgingPolicy; grpcio and C++ ignore it"
    converter.report("hedging", after, effect, Severity.CRITICAL)
    return {
        "maxAttempts": _limit_attempts("hedging.max_attempts", hedging.max_attempts, converter),
        "hedgingDelay": format_proto_duration("hedging.after", after),
        "nonFatalStatusCodes": sorted(RETRYABLE_CODES),
    }


def _export_budget(defence: Defence, converter: Converter) -> dict[str, Any] | None:
    """Return the retryThrottling for the budget, or None if the defence has no budget."""
    budget = translation.summarize_budget(defence)
    if budget is None:
        return None
    if budget.kind == "throttle":
        arguments = budget.arguments
        return {"maxTokens": arguments["max_tokens"], "tokenRatio": arguments["token_ratio"]}
    # Twice as many tokens as retries, because gRPC stops retries when half of the tokens are left.
    tokens = max(1, min(_MAX_TOKENS, round(2 * budget.retries_without_success)))
    ratio = max(_MIN_TOKEN_RATIO, round(budget.retries_per_success, 3))
    effect = (
        f"gRPC has only budgets of kind throttle: {tokens} tokens, a failure takes 1, a success "
        f"adds {ratio:g}, and retries stop when half of the tokens are left"
    )
    converter.report("budget.kind", budget.kind, effect, Severity.LOAD)
    return {"maxTokens": tokens, "tokenRatio": ratio}


def from_grpc(
    document: Mapping[str, Any], *, service: str | None = None, method: str | None = None
) -> Imported:
    """Import the settings of a service config for a method, a service or all calls."""
    _check_names(service, method)
    root = _check_root(document)
    converter = Converter("gRPC")
    config = _find_config(root.tables("methodConfig"), service, method, converter)
    budget = _import_budget(root)
    policy = Policy(max_attempts=1)
    hedging: Hedging | None = None
    imported_fields: tuple[str, ...] = ()
    if config is not None:
        config.reject_typos(_METHOD_CONFIG_KEYS)
        timeout = config.seconds("timeout", parse=parse_proto_duration)
        retry_table, hedging_table = config.table("retryPolicy"), config.table("hedgingPolicy")
        if retry_table is not None and hedging_table is not None:
            rule = "must have a retryPolicy or a hedgingPolicy, not both"
            raise ConfigurationError(config.path, rule)
        if hedging_table is not None:
            hedging = _import_hedging(hedging_table, converter)
            if timeout is not None:
                effect = "left out, because hedging in tarry has no timeout: set a call deadline"
                converter.report(config.path_of("timeout"), timeout, effect)
        else:
            if retry_table is not None:
                policy = _import_policy(retry_table, converter)
                imported_fields = tuple(_RETRY_POLICY_FIELDS.values())
            policy = converter.apply_call_timeout(policy, timeout, config.path_of("timeout"))
        converter.report_unread(config, ignore=("name",))
    converter.report_unread(root)
    defence = Defence(policy if hedging is None else None, hedging=hedging, budget=budget)
    return Imported(defence, tuple(converter.differences), imported_fields)


def _check_root(document: Mapping[str, Any]) -> DocumentTable:
    root = DocumentTable("", document)
    root.reject_typos(_ROOT_KEYS)
    keys = root.keys()
    if not any(key in _ROOT_KEYS for key in keys):
        found = f"it has {format_value(keys)}, and no methodConfig"
        suggestion = "; for Istio, use --from istio" if "kind" in keys else ""
        raise ConfigurationError(f"this is not a gRPC service config: {found}{suggestion}")
    return root


def _find_config(
    configs: list[DocumentTable], service: str | None, method: str | None, converter: Converter
) -> DocumentTable | None:
    """Return the most specific entry that matches, or the only entry if `service` is None."""
    config_by_name: dict[tuple[str, str], DocumentTable] = {}  # by service and method
    for config in configs:
        for table in config.tables("name"):
            table.reject_typos(("service", "method"))
            name = table.text("service", ""), table.text("method", "")
            if name in config_by_name:
                problem = f"has the same name as {config_by_name[name].path}"
                raise ConfigurationError(table.path, problem)
            config_by_name[name] = config
    if service is None and len(configs) == 1:
        return configs[0]
    if service is None and not configs:
        return None
    requested_name = service or "", method or ""
    specific_names = sorted(_format_name(name) for name in config_by_name if any(name))
    for name in (requested_name, (requested_name[0], ""), ("", "")):
        if name in config_by_name:
            chosen = config_by_name[name]
            if service is None:
                for config in configs:
                    if config is not chosen:
                        effect = "not imported: import it by its --service and --method"
                        converter.report(config.path, "another entry", effect)
            elif name != requested_name:
                effect = (
                    f"no entry has this name, so the entry of {_format_name(name)} is imported; "
                    f"the entries have the names {format_value(specific_names)}"
                )
                converter.report(chosen.path, _format_name(requested_name), effect)
            return chosen
    choices = f"choose one of {format_value(specific_names)}"
    if not specific_names:
        choices = "no entry names a service"
    msg = f"no entry of methodConfig applies to {_format_name(requested_name)}: {choices}"
    raise ConfigurationError(msg)


def _format_name(name: tuple[str, str]) -> str:
    return "/".join(filter(None, name)) or "all calls"


def _import_policy(table: DocumentTable, converter: Converter) -> Policy:
    table.reject_typos(_RETRY_POLICY_FIELDS)
    max_attempts = _import_attempts(table, converter)
    initial_delay = _required_seconds(table, "initialBackoff")
    max_delay = _required_seconds(table, "maxBackoff")
    multiplier = table.number("backoffMultiplier", accept_text=True)
    if multiplier <= 0:
        rule = "must be greater than 0"
        raise ConfigurationError(table.path_of("backoffMultiplier"), rule, multiplier)
    codes = _import_codes(table, "retryableStatusCodes")
    if not codes:
        rule = "must name at least one code, got none"
        raise ConfigurationError(table.path_of("retryableStatusCodes"), rule)
    effect = "gRPC waits 0.8 to 1.2 times the ceiling; imported as equal jitter, 0.5 to 1"
    converter.report(table.path, "jitter of 20 %", effect)
    converter.report_unread(table)
    policy = Policy(
        max_attempts=max_attempts,
        initial_delay=min(initial_delay, max_delay),
        multiplier=multiplier,
        max_delay=max_delay,
        jitter="equal",
        retryable_codes=codes,
        throttled_delay=min(initial_delay, max_delay),
    )
    converter.report_hint(table.path, "pushback", _PUSHBACK_BEHAVIOUR, policy.max_hint)
    return policy


def _import_hedging(table: DocumentTable, converter: Converter) -> Hedging:
    table.reject_typos(_HEDGING_POLICY_KEYS)
    max_attempts = _import_attempts(table, converter)
    codes = _import_codes(table, "nonFatalStatusCodes")
    if codes != RETRYABLE_CODES:
        effect = "in tarry, the argument `on` of `hedge` selects the errors that start a hedge"
        converter.report(table.path_of("nonFatalStatusCodes"), codes, effect)
    delay = table.seconds("hedgingDelay", allow_zero=True, parse=parse_proto_duration) or 0.0
    converter.report_unread(table)
    hedging = Hedging(after=delay, max_attempts=max_attempts)
    converter.report_hint(table.path, "pushback", _PUSHBACK_BEHAVIOUR, hedging.max_hint)
    return hedging


def _import_attempts(table: DocumentTable, converter: Converter) -> int:
    max_attempts = table.count("maxAttempts", minimum=2)
    if max_attempts > _MAX_ATTEMPTS:
        effect = "imported as 5, the maximum of gRPC"
        converter.report(table.path_of("maxAttempts"), max_attempts, effect)
    return min(max_attempts, _MAX_ATTEMPTS)


def _required_seconds(table: DocumentTable, key: str) -> float:
    seconds = table.seconds(key, parse=parse_proto_duration)
    if seconds is None:
        raise ConfigurationError(table.path_of(key), 'must be given, such as "0.1s"')
    return seconds


def _import_codes(table: DocumentTable, key: str) -> frozenset[str]:
    """Return the names of the codes in a list of names (in upper or lower case) and numbers."""
    codes: set[str] = set()
    for i, code in enumerate(table.items_of(key)):
        name = code.upper() if isinstance(code, str) else code
        if isinstance(code, int) and not isinstance(code, bool) and 0 <= code < len(GRPC_CODES):
            name = GRPC_CODES[code]
        if name not in GRPC_CODES:
            rule = f"must be a gRPC status code, got {code!r:.60}"
            raise ConfigurationError(f"{table.path_of(key)}[{i}]", rule)
        codes.add(name)
    return frozenset(codes)


def _import_budget(root: DocumentTable) -> dict[str, Any] | None:
    throttling = root.table("retryThrottling")
    if throttling is None:
        return None
    throttling.reject_typos(("maxTokens", "tokenRatio"))
    tokens = throttling.count("maxTokens", minimum=1)
    if tokens > _MAX_TOKENS:
        rule = f"must be at most {_MAX_TOKENS}, got {tokens}"
        raise ConfigurationError(throttling.path_of("maxTokens"), rule)
    ratio = throttling.number("tokenRatio", minimum=_MIN_TOKEN_RATIO)
    return {"kind": "throttle", "max_tokens": tokens, "token_ratio": float(ratio)}
