"""Shared code of the exporters to other systems and of the importers from them.

Both translate a defence (a policy or hedging, with its breaker, budget and limiter). A difference
is a setting that either tarry or the other system lacks, or that the two treat differently. The
user sees every difference. A ceiling is the delay of a retry before jitter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum
from math import ceil, isclose
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tarry.core.backoff import Schedule
from tarry.core.budget import PRICES
from tarry.core.outcome import RETRYABLE_CODES, THROTTLED_STATUSES
from tarry.core.policy import PRESETS, Policy
from tarry.core.text import format_duration, format_ranges
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence, component_arguments
from tarry.policyfile.documents import DocumentTable, format_proto_duration, round_to_ms

if TYPE_CHECKING:
    from tarry.core.hedging import Hedging

INEXPRESSIBLE_SCHEDULE = "THE SCHEDULE CANNOT BE EXPRESSED"
DEFAULT_RETRY_RATIO = 0.2
DEFAULT_MIN_RETRIES_IN_FLIGHT = 3
"""Defaults of Envoy and Istio. The ratio is also the default of the Gateway API."""
_MAX_LISTED_ITEMS = 8
_MAX_COMPARED_DELAYS = 32
"""The number of delays compared; after it, most exponential ceilings have reached max_delay."""
_MAX_LISTED_DELAYS = 4
_COMMON_MULTIPLIER = 2
"""The multiplier of exponential backoff in systems that have no setting for it."""
_CRITICAL_RATIO, _MIN_CRITICAL_S = 10, 60.0
"""The other system cannot express the schedule if the longer of the two total waits (tarry's and
that of the other system) is at least 60 s and at least 10 times the shorter."""
_THROTTLED_CODE = "RESOURCE_EXHAUSTED"


class Severity(IntEnum):
    """How serious a difference is; the user sees the most serious differences first."""

    CRITICAL = 0
    """The other system has a very different schedule, or does not retry or hedge at all."""
    LOAD = 1
    """Changes whether and how often requests are sent."""
    TIMING = 2
    """Changes when requests are sent and how long they can take."""
    DETAIL = 3
    """Small differences: rounding, and effects of default values."""


class Difference(NamedTuple):
    """A setting that a system lacks or treats differently; `effect` is a text for users."""

    field: str  # of a policy file, or a path in an imported document
    value: object
    effect: str
    severity: Severity = Severity.TIMING

    def __str__(self) -> str:
        return f"{self.field} = {format_value(self.value)}: {self.effect}"


class Converter:
    """Converts settings between tarry and another system (`system`), and collects differences."""

    def __init__(self, system: str) -> None:
        self.system = system
        self.differences: list[Difference] = []

    def report(
        self, field: str, value: object, effect: str, severity: Severity = Severity.TIMING
    ) -> None:
        """Add one difference."""
        self.differences.append(Difference(field, value, effect, severity))

    def report_unread(self, table: DocumentTable, ignore: Collection[str] = ()) -> None:
        """Report the keys of a table that the importer did not read, except those in `ignore`."""
        for key, value in table.unread().items():
            if key not in ignore:
                effect = "left out, because a policy of tarry has no such setting"
                self.report(table.path_of(key), value, effect)

    def report_delays(self, policy: Policy, system_delays: list[float], retry_count: int) -> None:
        """Report the other system's delays if they differ; it makes `retry_count` retries."""
        if policy.jitter == "decorrelated":  # such delays have no ceilings to compare
            return
        delays, tarry_retry_count = first_ceilings(policy), policy.max_attempts - 1
        total = _total_wait(policy, delays, tarry_retry_count)
        system_total = _total_wait(policy, system_delays, retry_count)
        shorter, longer = sorted((total, system_total))
        if longer >= max(_MIN_CRITICAL_S, _CRITICAL_RATIO * shorter):
            schedule = (
                f"{tarry_retry_count} retries within {format_duration(total)}, "
                f"{format_duration(max(delays))} apart at most"
            )
            effect = (
                f"{INEXPRESSIBLE_SCHEDULE}: {self.system} makes {retry_count} within "
                f"{format_duration(system_total)}, {format_duration(max(system_delays))} apart at "
                "most, and gives up"
            )
            self.report("schedule", schedule, effect, Severity.CRITICAL)
        elif any(
            not isclose(delay, system_delay, rel_tol=1e-6)
            for delay, system_delay in zip(delays, system_delays, strict=False)
        ):
            effect = (
                f"{self.system} waits up to {_format_delays(system_delays)}, where tarry has "
                f"{_format_delays(delays)}"
            )
            self.report(*_field_of_difference(policy, system_delays[0]), effect)

    def round_duration(self, field: str, seconds: float) -> float:
        """Return seconds rounded to whole milliseconds; report it if that changes the value."""
        result = round_to_ms(seconds)
        if result != seconds:
            effect = f"rounded to whole milliseconds: {result:g} s"
            self.report(field, seconds, effect, Severity.DETAIL)
        return result

    def format_rounded(self, field: str, seconds: float) -> str:
        """Return seconds, rounded to whole milliseconds, in the format of proto3 JSON."""
        return format_proto_duration(field, self.round_duration(field, seconds))

    def convert_call_timeout(self, policy: Policy) -> float | None:
        """Return the timeout of a whole call, or None if the policy has none.

        It is `total_budget`; with one attempt, `attempt_timeout` if that is shorter or set alone.
        """
        only_attempt_timeout = policy.attempt_timeout if policy.max_attempts == 1 else None
        total = policy.total_budget
        if total is None or (only_attempt_timeout is not None and only_attempt_timeout <= total):
            return only_attempt_timeout
        stops = "stops a running attempt when the time is over"
        self.report("total_budget", total, f"{self.system} {stops}; tarry lets it finish")
        return total

    def apply_call_timeout(self, policy: Policy, timeout: float | None, path: str) -> Policy:
        """Return the policy with the timeout that the other system has for a whole call.

        A total budget does not stop a running attempt, so each attempt gets a timeout as well.
        """
        if timeout is None:
            return policy
        attempt_timeout = min(timeout, policy.attempt_timeout or timeout)
        if policy.max_attempts == 1:
            return policy.replace(attempt_timeout=attempt_timeout)
        effect = (
            "no attempt starts after this time, but tarry lets a running attempt finish: "
            f"at most {format_duration(timeout + attempt_timeout)} in total"
        )
        self.report(path, timeout, effect)
        return policy.replace(total_budget=timeout, attempt_timeout=attempt_timeout)

    def report_tarry_settings(self, policy: Policy, throttling: str | None, failure: str) -> None:
        """Report `throttled_delay` and other fields that only tarry has.

        In the text, `throttling` is the word for a throttled failure, and `failure` is the word for
        any failure. `throttling` is None if the policy does not retry throttled failures.
        """
        throttled_ceilings = first_ceilings(policy, throttled=True)
        if throttling is not None and throttled_ceilings != first_ceilings(policy):
            effect = f"does not wait longer after {throttling} than after any other {failure}"
            self.report("throttled_delay", policy.throttled_delay, f"{self.system} {effect}")
        if not policy.ignore_retried_below:
            effect = f"{self.system} also retries calls that a layer below has already retried"
            field, value = "ignore_retried_below", policy.ignore_retried_below
            self.report(field, value, effect, Severity.DETAIL)
        for field in ("idempotency_key_header", "idempotency_key_format"):
            value = getattr(policy, field)
            if value != getattr(PRESETS["default"], field):
                effect = f"{self.system} adds no idempotency keys to requests"
                self.report(field, value, effect, Severity.DETAIL)

    def report_proxy_behaviour(self, policy: Policy) -> None:
        """Report what every proxy does differently from tarry."""
        effect = f"{self.system} also retries POST: restrict the route to idempotent methods"
        self.report("repeatable", "per call", effect, Severity.LOAD)
        has_custom_codes = policy.retryable_codes != RETRYABLE_CODES
        retries_throttled = not THROTTLED_STATUSES.isdisjoint(policy.retryable_statuses) or (
            has_custom_codes and _THROTTLED_CODE in policy.retryable_codes
        )
        self.report_tarry_settings(policy, "throttling" if retries_throttled else None, "failure")

    def report_codes(self, policy: Policy, supported: frozenset[str]) -> None:
        """Report retryable gRPC codes that are not in `supported`, unless they are the default."""
        unsupported = policy.retryable_codes - supported - {"OK"}
        if unsupported and policy.retryable_codes != RETRYABLE_CODES:
            effect = f"{self.system} cannot retry on these codes"
            self.report("retryable_codes", unsupported, effect, Severity.LOAD)

    def report_hint(self, path: str, hint_name: str, behaviour: str, max_hint: float) -> None:
        """Report how the other system treats a hint (the wait that a server asks for)."""
        effect = f"{behaviour}; tarry waits for up to {format_duration(max_hint)}, or gives up"
        self.report(path, hint_name, effect)

    def report_left_out_breaker(self, defence: Defence, cause: str) -> None:
        """Report that the export leaves out the breaker, if there is one."""
        if defence.breaker is not None:
            breaker = defence.breaker or "default values"
            self.report("breaker", breaker, f"left out, because {cause}", Severity.LOAD)

    def report_left_out_limiter(self, defence: Defence) -> None:
        """Report that the export leaves out the limiter, if there is one."""
        if defence.limiter is not None:
            effect = f"left out, because {self.system} has no such limiter"
            self.report("limiter.kind", defence.limiter["kind"], effect, Severity.LOAD)

    def convert_budget(self, defence: Defence) -> tuple[float, int] | None:
        """Return the budget for Envoy and Istio: percentage and minimum of retries in flight."""
        budget = summarize_budget(defence)
        if budget is None:
            return None
        percent, minimum = round(100 * budget.ratio, 6), DEFAULT_MIN_RETRIES_IN_FLIGHT
        if budget.kind == "ratio":
            minimum = max(1, ceil(budget.arguments["min_per_second"]))
        effect = (
            f"{self.system} counts requests in flight: retries are at most {percent:g} % of all "
            f"requests, but {minimum} can always be in flight"
        )
        self.report("budget.kind", budget.kind, effect, Severity.LOAD)
        return percent, minimum

    def sorted_differences(self) -> tuple[Difference, ...]:
        """Return the differences, the most serious first."""
        return tuple(sorted(self.differences, key=lambda difference: difference.severity))


