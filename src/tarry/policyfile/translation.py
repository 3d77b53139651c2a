"""Losses, and functions that exporters and importers share.

A loss is a setting that one of the two systems, tarry and the other system, lacks or treats
differently. Every loss is reported to the user; none is dropped silently. A ceiling is the upper
bound of a delay, before jitter.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from math import ceil, isclose
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tarry.core.backoff import Schedule
from tarry.core.budget import PRICES
from tarry.core.outcome import RETRYABLE_CODES
from tarry.core.policy import Policy
from tarry.core.text import format_duration
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence, part_arguments
from tarry.policyfile.documents import DocumentTable, format_proto_duration, round_to_ms

if TYPE_CHECKING:
    from tarry.core.hedging import Hedging

SCHEDULE_LOST = "THE SCHEDULE CANNOT BE EXPRESSED"
DEFAULT_RETRY_SHARE = 0.2
DEFAULT_MIN_RETRIES_IN_FLIGHT = 3
"""Defaults of Envoy and Istio; the share is also the default of the Gateway API."""
_MAX_LISTED = 8
_MAX_COMPARED_DELAYS = 32
"""Delays are compared for this many retries; later exponential ceilings no longer grow."""
_MAX_LISTED_DELAYS = 4
_COMMON_MULTIPLIER = 2
"""The multiplier of exponential backoff in systems that have no setting for it."""
_CRITICAL_RATIO, _MIN_CRITICAL_S = 10, 60.0
"""The schedule counts as lost when the longer of two total waits, tarry's and the other system's,
is at least 60 s and 10 times the shorter one."""
_THROTTLED_STATUS, _THROTTLED_CODE = 429, "RESOURCE_EXHAUSTED"


class Severity(IntEnum):
    """How serious a loss is; the most serious losses are reported first."""

    CRITICAL = 0
    """The translated policy is a different policy."""
    LOAD = 1
    """Changes whether and how often requests are sent."""
    TIMING = 2
    """Changes when requests are sent and how long they can take."""
    DETAIL = 3
    """Small differences: rounding, and effects of default values."""


class Loss(NamedTuple):
    """A setting that a system lacks or treats differently, and the effect, as a text for users."""

    field: str
    value: object
    effect: str
    severity: Severity = Severity.TIMING

    def __str__(self) -> str:
        return f"{self.field} = {format_value(self.value)}: {self.effect}"


class Losses(list[Loss]):
    """The losses of one translation; `system` is the name of the other system in their texts.

    The methods that convert a value add a loss where the conversion changes the meaning.
    """

    def __init__(self, system: str) -> None:
        super().__init__()
        self.system = system

    def add(
        self, field: str, value: object, effect: str, severity: Severity = Severity.TIMING
    ) -> None:
        """Add one loss; the arguments are those of `Loss`."""
        self.append(Loss(field, value, effect, severity))

    def add_unread(self, table: DocumentTable, *ignored: str) -> None:
        """Add a loss for each key of a table that was not read, except for keys in `ignored`."""
        for key, value in table.unread().items():
            if key not in ignored:
                effect = "left out: a policy of tarry has no such setting"
                self.add(table.path_of(key), value, effect)

    def add_for_delays(self, policy: Policy, system_delays: list[float], retries: int) -> None:
        """Add a loss when the other system, with `retries` retries, has different delays."""
        if policy.jitter == "decorrelated":
            return
        delays, max_retries = first_ceilings(policy), policy.max_attempts - 1
        total = _total_wait(policy, delays, max_retries)
        system_total = _total_wait(policy, system_delays, retries)
        shorter, longer = sorted((total, system_total))
        if longer >= max(_MIN_CRITICAL_S, _CRITICAL_RATIO * shorter):
            schedule = (
                f"{max_retries} retries within {format_duration(total)}, "
                f"{format_duration(max(delays))} apart at most"
            )
            effect = (
                f"{SCHEDULE_LOST}: {self.system} makes {retries} within "
                f"{format_duration(system_total)}, {format_duration(max(system_delays))} apart at "
                "most, and gives up"
            )
            self.add("schedule", schedule, effect, Severity.CRITICAL)
        elif any(
            not isclose(delay, system_delay, rel_tol=1e-6)
            for delay, system_delay in zip(delays, system_delays, strict=False)
        ):
            effect = (
                f"{self.system} waits up to {_format_delays(system_delays)}, where tarry has "
                f"{_format_delays(delays)}"
            )
            self.add(*_field_of_difference(policy), effect)

    def round_to_ms(self, field: str, seconds: float) -> float:
        """Return seconds rounded to whole milliseconds; add a loss when that changes the value."""
        result = round_to_ms(seconds)
        if result != seconds:
            effect = f"rounded to whole milliseconds: {result:g} s"
            self.add(field, seconds, effect, Severity.DETAIL)
        return result

    def format_proto_duration(self, field: str, seconds: float) -> str:
        """Return seconds, rounded to whole milliseconds, in the format of proto3 JSON."""
        return format_proto_duration(field, self.round_to_ms(field, seconds))

    def convert_call_timeout(self, policy: Policy) -> float | None:
        """Return the timeout of the whole call: the total budget, with a loss, or None.

        If the policy has one attempt, a shorter timeout of the attempt is that of the call.
        """
        only_attempt_timeout = policy.attempt_timeout if policy.max_attempts == 1 else None
        total = policy.total_budget
        if total is None or (only_attempt_timeout is not None and only_attempt_timeout <= total):
            return only_attempt_timeout
        stops = "stops a running attempt when the time is over"
        self.add("total_budget", total, f"{self.system} {stops}; tarry lets it finish")
        return total

    def apply_call_timeout(self, policy: Policy, timeout: float | None, path: str) -> Policy:
        """Return the policy with `timeout`, the other system's timeout for the whole call.

        A total budget does not stop a running attempt, so each attempt gets a timeout as well.
        """
        if timeout is None:
            return policy
        attempt_timeout = min(timeout, policy.attempt_timeout or timeout)
        if policy.max_attempts == 1:
            return policy.replace(attempt_timeout=attempt_timeout)
        effect = (
            "no attempt starts after it, but tarry lets a running attempt finish: "
            f"at most {format_duration(timeout + attempt_timeout)} in total"
        )
        self.add(path, timeout, effect)
        return policy.replace(total_budget=timeout, attempt_timeout=attempt_timeout)

    def add_for_throttling(self, policy: Policy, throttling: str | None, failure: str) -> None:
        """Add the losses of `throttled_delay` and `ignore_retried_below`: only tarry has them.

        In the text, `throttling` stands for throttled failures, and `failure` for any failure.
        `throttling` is None when the policy does not retry throttled failures.
        """
        throttled_ceilings = first_ceilings(policy, throttled=True)
        if throttling is not None and throttled_ceilings != first_ceilings(policy):
            effect = f"does not wait longer after {throttling} than after any other {failure}"
            self.add("throttled_delay", policy.throttled_delay, f"{self.system} {effect}")
        if not policy.ignore_retried_below:
            effect = f"{self.system} also retries calls that a layer below has already retried"
            self.add("ignore_retried_below", policy.ignore_retried_below, effect, Severity.DETAIL)

    def add_for_proxy(self, policy: Policy) -> None:
        """Add the losses of every system that is a proxy."""
        effect = f"{self.system} also retries POST: restrict the route to idempotent methods"
        self.add("repeatable", "per call", effect, Severity.LOAD)
        has_own_codes = policy.retryable_codes != RETRYABLE_CODES  # not the default
        retries_throttled = _THROTTLED_STATUS in policy.retryable_statuses or (
            has_own_codes and _THROTTLED_CODE in policy.retryable_codes
        )
        self.add_for_throttling(policy, "throttling" if retries_throttled else None, "failure")

    def add_for_codes(self, policy: Policy, supported: frozenset[str]) -> None:
        """Add the loss of gRPC codes that the other system lacks, unless the codes are defaults."""
        unsupported = policy.retryable_codes - supported - {"OK"}
        if unsupported and policy.retryable_codes != RETRYABLE_CODES:
            effect = f"{self.system} cannot retry on these codes"
            self.add("retryable_codes", unsupported, effect, Severity.LOAD)

    def add_for_hint(self, path: str, hint: str, behaviour: str, max_hint: float) -> None:
        """Add the loss of a server's hint; `behaviour` is what the other system does with it."""
        effect = f"{behaviour}; tarry waits for up to {format_duration(max_hint)}, or gives up"
        self.add(path, hint, effect)

    def add_for_breaker(self, defence: Defence, cause: str) -> None:
        """Add the loss of a breaker that is left out of the export."""
        if defence.breaker is not None:
            breaker = defence.breaker or "its defaults"
            self.add("breaker", breaker, f"left out: {cause}", Severity.LOAD)

    def add_for_limiter(self, defence: Defence) -> None:
        """Add the loss of a limiter that is left out of the export."""
        if defence.limiter is not None:
            effect = f"left out: {self.system} has no such limiter"
            self.add("limiter.kind", defence.limiter["kind"], effect, Severity.LOAD)

    def convert_budget(self, defence: Defence) -> tuple[float, int] | None:
        """Return the limit of retries in flight for Envoy and Istio: percentage and minimum."""
        budget = summarize_budget(defence)
        if budget is None:
            return None
        percent, minimum = round(100 * budget.share, 6), DEFAULT_MIN_RETRIES_IN_FLIGHT
        if budget.kind == "ratio":
            minimum = max(1, ceil(budget.arguments["min_per_second"]))
        effect = (
            f"{self.system} counts requests in flight: retries are at most {percent:g} % of all "
            f"requests, but {minimum} can always be in flight"
        )
        self.add("budget.kind", budget.kind, effect, Severity.LOAD)
        return percent, minimum

    def by_severity(self) -> tuple[Loss, ...]:
        """Return the losses, the most serious first; equally serious losses keep their order."""
        return tuple(sorted(self, key=lambda loss: loss.severity))


