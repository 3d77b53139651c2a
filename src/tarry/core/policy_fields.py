"""The fields of a policy: names, types, bounds, defaults and help, in one table.

`Policy` checks its arguments with this table. The service's JSON (`tarry.wire.policies`), its
OpenAPI document, policy files and the help of `tarry policy` are derived from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.core.backoff import BACKOFFS
from tarry.core.checks import check_at_least, check_count, check_one_of, check_positive
from tarry.core.jitter import JITTERS
from tarry.core.outcome import GRPC_CODES, RETRYABLE_CODES, RETRYABLE_STATUSES
from tarry.errors import ConfigurationError, ConfigurationTypeError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    FieldType = Literal["count", "number", "seconds", "choice", "statuses", "codes", "flag"]

LOWEST_STATUS, HIGHEST_STATUS = 100, 599


class PolicyField(NamedTuple):
    """One field of a policy."""

    name: str
    """The attribute of `Policy`, and the key in a policy file."""
    json_name: str | None
    """The key in the service's JSON; None when the service has no such field."""
    type: FieldType
    """"seconds" is a duration: seconds in Python and in policy files, milliseconds in JSON."""
    default: Any
    help: str
    minimum: float = 0
    is_minimum_allowed: bool = False
    """Whether a value may be equal to `minimum`. Numbers have no maximum."""
    is_optional: bool = False
    """Whether None is allowed. None means that there is no limit."""
    is_required_by_service: bool = False
    """Whether the service rejects null, although `Policy` allows None."""
    choices: tuple[str, ...] = ()
    """The allowed names. In Python, the value of a "choice" field can also be a callable."""

    def check(self, value: object, name: str | None = None) -> Any:
        """Return the value as `Policy` stores it, or raise ConfigurationError.

        `name` is the field's name in the error, if not its name in Python. A duration can be
        checked in any unit, because its only bound is 0.
        """
        if value is None and self.is_optional:
            return None
        return _CHECKS[self.type](self, name or self.name, value)


POLICY_FIELDS: tuple[PolicyField, ...] = (
    PolicyField(
        "max_attempts", "maxAttempts", "count", 4,
        "Number of attempts, including the first.",
        minimum=1, is_minimum_allowed=True,
    ),
    PolicyField(
        "initial_delay", "initialDelayMs", "seconds", 0.1,
        "Delay before the first retry, before jitter.",
    ),
    PolicyField(
        "multiplier", "multiplier", "number", 2.0,
        "Factor by which the delay grows with each retry in an exponential backoff.",
        minimum=1, is_minimum_allowed=True,
    ),
    PolicyField(
        "max_delay", "maxDelayMs", "seconds", 30.0,
        "Longest delay of a linear or exponential backoff.",
    ),
    PolicyField(
        "total_budget", "totalBudgetMs", "seconds", None,
        "Time for the whole call: an attempt starts only if it is expected to end in this time.",
        is_optional=True,
    ),
    PolicyField(
        "attempt_timeout", "attemptTimeoutMs", "seconds", None,
        "Time for one attempt.",
        is_optional=True, is_required_by_service=True,
    ),
    PolicyField(
        "backoff", "backoffType", "choice", "exponential",
        "How the delay grows with each retry.",
        choices=tuple(BACKOFFS),
    ),
    PolicyField(
        "jitter", "jitterType", "choice", "full",
        "How the delay is spread at random.",
        choices=tuple(JITTERS),
    ),
    PolicyField(
        "retryable_statuses", "retryableStatusCodes", "statuses", RETRYABLE_STATUSES,
        "HTTP status codes that are retried.",
        minimum=LOWEST_STATUS, is_minimum_allowed=True,
    ),
    PolicyField(
        "retryable_codes", "retryableGrpcCodes", "codes", RETRYABLE_CODES,
        "gRPC status codes that are retried.",
        choices=tuple(GRPC_CODES),
    ),
    PolicyField(
        "throttled_delay", "throttledDelayMs", "seconds", 1.0,
        "Initial delay after a throttled attempt (429, RESOURCE_EXHAUSTED).",
    ),
    PolicyField(
        "max_hint", "maxHintMs", "seconds", 120.0,
        "Longest wait that a server may ask for; if it asks for a longer one, the call ends.",
        is_minimum_allowed=True,
    ),
    PolicyField(
        "retry_marked", None, "flag", False,  # noqa: FBT003 - a default, not a switch
        "Also retry errors that an inner tarry loop has retried already; this multiplies attempts.",
    ),
)  # fmt: skip


def check_max_delay(
    max_delay: float,
    initial_delay: float,
    names: tuple[str, str] = ("max_delay", "initial_delay"),
) -> None:
    """Raise ConfigurationError when `max_delay` is shorter than `initial_delay`.

    `names` are the names of the two fields for the message.
    """
    if max_delay < initial_delay:
        rule = f"must be at least {names[1]} ({initial_delay:g}), got {max_delay:g}"
        raise ConfigurationError(names[0], rule)


def check_collection(name: str, value: object) -> Iterable[Any]:
    """Return an iterable; str and bytes are rejected, although Python can iterate over them."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigurationTypeError(name, "must be a collection", value)
    return value  # pyright: ignore[reportUnknownVariableType]


def _check_count(field: PolicyField, name: str, value: object) -> int:
    return check_count(name, value, int(field.minimum))


def _check_number(field: PolicyField, name: str, value: object) -> float:
    if field.is_minimum_allowed:
        return check_at_least(name, value, field.minimum)
    return check_positive(name, value)


def _check_choice(field: PolicyField, name: str, value: object) -> object:
    if not callable(value):
        if not isinstance(value, str):
            raise ConfigurationTypeError(name, "must be a name or a callable", value)
        check_one_of(name, value, field.choices)
    return value


def _check_statuses(_field: PolicyField, name: str, values: object) -> frozenset[int]:
    statuses: set[int] = set()
    for i, status in enumerate(check_collection(name, values)):
        if isinstance(status, bool) or not isinstance(status, int):
            raise ConfigurationTypeError(f"{name}[{i}]", "must be a whole number", status)
        if not LOWEST_STATUS <= status <= HIGHEST_STATUS:
            rule = f"must be from {LOWEST_STATUS} to {HIGHEST_STATUS}"
            raise ConfigurationError(f"{name}[{i}]", rule, status)
        statuses.add(status)
    return frozenset(statuses)


def _check_codes(field: PolicyField, name: str, values: object) -> frozenset[str]:
    codes: set[str] = set()
    for i, code in enumerate(check_collection(name, values)):
        if not isinstance(code, str):
            example = getattr(code, "name", "UNAVAILABLE")  # a grpc.StatusCode has a name
            rule = f'must be the name of a code as a string ("{example}")'
            raise ConfigurationTypeError(f"{name}[{i}]", rule, code)
        check_one_of(f"{name}[{i}]", code, field.choices)
        codes.add(code)
    return frozenset(codes)


def _check_flag(_field: PolicyField, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationTypeError(name, "must be True or False", value)
    return value


_CHECKS: dict[str, Callable[[PolicyField, str, object], Any]] = {
    "count": _check_count,
    "number": _check_number,
    "seconds": _check_number,
    "choice": _check_choice,
    "statuses": _check_statuses,
    "codes": _check_codes,
    "flag": _check_flag,
}