class Exported(NamedTuple):
    """The documents for another system (dicts to write as YAML or JSON), and the differences."""

    documents: tuple[dict[str, Any], ...]
    differences: tuple[Difference, ...]


class Imported(NamedTuple):
    """The defence that a document of another system describes, and the differences."""

    defence: Defence
    differences: tuple[Difference, ...]
    imported_fields: tuple[str, ...] = ()
    """The fields of the policy that the document sets."""

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of a policy file; unset fields with default values are left out."""
        defaults = Policy().to_dict()
        return {
            name: value
            for name, value in self.defence.to_dict().items()
            if name in self.imported_fields or value != defaults.get(name)
        }


def format_value(value: object) -> str:
    """Return a value as short text for users."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, (set, frozenset)):
        items = cast("set[object]", value)
        numbers = [item for item in items if isinstance(item, int)]
        if numbers and len(numbers) == len(items):
            return _join(format_ranges(numbers).split(", "))
        return _join(sorted(map(str, items)))
    if isinstance(value, (list, tuple)):
        return _join(list(map(format_value, value)))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, object]", value).items()
        nested = {name: "{...}" if isinstance(item, Mapping) else item for name, item in fields}
        return _join([f"{name} {format_value(item)}" for name, item in nested.items()])
    return "a function" if callable(value) else str(value)


