"""Policies: immutable settings for what is retried, how often and after which delays.

`POLICY_FIELDS` is the only table of the fields of a policy, with their names, types, bounds,
defaults and help texts. `Policy` checks its arguments with this table. The service's JSON
(`tarry.wire.policies`), its OpenAPI document, policy files and the help of `tarry policy` use the
table as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, TypeAlias, cast

from tarry.core.backoff import (
    BACKOFFS,
    JITTERS,
    Backoff,
    BackoffName,
    Jitter,
    JitterName,
    Schedule,
    call_jitter,
)
from tarry.core.checks import (
    Seconds,
    check_at_least,
    check_count,
    check_flag,
    check_one_of,
    check_positive,
    reject_unknown_arguments,
    to_seconds,
)
from tarry.core.outcome import (
    FAILURE_STATUSES,
    GRPC_CODES,
    RETRYABLE_CODES,
    RETRYABLE_STATUSES,
)
from tarry.core.text import did_you_mean, format_duration
from tarry.core.values import ImmutableValue
from tarry.core.verdict import Attempt
from tarry.errors import ConfigurationError, ConfigurationTypeError

if TYPE_CHECKING:
    from typing import Never

    FieldType = Literal[
        "count", "number", "seconds", "choice", "statuses", "codes", "flag", "header"
    ]

KeyFormat: TypeAlias = Literal["plain", "quoted"]

UNLIMITED_ATTEMPTS = 2**63 - 1
"""The `max_attempts` of a call without a limit."""
LOWEST_STATUS, HIGHEST_STATUS = 100, 599
STATUS_CLASSES = {f"{digit}xx": range(digit * 100, digit * 100 + 100) for digit in (3, 4, 5)}
"""The names that stand for all statuses with the same first digit."""
HEADER_NAME_PATTERN = "^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}$"
"""A token (RFC 9110, 5.6.2), at most 64 characters long."""
_HOUR_S = 3600.0
_MAX_PREPARED_ATTEMPTS = 32  # for later ones, delays and commands are computed when needed
_DEFAULT_MAX_DELAY_S = 30.0
_LIMITED_BACKOFFS = ("linear", "exponential")
"""The backoffs that `max_delay` limits."""
_MIN_SUSPICIOUS_DELAY_S = 100
"""A longer initial delay was probably meant as milliseconds."""
_JITTERS_WITHOUT_HISTORY = ("none", "full", "equal")
"""Jitters whose delay does not depend on the previous delay."""

OTHER_FIELD_NAMES = {
    "total": "max_attempts", "retries": "max_attempts", "attempts": "max_attempts",
    "status_forcelist": "retryable_statuses", "backoff_factor": "initial_delay",
    "backoff_max": "max_delay", "backoff_jitter": "jitter", "timeout": "attempt_timeout",
    "deadline": "total_budget",
}  # fmt: skip
"""Arguments of urllib3, httpx and `tarry.retry`, with the corresponding fields of a policy."""
_OTHER_KEYS_OF_FILES = ("preset", "breaker", "budget", "limiter", "hedging")
"""The keys of a policy file that are not fields of a policy."""

# For explain()
_MAX_ROWS = 12
_MAX_EXPLAINED_RETRIES = 10_000
_MAX_RANDOM_NUMBER = 1.0 - 2.0**-53
"""The largest possible random number, which gives the longest delay."""


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
    """Whether a value may be equal to `minimum`, and not only greater."""
    is_optional: bool = False
    """Whether None is allowed. None means that there is no limit."""
    service_rejects_null: bool = False
    """Whether null is invalid in the service's JSON, although `Policy` allows None."""
    service_rejects_zero: bool = False
    """Whether 0 is invalid in the service's JSON, although `Policy` allows it."""
    choices: tuple[str, ...] = ()
    """The allowed names of a "choice" field."""
    accepts_callable: bool = False
    """Whether the value of a "choice" field can also be a callable in Python."""

    @property
    def is_json_minimum_allowed(self) -> bool:
        """Whether a value in the service's JSON may be equal to `minimum`."""
        return self.is_minimum_allowed and not self.service_rejects_zero

    def check(self, value: object, name: str | None = None) -> Any:
        """Return the value as `Policy` stores it, or raise ConfigurationError.

        `name` is the name in an error, by default the Python name. A duration can be checked in any
        unit, because its only bound is 0.
        """
        name = name or self.name
        if value is None and self.is_optional:
            return None
        match self.type:
            case "count":
                return check_count(name, value, int(self.minimum))
            case "number" | "seconds":
                if self.type == "seconds":
                    value = to_seconds(value)
                if self.is_minimum_allowed:
                    return check_at_least(name, value, self.minimum)
                return check_positive(name, value)
            case "statuses":
                return _check_statuses(name, value)
            case "codes":
                return _check_codes(name, value)
            case "choice":
                if isinstance(value, str) or not self.accepts_callable:
                    check_one_of(name, value, self.choices)
                elif not callable(value):
                    raise ConfigurationTypeError(name, "must be a name or a callable", value)
            case "header":
                rule = "must be the name of a header: a token (RFC 9110) of 1 to 64 characters"
                if not isinstance(value, str):
                    raise ConfigurationTypeError(name, rule, value)
                if not re.fullmatch(HEADER_NAME_PATTERN, value):
                    raise ConfigurationError(name, rule, value)
            case _:  # a flag
                return check_flag(name, value)
        return value