class Exported(NamedTuple):
    """The documents for another system, as plain values, and the losses, most serious first."""

    documents: tuple[dict[str, Any], ...]
    losses: tuple[Loss, ...]


class Imported(NamedTuple):
    """The defence from a document of another system, and the losses."""

    defence: Defence
    losses: tuple[Loss, ...]
    imported_fields: tuple[str, ...] = ()
    """The fields of the policy that the document sets."""

    def to_dict(self) -> dict[str, Any]:
        """Return the defence as a dict, without defaults that the document does not set."""
        defaults = Policy().to_dict()
        return {
            name: value
            for name, value in self.defence.to_dict().items()
            if name in self.imported_fields or value != defaults.get(name)
        }


def format_value(value: object) -> str:
    """Return a value as short text, as in a policy file."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, (set, frozenset)):
        return _join(sorted(map(str, value)))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return _join(list(map(format_value, value)))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        nested = {name: "{...}" if isinstance(item, Mapping) else item for name, item in items}
        return _join([f"{name} {format_value(item)}" for name, item in nested.items()])
    return "a function" if callable(value) else str(value)


def _join(words: list[str]) -> str:
    if len(words) > _MAX_LISTED:
        words = [*words[:_MAX_LISTED], f"and {len(words) - _MAX_LISTED} more"]
    return ", ".join(words) or "nothing"


def first_ceilings(policy: Policy, *, throttled: bool = False) -> list[float]:
    """Return the ceilings of the first 32 retries, or of all if there are fewer."""
    last = min(policy.max_attempts - 1, _MAX_COMPARED_DELAYS)
    return [policy.ceiling(k, throttled) for k in range(1, last + 1)]


def delay_bounds(policy: Policy) -> tuple[float, float]:
    """Return the delay before the first retry and the longest delay, before jitter."""
    if policy.jitter == "decorrelated":  # which has no ceilings, only these bounds
        return policy.initial_delay, policy.max_delay
    delays = first_ceilings(policy)
    first = max(delays[0], 0.001)
    if policy.backoff in ("exponential", "linear") and len(set(delays)) > 1:
        return first, policy.max_delay
    return first, max(*delays, first)


def _total_wait(policy: Policy, delays: list[float], retries: int) -> float:
    """Return the longest total wait; retries after those in `delays` repeat the last delay."""
    waits = sum(delays) + (retries - len(delays)) * delays[-1]
    return waits if policy.total_budget is None else min(waits, policy.total_budget)


def _field_of_difference(policy: Policy) -> tuple[str, object]:
    """Return the field, and its value, that makes the delays differ from the other system's."""
    if isinstance(policy.backoff, Schedule):
        return "backoff", policy.backoff.delays
    if policy.backoff != "exponential":
        return "backoff", policy.backoff
    if policy.multiplier != _COMMON_MULTIPLIER:
        return "multiplier", policy.multiplier
    return "max_delay", policy.max_delay