def _join(words: list[str]) -> str:
    if len(words) > _MAX_LISTED_ITEMS:
        words = [*words[:_MAX_LISTED_ITEMS], f"and {len(words) - _MAX_LISTED_ITEMS} more"]
    return ", ".join(words) or "nothing"


def first_ceilings(policy: Policy, *, throttled: bool = False) -> list[float]:
    """Return the ceilings of the first 32 retries, or of all if there are fewer."""
    last = min(policy.max_attempts - 1, _MAX_COMPARED_DELAYS)
    return [policy.ceiling(k, throttled) for k in range(1, last + 1)]


def delay_bounds(policy: Policy) -> tuple[float, float]:
    """Return the first and the longest delay, both without jitter."""
    if policy.jitter == "decorrelated":  # such delays have only these bounds
        return policy.initial_delay, policy.max_delay
    delays = first_ceilings(policy)
    first = max(delays[0], 0.001)
    if policy.backoff in ("exponential", "linear") and len(set(delays)) > 1:
        return first, policy.max_delay
    return first, max(*delays, first)


def _total_wait(policy: Policy, delays: list[float], retry_count: int) -> float:
    """Return the longest total wait; retries after those in `delays` repeat the last delay."""
    wait = sum(delays) + (retry_count - len(delays)) * delays[-1]
    return wait if policy.total_budget is None else min(wait, policy.total_budget)