POLICY_FIELDS: tuple[PolicyField, ...] = (
    PolicyField(
        "max_attempts", "maxAttempts", "count", 4,
        "Number of attempts, including the first.",
        minimum=1, is_minimum_allowed=True,
    ),
    PolicyField(
        "initial_delay", "initialDelayMs", "seconds", 0.1,
        "Delay before the first retry, before jitter (in the library, 0 retries at once).",
        is_minimum_allowed=True, service_rejects_zero=True,
    ),
    PolicyField(
        "multiplier", "multiplier", "number", 2.0,
        "Factor by which the delay grows with each retry in an exponential backoff.",
    ),
    PolicyField(
        "max_delay", "maxDelayMs", "seconds", _DEFAULT_MAX_DELAY_S,
        "Longest delay of a linear or exponential backoff (in the library, 0 retries at once).",
        is_minimum_allowed=True, service_rejects_zero=True,
    ),
    PolicyField(
        "total_budget", "totalBudgetMs", "seconds", None,
        "Time for the whole call: an attempt starts only if it is expected to end in this time.",
        is_optional=True,
    ),
    PolicyField(
        "attempt_timeout", "attemptTimeoutMs", "seconds", None,
        "Time for one attempt.",
        is_optional=True, service_rejects_null=True,
    ),
    PolicyField(
        "backoff", "backoffType", "choice", "exponential",
        "How the delay grows with each retry.",
        choices=tuple(BACKOFFS), accepts_callable=True,
    ),
    PolicyField(
        "jitter", "jitterType", "choice", "full",
        "How the delay is spread at random.",
        choices=tuple(JITTERS), accepts_callable=True,
    ),
    PolicyField(
        "retryable_statuses", "retryableStatusCodes", "statuses", RETRYABLE_STATUSES,
        'HTTP status codes that are retried: numbers, or "5xx" for all from 500 to 599.',
        minimum=LOWEST_STATUS, is_minimum_allowed=True,
    ),
    PolicyField(
        "retryable_codes", "retryableGrpcCodes", "codes", RETRYABLE_CODES,
        "gRPC status codes that are retried.",
        choices=GRPC_CODES,
    ),
    PolicyField(
        "throttled_delay", "throttledDelayMs", "seconds", 1.0,
        "Smallest initial delay after a throttled attempt (429, 529, RESOURCE_EXHAUSTED).",
    ),
    PolicyField(
        "max_hint", "maxHintMs", "seconds", 120.0,
        "Longest wait that a server may ask for; if it asks for a longer one, the call ends.",
        is_minimum_allowed=True,
    ),
    PolicyField(
        "ignore_retried_below", None, "flag", False,  # noqa: FBT003 - a default, not a switch
        "Retry although a layer below has already retried; this multiplies attempts.",
    ),
    PolicyField(
        "idempotency_key_header", "idempotencyKeyHeader", "header", "Idempotency-Key",
        "Name of the header with the idempotency key.",
    ),
    PolicyField(
        "idempotency_key_format", "idempotencyKeyFormat", "choice", "plain",
        "Whether the idempotency key is sent as it is (plain) or in double quotes (quoted).",
        choices=("plain", "quoted"),
    ),
)  # fmt: skip