def _format_delays(delays: list[float]) -> str:
    more = ", ..." if len(delays) > _MAX_LISTED_DELAYS else ""
    return ", ".join(map(format_duration, delays[:_MAX_LISTED_DELAYS])) + more


def hedging_delay(hedging: Hedging, format_name: str) -> float:
    """Return the seconds before a copy is sent; a percentile raises ConfigurationError."""
    if isinstance(hedging.after, float):
        return hedging.after
    setting = "max_extra_load alone" if hedging.after is None else repr(hedging.after)
    rule = (
        f"must be seconds to be exported to {format_name}, got {setting}: {format_name} does not "
        "measure percentiles, so set the value that you measured"
    )
    raise ConfigurationError("hedging.after", rule)


def reject_hedging(defence: Defence, format_name: str) -> None:
    """Raise ConfigurationError if the defence hedges, because the format has no hedging."""
    if defence.hedging is not None:
        msg = (
            f"hedging cannot be exported to {format_name}, which has no hedging: export to grpc or "
            "envoy, or use a policy with retries"
        )
        raise ConfigurationError(msg)


class BudgetSummary(NamedTuple):
    """A budget of any kind, with numbers that can be compared between kinds."""

    kind: str
    arguments: dict[str, Any]
    earned: float
    """Number of retries that one success pays for."""
    burst: float
    """Number of retries that are possible without any success."""

    @property
    def share(self) -> float:
        """Retries as a fraction of all calls, for systems that support no other budget.

        A token bucket can allow one retry per success and still stop all retries in an outage. A
        fraction does not stop retries in an outage, so it is limited to the systems' default.
        """
        return self.earned if self.kind == "ratio" else min(self.earned, DEFAULT_RETRY_SHARE)


def summarize_budget(defence: Defence) -> BudgetSummary | None:
    """Return the summary of a defence's budget, or None without a budget."""
    budget, arguments = defence.downstream(name="export").budget, part_arguments(defence, "budget")
    if budget is None or arguments is None or defence.budget is None:
        return None
    kind = defence.budget["kind"]
    if kind == "token":
        prices = PRICES[arguments["preset"]]
        earned, burst = prices.clean_success / prices.retry, budget.balance(0.0) / prices.retry
        return BudgetSummary(kind, arguments, earned, burst)
    earned = arguments["ratio" if kind == "ratio" else "token_ratio"]
    return BudgetSummary(kind, arguments, earned, budget.balance(0.0))