def _field_of_difference(policy: Policy, first_system_delay: float) -> tuple[str, object]:
    """Return name and value of the field that makes the delays differ from the other system's."""
    if isinstance(policy.backoff, Schedule):
        return "backoff", policy.backoff.delays
    if policy.backoff != "exponential":
        return "backoff", policy.backoff
    if policy.multiplier != _COMMON_MULTIPLIER:
        return "multiplier", policy.multiplier
    if not isclose(policy.initial_delay, first_system_delay, rel_tol=1e-6):
        return "initial_delay", policy.initial_delay  # the other system has a longer minimum
    return "max_delay", policy.max_delay


def _format_delays(delays: list[float]) -> str:
    more = ", ..." if len(delays) > _MAX_LISTED_DELAYS else ""
    return ", ".join(map(format_duration, delays[:_MAX_LISTED_DELAYS])) + more


def hedging_delay(hedging: Hedging, system: str) -> float:
    """Return the seconds before a hedge starts; raise ConfigurationError if they are measured."""
    if isinstance(hedging.after, float):
        return hedging.after
    setting = "only max_extra_load" if hedging.after is None else repr(hedging.after)
    rule = (
        f"must be set in seconds to be exported to {system}, got {setting}: {system} does not "
        "measure percentiles, so set the value that you measured"
    )
    raise ConfigurationError("hedging.after", rule)


def reject_hedging(defence: Defence, system: str) -> None:
    """Raise ConfigurationError if the defence hedges, because the system has no hedging."""
    if defence.hedging is not None:
        msg = (
            f"hedging cannot be exported to {system}, which has no hedging: export to grpc or "
            "envoy, or use a policy with retries"
        )
        raise ConfigurationError(msg)


class BudgetSummary(NamedTuple):
    """A budget of any kind, with numbers that can be compared between kinds."""

    kind: str
    arguments: dict[str, Any]
    retries_per_success: float
    """For a ratio budget: retries per call, successful or not."""
    retries_without_success: float
    """Retries until the budget is empty; for a ratio budget: retries in a window without calls."""

    @property
    def ratio(self) -> float:
        """Retries as a fraction of all calls, for systems that support no other budget.

        A token bucket can allow one retry per success and still stop all retries in an outage. A
        fraction does not stop retries in an outage, so here it is at most the systems' default.
        """
        if self.kind == "ratio":
            return self.retries_per_success
        return min(self.retries_per_success, DEFAULT_RETRY_RATIO)


def summarize_budget(defence: Defence) -> BudgetSummary | None:
    """Return the summary of a defence's budget, or None without a budget."""
    budget = defence.downstream(name="export").budget
    arguments = component_arguments(defence, "budget")
    if budget is None or arguments is None or defence.budget is None:
        return None
    kind = defence.budget["kind"]
    if kind == "token":
        prices = PRICES[arguments["preset"]]
        per_success = prices.first_attempt_success / prices.retry
        return BudgetSummary(kind, arguments, per_success, budget.balance(0.0) / prices.retry)
    per_success = arguments["ratio" if kind == "ratio" else "token_ratio"]
    return BudgetSummary(kind, arguments, per_success, budget.balance(0.0))
