"""From a gRPC service config (gRFC A6): retries or hedging, the deadline and the throttle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.hedging import Hedging
from tarry.core.outcome import GRPC_CODES, RETRYABLE_CODES
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.policyfile.durations import parse_proto
from tarry.policyfile.imports.document import Table, hinted, within
from tarry.policyfile.losses import Imported, Loss, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROOT = (
    "methodConfig",
    "retryThrottling",
    "loadBalancingConfig",
    "loadBalancingPolicy",
    "healthCheckConfig",
)
_ENTRY = (
    "name",
    "timeout",
    "retryPolicy",
    "hedgingPolicy",
    "waitForReady",
    "maxRequestMessageBytes",
    "maxResponseMessageBytes",
)
_RETRY = {
    "maxAttempts": "max_attempts",
    "initialBackoff": "initial_delay",
    "maxBackoff": "max_delay",
    "backoffMultiplier": "multiplier",
    "retryableStatusCodes": "retryable_codes",
}
"""The keys of a retryPolicy, and the fields that say the same here."""
_HEDGING = ("maxAttempts", "hedgingDelay", "nonFatalStatusCodes")
_MOST_ATTEMPTS = 5
_LEAST_MULTIPLIER = 1.0
_PUSHBACK = ("pushback", "gRPC obeys one of any length")


def from_grpc(
    document: Mapping[str, Any], *, service: str | None = None, method: str | None = None
) -> Imported:
    """Import what a service config says of a method, of a service, or of all calls."""
    if method is not None and not service:
        msg = f"method needs service: name the service of {method!r} too"
        raise ConfigurationError(msg)
    root = _root(document)
    losses: list[Loss] = []
    config = _chosen(root.tables("methodConfig"), service, method, losses)
    budget = _throttle(root)
    policy: Policy | None = Policy(max_attempts=1)
    hedging: Hedging | None = None
    read: tuple[str, ...] = ()
    if config is not None:
        config.spelled(_ENTRY)
        timeout = config.seconds("timeout", read=parse_proto)
        retry, hedge = config.table("retryPolicy"), config.table("hedgingPolicy")
        if retry is not None and hedge is not None:
            rule = "must have a retryPolicy or a hedgingPolicy, not both"
            raise ConfigurationError(config.path, rule)
        if hedge is not None:
            policy, hedging = None, _hedging(hedge, losses)
            if timeout is not None:
                instead = "give the call a deadline: a hedging has none of its own"
                losses.append(Loss(config.at("timeout"), timeout, instead))
        else:
            policy = Policy(max_attempts=1) if retry is None else _policy(retry, losses)
            policy = within(policy, timeout, config.at("timeout"), losses)
            read = () if retry is None else tuple(_RETRY.values())
        losses += config.unread("name")
    losses += root.unread()
    return Imported(Defence(policy, hedging=hedging, budget=budget), tuple(losses), read)


def _root(document: Mapping[str, Any]) -> Table:
    root = Table("", document)
    root.spelled(_ROOT)
    keys = root.keys()
    if not any(key in _ROOT for key in keys):
        hint = ": --from istio?" if "kind" in keys else ""
        msg = f"this is no gRPC service config: it has {shown(keys)}, and no methodConfig{hint}"
        raise ConfigurationError(msg)
    return root


def _chosen(
    configs: list[Table], service: str | None, method: str | None, losses: list[Loss]
) -> Table | None:
    """Return the entry that a channel would use: the most special of those that match."""
    names: dict[tuple[str, str], Table] = {}
    for config in configs:
        for name in config.tables("name"):
            name.spelled(("service", "method"))
            key = name.text("service", ""), name.text("method", "")
            if key in names:
                msg = f"{name.path} names what {names[key].path} names already"
                raise ConfigurationError(msg)
            names[key] = config
    if service is None and len(configs) == 1:
        return configs[0]
    if service is None and not configs:
        return None
    wanted = service or "", method or ""
    special = sorted(_spelled(key) for key in names if any(key))
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
                    f"no entry names it, so that of {_spelled(key)} is imported; "
                    f"the names there are: {shown(special)}"
                )
                losses.append(Loss(chosen.path, _spelled(wanted), instead))
            return chosen
    there = f"name one of {shown(special)}" if special else "it names no service"
    msg = f"methodConfig has no entry for {_spelled(wanted)}: {there}"
    raise ConfigurationError(msg)


def _spelled(name: tuple[str, str]) -> str:
    return "/".join(filter(None, name)) or "all calls"


def _policy(retry: Table, losses: list[Loss]) -> Policy:
    retry.spelled(_RETRY)
    attempts = _attempts(retry, losses)
    first = _required(retry, "initialBackoff")
    longest = _required(retry, "maxBackoff")
    multiplier = retry.number("backoffMultiplier")
    if multiplier <= 0:
        rule = "must be greater than 0"
        raise ConfigurationError(retry.at("backoffMultiplier"), rule, multiplier)
    if multiplier < _LEAST_MULTIPLIER:
        instead = "imported as 1: a ceiling of tarry does not shrink"
        losses.append(Loss(retry.at("backoffMultiplier"), multiplier, instead))
    codes = _codes(retry, "retryableStatusCodes")
    if not codes:
        rule = "must name at least one code, got none"
        raise ConfigurationError(retry.at("retryableStatusCodes"), rule)
    instead = "gRPC draws from 0.8 to 1.2 of the ceiling; imported as equal jitter, 0.5 to 1"
    losses += [Loss(retry.path, "jitter", instead), *retry.unread()]
    policy = Policy(
        max_attempts=attempts,
        initial_delay=min(first, longest),
        multiplier=max(_LEAST_MULTIPLIER, multiplier),
        max_delay=longest,
        jitter="equal",
        retryable_codes=codes,
        throttled_delay=min(first, longest),
    )
    losses.append(hinted(retry.path, *_PUSHBACK, policy.max_hint))
    return policy


def _hedging(hedge: Table, losses: list[Loss]) -> Hedging:
    hedge.spelled(_HEDGING)
    attempts = _attempts(hedge, losses)
    codes = _codes(hedge, "nonFatalStatusCodes")
    if codes != RETRYABLE_CODES:
        instead = "which errors call for the next copy is an argument of the call"
        losses.append(Loss(hedge.at("nonFatalStatusCodes"), codes, instead))
    delay = hedge.seconds("hedgingDelay", above=-1.0, read=parse_proto) or 0.0
    losses += hedge.unread()
    hedging = Hedging(after=delay, max_attempts=attempts)
    losses.append(hinted(hedge.path, *_PUSHBACK, hedging.max_hint))
    return hedging


def _attempts(table: Table, losses: list[Loss]) -> int:
    attempts = table.count("maxAttempts", least=2)
    if attempts > _MOST_ATTEMPTS:
        losses.append(Loss(table.at("maxAttempts"), attempts, "imported as 5, as gRPC uses it"))
    return min(attempts, _MOST_ATTEMPTS)


def _required(table: Table, key: str) -> float:
    seconds = table.seconds(key, read=parse_proto)
    if seconds is None:
        raise ConfigurationError(table.at(key), 'must be given, such as "0.1s"')
    return seconds


def _codes(table: Table, key: str) -> frozenset[str]:
    """Return codes by their names; they come as names in any case, or as numbers."""
    codes: set[str] = set()
    for i, code in enumerate(table.items(key)):
        name = code.upper() if isinstance(code, str) else code
        if isinstance(code, int) and not isinstance(code, bool) and 0 <= code < len(GRPC_CODES):
            name = GRPC_CODES[code]
        if name not in GRPC_CODES:
            rule = f"must be a gRPC status code, got {code!r:.60}"
            raise ConfigurationError(f"{table.at(key)}[{i}]", rule)
        codes.add(name)
    return frozenset(codes)


def _throttle(root: Table) -> dict[str, Any] | None:
    throttling = root.table("retryThrottling")
    if throttling is None:
        return None
    throttling.spelled(("maxTokens", "tokenRatio"))
    tokens = throttling.count("maxTokens", least=1)
    if tokens > 1000:  # noqa: PLR2004 - by gRFC A6
        raise ConfigurationError(throttling.at("maxTokens"), f"must be at most 1000, got {tokens}")
    ratio = throttling.number("tokenRatio", least=0.001)
    return {"kind": "throttle", "max_tokens": tokens, "token_ratio": float(ratio)}
