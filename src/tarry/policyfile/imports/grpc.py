"""Import from a gRPC service config (gRFC A6): retries or hedging, deadline and throttle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.hedging import Hedging
from tarry.core.outcome import GRPC_CODES, RETRYABLE_CODES
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.policyfile.durations import parse_proto
from tarry.policyfile.imports.document import DocumentTable, apply_call_timeout, hint_loss
from tarry.policyfile.losses import Imported, Loss, format_value

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROOT_KEYS = (
    "methodConfig",
    "retryThrottling",
    "loadBalancingConfig",
    "loadBalancingPolicy",
    "healthCheckConfig",
)
_METHOD_CONFIG_KEYS = (
    "name",
    "timeout",
    "retryPolicy",
    "hedgingPolicy",
    "waitForReady",
    "maxRequestMessageBytes",
    "maxResponseMessageBytes",
)
_RETRY_POLICY_FIELDS = {
    "maxAttempts": "max_attempts",
    "initialBackoff": "initial_delay",
    "maxBackoff": "max_delay",
    "backoffMultiplier": "multiplier",
    "retryableStatusCodes": "retryable_codes",
}
"""The keys of a retryPolicy and the corresponding fields of a policy."""
_HEDGING_POLICY_KEYS = ("maxAttempts", "hedgingDelay", "nonFatalStatusCodes")
_MAX_ATTEMPTS = 5
_MIN_MULTIPLIER = 1.0
_PUSHBACK = ("pushback", "gRPC follows a pushback of any length")
"""The arguments `name` and `source` of `hint_loss`."""


def from_grpc(
    document: Mapping[str, Any], *, service: str | None = None, method: str | None = None
) -> Imported:
    """Import the settings of a service config for a method, a service or all calls."""
    if method is not None and not service:
        raise ConfigurationError("method", f"needs service: name the service of {method!r} too")
    root = _root(document)
    losses: list[Loss] = []
    config = _find_config(root.tables("methodConfig"), service, method, losses)
    budget = _throttle(root)
    policy: Policy | None = Policy(max_attempts=1)
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
            policy, hedging = None, _hedging(hedge, losses)
            if timeout is not None:
                instead = "set a deadline for the call, because hedging has no timeout"
                losses.append(Loss(config.path_of("timeout"), timeout, instead))
        else:
            policy = Policy(max_attempts=1) if retry is None else _policy(retry, losses)
            policy = apply_call_timeout(policy, timeout, config.path_of("timeout"), losses)
            fields_set = () if retry is None else tuple(_RETRY_POLICY_FIELDS.values())
        losses += config.unread_losses("name")
    losses += root.unread_losses()
    return Imported(Defence(policy, hedging=hedging, budget=budget), tuple(losses), fields_set)


def _root(document: Mapping[str, Any]) -> DocumentTable:
    root = DocumentTable("", document)
    root.check_spelling(_ROOT_KEYS)
    keys = root.keys()
    if not any(key in _ROOT_KEYS for key in keys):
        hint = ": --from istio?" if "kind" in keys else ""
        msg = (
            f"this is not a gRPC service config: it has {format_value(keys)}, and no "
            f"methodConfig{hint}"
        )
        raise ConfigurationError(msg)
    return root


def _find_config(
    configs: list[DocumentTable], service: str | None, method: str | None, losses: list[Loss]
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
                losses += [
                    Loss(config.path, "not read", "import it by its --service and --method")
                    for config in configs
                    if config is not chosen
                ]
            elif key != wanted:
                instead = (
                    f"no entry has this name, so the entry of {_format_name(key)} is imported; "
                    f"the entries have the names {format_value(specific)}"
                )
                losses.append(Loss(chosen.path, _format_name(wanted), instead))
            return chosen
    known = f"name one of {format_value(specific)}" if specific else "it names no service"
    msg = f"methodConfig has no entry for {_format_name(wanted)}: {known}"
    raise ConfigurationError(msg)


def _format_name(name: tuple[str, str]) -> str:
    return "/".join(filter(None, name)) or "all calls"


def _policy(retry: DocumentTable, losses: list[Loss]) -> Policy:
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
        losses.append(Loss(retry.path_of("backoffMultiplier"), multiplier, instead))
    codes = _codes(retry, "retryableStatusCodes")
    if not codes:
        rule = "must name at least one code, got none"
        raise ConfigurationError(retry.path_of("retryableStatusCodes"), rule)
    instead = "gRPC waits 0.8 to 1.2 times the ceiling; imported as equal jitter, 0.5 to 1"
    losses += [Loss(retry.path, "jitter", instead), *retry.unread_losses()]
    policy = Policy(
        max_attempts=attempts,
        initial_delay=min(first, longest),
        multiplier=max(_MIN_MULTIPLIER, multiplier),
        max_delay=longest,
        jitter="equal",
        retryable_codes=codes,
        throttled_delay=min(first, longest),
    )
    losses.append(hint_loss(retry.path, *_PUSHBACK, policy.max_hint))
    return policy


def _hedging(hedge: DocumentTable, losses: list[Loss]) -> Hedging:
    hedge.check_spelling(_HEDGING_POLICY_KEYS)
    attempts = _attempts(hedge, losses)
    codes = _codes(hedge, "nonFatalStatusCodes")
    if codes != RETRYABLE_CODES:
        instead = "which errors start the next copy is an argument of the call"
        losses.append(Loss(hedge.path_of("nonFatalStatusCodes"), codes, instead))
    delay = hedge.seconds("hedgingDelay", above=-1.0, read=parse_proto) or 0.0
    losses += hedge.unread_losses()
    hedging = Hedging(after=delay, max_attempts=attempts)
    losses.append(hint_loss(hedge.path, *_PUSHBACK, hedging.max_hint))
    return hedging


def _attempts(table: DocumentTable, losses: list[Loss]) -> int:
    attempts = table.count("maxAttempts", minimum=2)
    if attempts > _MAX_ATTEMPTS:
        losses.append(
            Loss(table.path_of("maxAttempts"), attempts, "imported as 5, as gRPC uses it")
        )
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


def _throttle(root: DocumentTable) -> dict[str, Any] | None:
    throttling = root.table("retryThrottling")
    if throttling is None:
        return None
    throttling.check_spelling(("maxTokens", "tokenRatio"))
    tokens = throttling.count("maxTokens", minimum=1)
    if tokens > 1000:  # noqa: PLR2004 - by gRFC A6
        raise ConfigurationError(
            throttling.path_of("maxTokens"), f"must be at most 1000, got {tokens}"
        )
    ratio = throttling.number("tokenRatio", minimum=0.001)
    return {"kind": "throttle", "max_tokens": tokens, "token_ratio": float(ratio)}
