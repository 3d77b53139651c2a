"""The options of `retry`, which `retrying`, `call`, `acall` and `attempts` take too.

`RetryOptions` is the list of their names and types. The docstring of `retry` says what each option
does. `RetryConfig` checks the values. The public functions repeat the list in their signatures, for
editors and type checkers, and `call`, `acall` and `attempts` pass the options on one by one: a dict
of them would take 3 us, and a call with `tarry.call` takes 4 us. tests/runtime/test_options.py
compares all lists.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Union, cast

from tarry.core.policy import POLICY_FIELDS
from tarry.core.text import suggest
from tarry.errors import ConfigurationTypeError

if TYPE_CHECKING:
    import logging

    from tarry.core.checks import Seconds
    from tarry.core.events import WillWait
    from tarry.core.outcome import Outcome
    from tarry.core.policy import Policy, Random
    from tarry.core.verdict import CallState
    from tarry.runtime.downstream import Downstream
    from tarry.runtime.effects import CancelToken
    from tarry.runtime.process_settings import Blocking

On: TypeAlias = (
    type[Exception]
    | tuple[type[Exception], ...]
    | Callable[[Exception], "bool | Seconds | Outcome"]
)
"""Which errors to retry: exception types, or a function that returns whether to retry (a bool),
after which time to retry (seconds or a `timedelta`), or an `Outcome`."""
AsyncOn: TypeAlias = On | Callable[[Exception], "Awaitable[bool | Seconds | Outcome]"]
"""`On`, or a predicate that is a coroutine function, for async calls."""

OnRetry: TypeAlias = Union[  # not a string: see `Seconds`
    Callable[["WillWait"], object], "logging.Logger", "logging.LoggerAdapter[logging.Logger]"
]
"""The argument `on_retry`: a function to call before each wait, or a logger for the retries."""


class RetryOptions(TypedDict, total=False):
    """The options by name, in the order of the signatures."""

    on: AsyncOn | None
    until: Callable[[Any], bool | Outcome | Awaitable[bool | Outcome]] | None
    attempts: int | None
    timeout: Seconds | None
    deadline: Seconds | None
    policy: Policy | None
    downstream: Downstream | None
    name: str | None
    cancel: CancelToken | None
    random: Random | None
    fallback: Any
    stop: Callable[[CallState], bool] | None
    on_retry: OnRetry | None
    blocking: Blocking | None


OPTION_NAMES: tuple[str, ...] = tuple(RetryOptions.__annotations__)

_OPTIONS_OF_OTHER_LIBRARIES = {
    "tries": "attempts", "max_tries": "attempts", "max_attempts": "attempts",
    "max_time": "deadline", "exceptions": "on", "exception": "on", "retry": "on", "wait": "policy",
    "delay": "initial_delay", "wait_initial": "initial_delay", "wait_max": "max_delay",
    "wait_exp_base": "multiplier", "wait_jitter": "jitter", "circuit_breaker": "breaker",
    "giveup": "on", "retry_error_callback": "fallback", "before_sleep": "on_retry",
    "on_backoff": "on_retry", "logger": "on_retry", "stop_after": "attempts",
    "stop_after_attempt": "attempts", "stop_after_delay": "deadline",
}  # fmt: skip
"""Names in tenacity, stamina, backoff and retry, with the corresponding names in tarry."""


def options_from(arguments: Mapping[str, Any]) -> RetryOptions:
    """Return the options among the arguments of a function, which are its `locals()`."""
    options = {name: arguments[name] for name in OPTION_NAMES if name in arguments}
    return cast("RetryOptions", options)


def reject_unknown_options(api_name: str, options: Mapping[str, object]) -> None:
    """Raise an error with the right spelling if a public function got options it does not have."""
    for name in options:
        option = _OPTIONS_OF_OTHER_LIBRARIES.get(name, name)
        if option not in OPTION_NAMES:
            option = suggest(option, OPTION_NAMES, similarity=0.8) or option
        if name == "reraise":  # of tenacity
            advice = "leave it out, because the error of the last attempt is always raised"
        elif name in OPTION_NAMES:
            advice = "tarry.retry and tarry.call have it"
        elif option in OPTION_NAMES:
            advice = f"use {option}="
        elif option in ("breaker", "budget", "limiter", "max_in_flight"):
            advice = f'use downstream=tarry.Downstream("name", {option}=...)'
        elif any(option == field.name for field in POLICY_FIELDS):
            advice = f"use policy=tarry.Policy({option}=...)"
        else:
            advice = f"it has {', '.join(OPTION_NAMES)}"
            if api_name in ("call", "acall"):
                advice += f", kwargs; for an argument of the function, use kwargs={{{name!r}: ...}}"
        raise ConfigurationTypeError(f"tarry.{api_name} has no argument {name}=; {advice}")