def check_collection(name: str, value: object) -> Iterable[Any]:
    """Return `value`, which must be iterable, but not str or bytes."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigurationTypeError(name, "must be a collection", value)
    return value  # pyright: ignore[reportUnknownVariableType] - the callers check the items


def _check_statuses(name: str, values: object) -> frozenset[int]:
    if values is RETRYABLE_STATUSES:  # checking a hundred numbers takes 10 us
        return RETRYABLE_STATUSES
    statuses: set[int] = set()
    for i, status in enumerate(check_collection(name, values)):
        if isinstance(status, str) and status in STATUS_CLASSES:
            statuses.update(STATUS_CLASSES[status])
            continue
        if isinstance(status, bool) or not isinstance(status, int):
            rule = "must be a whole number, '3xx', '4xx' or '5xx'"
            raise ConfigurationTypeError(f"{name}[{i}]", rule, status)
        if not LOWEST_STATUS <= status <= HIGHEST_STATUS:
            rule = f"must be from {LOWEST_STATUS} to {HIGHEST_STATUS}"
            raise ConfigurationError(f"{name}[{i}]", rule, status)
        statuses.add(status)
    return frozenset(statuses)


def _check_codes(name: str, values: object) -> frozenset[str]:
    codes: set[str] = set()
    for i, code in enumerate(check_collection(name, values)):
        if not isinstance(code, str):
            example = getattr(code, "name", "UNAVAILABLE")  # a grpc.StatusCode has a name
            rule = f'must be the name of a code as a string ("{example}")'
            raise ConfigurationTypeError(f"{name}[{i}]", rule, code)
        check_one_of(f"{name}[{i}]", code, GRPC_CODES)
        codes.add(code)
    return frozenset(codes)


class Random(Protocol):
    """A source of numbers in [0, 1), such as `random.Random(7)`."""

    def random(self) -> float:
        """Return the next random number."""
        ...


class Policy(ImmutableValue):
    """What is retried, how often, after which delays and within which time.

    Times are seconds or a `timedelta`; the attributes are seconds.

    max_attempts: number of attempts, including the first.
    total_budget: time for the whole call. An attempt starts only if it is expected to end in time.
    attempt_timeout: time for one attempt.
    retryable_statuses: numbers, or "5xx" for all from 500 to 599 (likewise "3xx" and "4xx").
    throttled_delay: smallest initial delay after a throttled attempt (429, 529,
        RESOURCE_EXHAUSTED).
    max_hint: longest wait that a server may ask for. If it asks for a longer wait, the call ends.
    ignore_retried_below: retry although a layer below has already retried; multiplies attempts.
    idempotency_key_header: name of the header with the idempotency key of an HTTP request.
    idempotency_key_format: whether that header has the key as it is ("plain") or in double quotes
        ("quoted", as in the IETF draft for the header Idempotency-Key).
    """

    _fields = tuple(field.name for field in POLICY_FIELDS)
    __slots__ = (*_fields, "_jitter", "_throttled_initial_delay", "attempt_commands", "delay_table")

    max_attempts: int
    initial_delay: float
    multiplier: float
    max_delay: float
    total_budget: float | None
    attempt_timeout: float | None
    backoff: BackoffName | Backoff
    jitter: JitterName | Jitter
    retryable_statuses: frozenset[int]
    retryable_codes: frozenset[str]
    throttled_delay: float
    max_hint: float
    ignore_retried_below: bool
    idempotency_key_header: str
    idempotency_key_format: KeyFormat
    delay_table: tuple[tuple[float, float, float], ...]
    """At index k: the ceiling (delay before jitter), shortest delay and jitter range of retry k.

    The table is computed once, so that `tarry.core.decide` computes a delay without `**` and
    without a function call. It is empty when delays cannot be known in advance, because backoff or
    jitter is a callable or the jitter uses the previous delay.
    """
    attempt_commands: tuple[Attempt, ...]
    """At index n: the command to start attempt n. All calls without a deadline share it."""
    _jitter: Callable[[float, float, float, float, float], float]
    _throttled_initial_delay: float
    """`throttled_delay`, limited to the range from `initial_delay` to `max_delay`."""

    def __init__(
        self,
        *,
        max_attempts: int = 4,
        initial_delay: Seconds = 0.1,
        multiplier: float = 2.0,
        max_delay: Seconds = 30.0,
        total_budget: Seconds | None = None,
        attempt_timeout: Seconds | None = None,
        backoff: BackoffName | Backoff = "exponential",
        jitter: JitterName | Jitter = "full",
        retryable_statuses: Iterable[int | str] = RETRYABLE_STATUSES,
        retryable_codes: Iterable[str] = RETRYABLE_CODES,
        throttled_delay: Seconds = 1.0,
        max_hint: Seconds = 120.0,
        ignore_retried_below: bool = False,
        idempotency_key_header: str = "Idempotency-Key",
        idempotency_key_format: KeyFormat = "plain",
        **unknown: Never,
    ) -> None:
        reject_unknown_arguments("tarry.Policy", unknown, self._fields, OTHER_FIELD_NAMES)
        arguments = locals()  # the fields by name
        self._set_fields(*(field.check(arguments[field.name]) for field in POLICY_FIELDS))
        if 0 < self.max_delay < self.initial_delay and uses_max_delay(self.backoff, self.jitter):
            self._reject_max_delay(initial_delay)
        self._set(
            _jitter=JITTERS[jitter] if isinstance(jitter, str) else partial(call_jitter, jitter),
            _throttled_initial_delay=max(
                self.initial_delay, min(self.throttled_delay, self.max_delay)
            ),
            delay_table=(),
        )
        numbers = range(min(self.max_attempts + 1, _MAX_PREPARED_ATTEMPTS))
        self._set(attempt_commands=tuple(Attempt(n, self.attempt_timeout) for n in numbers))
        if isinstance(backoff, str) and jitter in _JITTERS_WITHOUT_HISTORY:
            retries = range(min(self.max_attempts, _MAX_PREPARED_ATTEMPTS))
            self._set(delay_table=tuple(map(self._delay_row, retries)))

    def _reject_max_delay(self, given_initial_delay: Seconds) -> Never:
        """Raise the error for a `max_delay` that is shorter than `initial_delay`."""
        initial = self.initial_delay
        rule = f"must be at least initial_delay ({initial:g}), got {self.max_delay:g}"
        if self.max_delay == _DEFAULT_MAX_DELAY_S:
            rule += " (the default)"
        # A `timedelta` has a unit, so milliseconds were not meant.
        if initial >= _MIN_SUSPICIOUS_DELAY_S and isinstance(given_initial_delay, (int, float)):
            rule += f"; for {initial:g} ms, write initial_delay = {initial / 1000:g}"
        raise ConfigurationError("max_delay", rule)

    def ceiling(self, k: int, throttled: bool = False) -> float:  # noqa: FBT001, FBT002 - for speed
        """Return the ceiling for retry k: the delay before that retry, without jitter."""
        check_count("k", k)
        initial = self._throttled_initial_delay if throttled else self.initial_delay
        backoff = self.backoff
        if isinstance(backoff, str):
            return BACKOFFS[backoff](k, initial, self.multiplier, self.max_delay)
        ceiling = check_at_least("the result of backoff", backoff(k), 0)
        return max(initial, ceiling) if throttled else ceiling

    def delay(
        self,
        ceiling: float,
        previous: float | None,
        random_number: float,
        throttled: bool = False,  # noqa: FBT001, FBT002 - positional for speed
    ) -> float:
        """Return the delay after jitter, for a `random_number` from [0, 1).

        `previous` is the previous delay, or None before the first retry.
        """
        initial = self._throttled_initial_delay if throttled else self.initial_delay
        if previous is None:
            previous = initial
        jitter = self._jitter
        return jitter(ceiling, previous, random_number, initial, self.max_delay)

    def delays(self, random: Random) -> list[float]:
        """Return the delays, with jitter, of a call in which every attempt fails."""
        previous: float | None = None
        delays: list[float] = []
        for k in range(1, self.max_attempts):
            previous = self.delay(self.ceiling(k), previous, random.random())
            delays.append(previous)
        return delays

    def explain(self) -> str:
        """Return a table of the delays, the worst case time and the worst case load as text."""
        rows, retry_count, longest_wait, average_retry_count = plan_retries(self)
        jitter: str = self.jitter if isinstance(self.jitter, str) else "custom"
        if jitter == "none":
            jitter = "no"
        backoff = self.backoff if isinstance(self.backoff, str) else "custom"
        plural = "" if self.max_attempts == 1 else "s"
        lines = [
            f"{self.max_attempts} attempt{plural}, {backoff} backoff, {jitter} jitter",
            "",
            "retry   ceiling   delay from .. to",
        ]
        for k, row in enumerate(rows[:_MAX_ROWS], 1):
            ceiling, shortest, longest = map(format_duration, row)
            lines.append(f"{k:>5}  {ceiling:>8}   {shortest:>10} .. {longest}")
        if retry_count > _MAX_ROWS:
            last = format_duration(rows[-1][0])
            lines.append(f"  ...  {retry_count - _MAX_ROWS} more, the last {last}")
        lines.append("")
        if self.attempt_timeout is None:
            wait = format_duration(longest_wait)
            lines.append(f"worst case time: {wait} of waiting, plus the attempts themselves")
        else:
            longest_call = longest_wait + self.attempt_timeout * (retry_count + 1)
            if self.total_budget is not None:
                # The last attempt may start late in the budget and take longer than expected.
                longest_call = min(longest_call, self.total_budget + self.attempt_timeout)
            lines.append(f"worst case time: {format_duration(longest_call)}, attempts included")
        if self.total_budget is not None:
            total = format_duration(self.total_budget)
            ending = "no attempt starts later"
            if average_retry_count < retry_count:  # short delays are rare when the jitter is random
                ending += f", so about {average_retry_count + 1} attempts if every attempt fails"
            lines.append(f"total budget: {total}; {ending}")
        # The policy does not know the retry budget; `tarry.policyfile.explain` adds its effect.
        load = f"worst case load: {retry_count + 1} x the calls while every attempt fails"
        lines.append(f"{load}, unless a retry budget bounds it" if retry_count else load)
        return "\n".join(lines)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        self._check_names(changes)
        return type(self)(**(self._asdict() | changes))

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as a dict of JSON and TOML types. Fields that are None are left out."""
        fields: dict[str, Any] = {}
        for name, value in self._asdict().items():
            if value is None:  # the default, and TOML has no null
                continue
            if name in ("retryable_statuses", "retryable_codes"):
                fields[name] = sorted(value)
            elif isinstance(value, Schedule):
                fields[name] = {"schedule": list(value.delays)}
            elif callable(value):
                rule = "is a callable, which cannot be written to a dict; use a name or a Schedule"
                raise ConfigurationError(name, rule)
            else:
                fields[name] = value
        return fields

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a policy from the result of `to_dict`; missing fields get their defaults.

        `tarry.load_policy` reads a policy file, which may have other tables and a preset.
        """
        for name in data:
            if name in _OTHER_KEYS_OF_FILES:
                raise ConfigurationError(
                    f"{name!r} is a key of a policy file, not a field of a policy: use "
                    'policy, downstream = tarry.load_policy(data, "name of the dependency")'
                )
        cls._check_names(data)
        values = dict(data)
        backoff = values.get("backoff")
        if isinstance(backoff, Mapping):
            table = cast("Mapping[str, Any]", backoff)
            if set(table) != {"schedule"}:
                raise ConfigurationError("backoff as a table", "must be {'schedule': [...]}", table)
            values["backoff"] = Schedule(check_collection("schedule", table["schedule"]))
        return cls(**values)

    def _delay_row(self, k: int) -> tuple[float, float, float]:
        """Return the entry of retry k in `delay_table`."""
        if not k:
            return 0.0, 0.0, 0.0  # there is no retry 0
        ceiling = self.ceiling(k)
        shortest = self.delay(ceiling, None, 0.0)
        return ceiling, shortest, self.delay(ceiling, None, 1.0) - shortest

    @classmethod
    def _check_names(cls, names: Iterable[str]) -> None:
        for name in names:
            if name not in cls._fields:
                msg = f"a policy has no field {name!r}; {did_you_mean(name, cls._fields)}"
                raise ConfigurationError(msg)

    @classmethod
    def preset(cls, name: str) -> Policy:
        """Return a named policy: default, interactive, webhook, patient or quick."""
        check_one_of("preset", name, PRESETS)
        return PRESETS[name]


def uses_max_delay(backoff: BackoffName | Backoff, jitter: JitterName | Jitter) -> bool:
    """Return whether `max_delay` limits the delays of a policy with this backoff and jitter."""
    return backoff in _LIMITED_BACKOFFS or jitter == "decorrelated"


class RetryPlan(NamedTuple):
    """The retries of a call in which every attempt fails."""

    rows: list[tuple[float, float, float]]
    """For each retry: the ceiling, the shortest and the longest delay."""
    retry_count: int
    """The largest number of retries."""
    longest_wait: float
    """The longest time that all delays can take."""
    average_retry_count: int
    """The number of retries that fit into the total budget if all delays are average."""


def plan_retries(policy: Policy, max_rows: int = _MAX_EXPLAINED_RETRIES) -> RetryPlan:
    """Return the retries of a call in which every attempt fails, with at most `max_rows` rows.

    Retries without a row are assumed to wait as long as the last one that has a row.
    """
    rows: list[tuple[float, float, float]] = []
    longest_wait = shortest_wait = average_wait = 0.0
    shortest = longest = average = None
    retry_count = average_retry_count = policy.max_attempts - 1
    for k in range(1, min(retry_count, max_rows) + 1):
        ceiling = policy.ceiling(k)
        shortest = policy.delay(ceiling, shortest, 0.0)
        longest = policy.delay(ceiling, longest, _MAX_RANDOM_NUMBER)
        average = policy.delay(ceiling, average, 0.5)
        shortest_wait += shortest
        average_wait += average
        if policy.total_budget is not None:
            if average_wait >= policy.total_budget:
                average_retry_count = min(average_retry_count, k - 1)
            if shortest_wait >= policy.total_budget:
                retry_count = k - 1
                break
        longest_wait += longest
        rows.append((ceiling, shortest, longest))
    longest_wait += max(0, retry_count - max_rows) * (longest or 0.0)
    if policy.total_budget is not None:
        longest_wait = min(longest_wait, policy.total_budget)
    return RetryPlan(rows, retry_count, longest_wait, average_retry_count)


PRESETS: dict[str, Policy] = {
    "default": Policy(),
    # For interactive requests: two seconds in total, so short delays and few attempts.
    "interactive": Policy(max_attempts=3, initial_delay=0.05, max_delay=0.5, total_budget=2.0),
    # The example schedule of Standard Webhooks 1.0.0: ten attempts over three days. As that
    # specification says, only 2xx is a success, and only 410 (Gone) ends the attempts.
    "webhook": Policy(
        max_attempts=10,
        initial_delay=5.0,
        max_delay=24 * _HOUR_S,
        backoff=Schedule(
            (5.0, 300.0, 1800.0, *(hours * _HOUR_S for hours in (2, 5, 10, 14, 20, 24)))
        ),
        jitter="equal",
        retryable_statuses=FAILURE_STATUSES - {410},
        max_hint=24 * _HOUR_S,
    ),
    # For background work: up to a day; later delays are half an hour on average (full jitter).
    "patient": Policy(
        max_attempts=100,
        initial_delay=1.0,
        max_delay=_HOUR_S,
        total_budget=24 * _HOUR_S,
        max_hint=6 * _HOUR_S,
    ),
    # For work that is worthless after a few seconds: at most 1.5 s of waiting.
    "quick": Policy(max_attempts=5),
}
