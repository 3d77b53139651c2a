"""A policy: immutable values that say what is retried, how often and after which delays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from tarry.core.backoff import BACKOFFS, Backoff, BackoffName, Schedule
from tarry.core.checks import check_at_least, check_count, check_one_of
from tarry.core.explain import explain
from tarry.core.jitter import JITTERS, Jitter, JitterName, custom
from tarry.core.outcome import RETRYABLE_CODES, RETRYABLE_STATUSES
from tarry.core.policy_fields import POLICY_FIELDS, check_collection, check_max_delay
from tarry.core.suggest import did_you_mean
from tarry.core.value import Value
from tarry.core.verdict import Attempt
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from typing import Self

_HOUR = 3600.0
_TABLE = 32
_MEMORYLESS = ("none", "full", "equal")
_SETS = ("retryable_statuses", "retryable_codes")


class Random(Protocol):
    """A source of numbers in [0, 1), such as `random.Random(7)`."""

    def random(self) -> float:
        """Draw one."""
        ...


class Policy(Value):
    """What is retried, how often, after which delays and within which time. Seconds throughout.

    max_attempts: attempts in all, the first included.
    total_budget: seconds for the call in all: no attempt starts that is not expected to end
        within them.
    attempt_timeout: seconds for one attempt.
    throttled_delay: the slower initial delay after a throttled attempt (429, RESOURCE_EXHAUSTED).
    max_hint: the longest wait that a server may ask for; a longer one ends the call.
    retry_marked: retry errors too that an inner tarry loop has given up on (this multiplies
        attempts).
    """

    _fields = tuple(field.name for field in POLICY_FIELDS)
    __slots__ = (*_fields, "_jitter", "_throttled", "attempt_commands", "delay_table")

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
    retry_marked: bool
    delay_table: tuple[tuple[float, float, float], ...]
    """The first retries worked out: ceiling, least delay and spread of retry k stand at k.

    Empty for what cannot be known before: a callable, or a jitter that looks at the last delay.
    """
    attempt_commands: tuple[Attempt, ...]
    """The commands for the first attempts, each at its number, for a call without a deadline."""
    _jitter: Callable[[float, float, float, float, float], float]
    _throttled: float
    """The initial delay after throttling."""

    def __init__(
        self,
        *,
        max_attempts: int = 4,
        initial_delay: float = 0.1,
        multiplier: float = 2.0,
        max_delay: float = 30.0,
        total_budget: float | None = None,
        attempt_timeout: float | None = None,
        backoff: BackoffName | Backoff = "exponential",
        jitter: JitterName | Jitter = "full",
        retryable_statuses: Iterable[int] = RETRYABLE_STATUSES,
        retryable_codes: Iterable[str] = RETRYABLE_CODES,
        throttled_delay: float = 1.0,
        max_hint: float = 120.0,
        retry_marked: bool = False,
    ) -> None:
        arguments = {
            "max_attempts": max_attempts,
            "initial_delay": initial_delay,
            "multiplier": multiplier,
            "max_delay": max_delay,
            "total_budget": total_budget,
            "attempt_timeout": attempt_timeout,
            "backoff": backoff,
            "jitter": jitter,
            "retryable_statuses": retryable_statuses,
            "retryable_codes": retryable_codes,
            "throttled_delay": throttled_delay,
            "max_hint": max_hint,
            "retry_marked": retry_marked,
        }
        self._set(**{field.name: field.check(arguments[field.name]) for field in POLICY_FIELDS})
        check_max_delay(self.max_delay, self.initial_delay)
        self._set(
            _jitter=JITTERS[jitter] if isinstance(jitter, str) else partial(custom, jitter),
            _throttled=max(self.initial_delay, min(self.throttled_delay, self.max_delay)),
            delay_table=(),
        )
        first = range(min(self.max_attempts + 1, _TABLE))
        self._set(attempt_commands=tuple(Attempt(number, self.attempt_timeout) for number in first))
        if isinstance(backoff, str) and jitter in _MEMORYLESS:
            self._set(delay_table=tuple(map(self._row, range(min(self.max_attempts, _TABLE)))))

    def ceiling(self, k: int, throttled: bool = False) -> float:  # noqa: FBT001, FBT002
        """Return the bound of the delay before retry k, before jitter."""
        check_count("k", k)
        initial = self._throttled if throttled else self.initial_delay
        backoff = self.backoff
        if isinstance(backoff, str):
            return BACKOFFS[backoff](k, initial, self.multiplier, self.max_delay)
        ceiling = check_at_least("the result of backoff", backoff(k), 0)
        return max(initial, ceiling) if throttled else ceiling

    def delay(
        self,
        ceiling: float,
        previous: float | None,
        u: float,
        throttled: bool = False,  # noqa: FBT001, FBT002
    ) -> float:
        """Return the delay that jitter makes of a ceiling with the drawn number u."""
        initial = self._throttled if throttled else self.initial_delay
        if previous is None:
            previous = initial
        jitter = self._jitter
        return jitter(ceiling, previous, u, initial, self.max_delay)

    def delays(self, random: Random) -> list[float]:
        """Draw the delays of one call in which every attempt fails: max_attempts - 1 of them."""
        previous: float | None = None
        drawn: list[float] = []
        for k in range(1, self.max_attempts):
            previous = self.delay(self.ceiling(k), previous, random.random())
            drawn.append(previous)
        return drawn

    def explain(self) -> str:
        """Describe the schedule, the worst case time and the worst case load in words."""
        return explain(self)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        self._known(changes)
        return type(self)(**(self._asdict() | changes))

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain values that JSON and TOML can hold."""
        plain: dict[str, Any] = {}
        for name, value in self._asdict().items():
            if value is None:  # the default, and TOML has no word for it
                continue
            if name in _SETS:
                plain[name] = sorted(value)
            elif isinstance(value, Schedule):
                plain[name] = {"schedule": list(value.delays)}
            elif callable(value):
                msg = f"{name} is a callable, which has no dict form; use a name or a Schedule"
                raise ConfigurationError(msg)
            else:
                plain[name] = value
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Build a policy from what `to_dict` gave; a field left out has its default."""
        cls._known(plain)
        values = dict(plain)
        backoff = values.get("backoff")
        if isinstance(backoff, Mapping):
            delays = cast("Mapping[str, Any]", backoff)
            if set(delays) != {"schedule"}:
                msg = f"backoff as a table must be {{'schedule': [...]}}, got {backoff!r}"
                raise ConfigurationError(msg)
            values["backoff"] = Schedule(tuple(check_collection("schedule", delays["schedule"])))
        return cls(**values)

    def _row(self, k: int) -> tuple[float, float, float]:
        if not k:
            return 0.0, 0.0, 0.0  # there is no retry 0
        ceiling = self.ceiling(k)
        least = self.delay(ceiling, None, 0.0)
        return ceiling, least, self.delay(ceiling, None, 1.0) - least

    @classmethod
    def _known(cls, names: Iterable[str]) -> None:
        for name in names:
            if name not in cls._fields:
                msg = f"a policy has no field {name!r}; {did_you_mean(name, cls._fields)}"
                raise ConfigurationError(msg)

    @classmethod
    def preset(cls, name: str) -> Policy:
        """Return a named policy: default, interactive, webhook or patient."""
        check_one_of("preset", name, PRESETS)
        return PRESETS[name]


PRESETS: dict[str, Policy] = {
    "default": Policy(),
    # A person waits: two seconds in all, so small steps and an early end.
    "interactive": Policy(max_attempts=3, initial_delay=0.05, max_delay=0.5, total_budget=2.0),
    # The example schedule of Standard Webhooks 1.0.0: ten attempts over three days.
    "webhook": Policy(
        max_attempts=10,
        initial_delay=5.0,
        max_delay=24 * _HOUR,
        backoff=Schedule(
            (5.0, 300.0, 1800.0, *(hours * _HOUR for hours in (2, 5, 10, 14, 20, 24)))
        ),
        jitter="equal",
        max_hint=24 * _HOUR,
    ),
    # A day of patience: about half an hour between attempts once it has lasted.
    "patient": Policy(
        max_attempts=100,
        initial_delay=1.0,
        max_delay=_HOUR,
        total_budget=24 * _HOUR,
        max_hint=6 * _HOUR,
    ),
}
