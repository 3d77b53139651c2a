"""One layer that retries: the channel's own retries are refused, and turned off.

An interceptor sees neither the options of its channel nor the service config that a resolver may
bring. The options are the one place where both can be ruled out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr

if TYPE_CHECKING:
    from collections.abc import Iterable

_SWITCH = "grpc.enable_retries"
_CONFIG = "grpc.service_config"
_POLICIES = ("retryPolicy", "hedgingPolicy")


def channel_options(options: Iterable[tuple[str, Any]] | None = None) -> list[tuple[str, Any]]:
    """Return the options for a channel on which tarry retries, gRPC's own retries turned off.

    Options that ask for gRPC's own retries are refused: two layers multiply their attempts.
    """
    given = [] if options is None else _pairs(options)
    for name, value in given:
        if name == _SWITCH and value:
            raise ConfigurationError(_two_layers(f"{_SWITCH} is {value!r}"))
        if name == _CONFIG:
            for policy, of in _own_retries(value):
                raise ConfigurationError(_two_layers(f"{_CONFIG} has a {policy} for {of}"))
    # A config that a resolver brings is not seen here; without the switch it has no effect.
    return [*(pair for pair in given if pair[0] != _SWITCH), (_SWITCH, 0)]


def _two_layers(found: str) -> str:
    return (
        f"{found}: the channel would retry beneath tarry, and the attempts of two layers multiply; "
        "take it out (`tarry policy import --from grpc` makes a policy of it), or use no tarry here"
    )


def _pairs(options: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the options one by one, or say how they are written."""
    try:
        return [(name, value) for name, value in options]
    except (TypeError, ValueError):
        rule = 'must be pairs of a name and a value, as in [("grpc.max_message_length", -1)]'
        raise ConfigurationTypeError("options", rule, options) from None


def _own_retries(config: Any) -> list[tuple[str, str]]:
    """Return each policy of a service config that repeats calls, and what it is for."""
    try:
        document = json.loads(config)
    except (TypeError, ValueError) as error:
        rule = f"must be a service config as JSON, got {short_repr(config)}: {error}"
        raise ConfigurationError(_CONFIG, rule) from None
    # What has another form has no policies, or gRPC will say what is wrong with it.
    return [
        (policy, ", ".join(map(_name, _items(entry, "name"))) or "an entry without a name")
        for entry in _items(document, "methodConfig")
        for policy in _POLICIES
        if _get(entry, policy) is not None
    ]


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _items(value: Any, key: str) -> list[Any]:
    found = _get(value, key)
    return list(found) if isinstance(found, list) else []  # pyright: ignore[reportUnknownArgumentType]


def _name(name: Any) -> str:
    parts = (_get(name, "service"), _get(name, "method"))
    return "/".join(str(part) for part in parts if part) or "all methods"
