"""Channel options that turn gRPC's own retries off, so that only tarry retries.

An interceptor sees neither the options of its channel nor the service config that a resolver may
deliver. Both can be controlled only with the options of the channel.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr

if TYPE_CHECKING:
    from collections.abc import Iterable

_ENABLE_RETRIES = "grpc.enable_retries"
_SERVICE_CONFIG = "grpc.service_config"
_RETRY_POLICIES = ("retryPolicy", "hedgingPolicy")


def channel_options(options: Iterable[tuple[str, Any]] | None = None) -> list[tuple[str, Any]]:
    """Return the options for a channel on which tarry retries, with gRPC's own retries turned off.

    Raise ConfigurationError for options that enable gRPC's own retries: the attempts of two layers
    multiply.
    """
    pairs = [] if options is None else _pairs(options)
    for name, value in pairs:
        if name == _ENABLE_RETRIES and value:
            raise ConfigurationError(_two_layers_message(f"{_ENABLE_RETRIES} is {value!r}"))
        if name == _SERVICE_CONFIG:
            for policy, methods in _retry_policies(value):
                raise ConfigurationError(
                    _two_layers_message(f"{_SERVICE_CONFIG} has a {policy} for {methods}")
                )
    # A service config from a resolver is not visible here. With this option at 0, its retry
    # policies have no effect.
    return [*(pair for pair in pairs if pair[0] != _ENABLE_RETRIES), (_ENABLE_RETRIES, 0)]


def _two_layers_message(found: str) -> str:
    return (
        f"{found}: the channel would retry beneath tarry, and the attempts of two layers multiply; "
        "remove it (`tarry policy import --from grpc` converts it to a policy), or do not use "
        "tarry on this channel"
    )


def _pairs(options: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the options as a list of pairs, or raise ConfigurationTypeError."""
    try:
        return [(name, value) for name, value in options]
    except (TypeError, ValueError):
        rule = 'must be pairs of a name and a value, as in [("grpc.max_message_length", -1)]'
        raise ConfigurationTypeError("options", rule, options) from None


def _retry_policies(config: Any) -> list[tuple[str, str]]:
    """Return the retry and hedging policies of a service config, each with its methods."""
    try:
        document = json.loads(config)
    except (TypeError, ValueError) as error:
        rule = f"must be a service config as JSON, got {short_repr(config)}: {error}"
        raise ConfigurationError(_SERVICE_CONFIG, rule) from None
    # A document with a different structure has no policies. If it is invalid, gRPC reports that.
    return [
        (policy, ", ".join(map(_method_name, _items(entry, "name"))) or "an entry without a name")
        for entry in _items(document, "methodConfig")
        for policy in _RETRY_POLICIES
        if _get_key(entry, policy) is not None
    ]


def _get_key(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _items(value: Any, key: str) -> list[Any]:
    found = _get_key(value, key)
    return list(found) if isinstance(found, list) else []  # pyright: ignore[reportUnknownArgumentType]


def _method_name(name: Any) -> str:
    parts = (_get_key(name, "service"), _get_key(name, "method"))
    return "/".join(str(part) for part in parts if part) or "all methods"
