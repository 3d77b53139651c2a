"""The metrics of OpenTelemetry: the same as those of Prometheus, under the names it prefers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import metrics

from tarry.core.events import (
    AttemptFailed,
    BreakerMoved,
    GaveUp,
    HedgeFired,
    HedgeWon,
    Succeeded,
    WillWait,
)
from tarry.core.outcome import Kind
from tarry.telemetry.measures import DELAYS, Names, balances, breakers, result_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

    from tarry.core.events import Event


class Metrics:
    """The instruments, and what each event adds to them."""

    def __init__(self, provider: MeterProvider | None, max_names: int) -> None:
        meter = metrics.get_meter("tarry", meter_provider=provider)
        self._operations = Names(max_names)
        self._downstreams = Names(max_names)
        self._attempts = meter.create_counter(
            "tarry.attempts", "{attempt}", "Attempts that ended, by what they came to."
        )
        self._calls = meter.create_counter(
            "tarry.calls", "{call}", "Calls that ended, and why those that failed did."
        )
        self._delays = meter.create_histogram(
            "tarry.retry.delay",
            "s",
            "Delays before retries, after jitter and the server's hint.",
            explicit_bucket_boundaries_advisory=DELAYS,
        )
        self._transitions = meter.create_counter(
            "tarry.breaker.transitions", "{transition}", "Moves of circuit breakers."
        )
        self._hedges = meter.create_counter(
            "tarry.hedges", "{hedge}", "Further copies of hedged calls: those sent, those that won."
        )
        meter.create_observable_up_down_counter(
            "tarry.breaker.state", [self._states], "{breaker}", "Circuit breakers in each state."
        )
        meter.create_observable_gauge(
            "tarry.budget.balance", [self._balances], "{token}", "What retry budgets hold."
        )

    def count(self, event: Event, error_type: str | None) -> None:
        """Count one event; an attempt that failed with its type of error."""
        match event:
            case AttemptFailed():
                attributes = self._who(event) | {"tarry.outcome": event.kind.value}
                self._attempts.add(1, attributes | {"error.type": error_type or ""})
            case Succeeded():
                who = self._who(event)
                self._attempts.add(1, who | {"tarry.outcome": Kind.SUCCESS.value})
                self._calls.add(1, who | {"tarry.result": result_of(event)})
            case GaveUp():
                attributes = self._who(event) | {"tarry.result": result_of(event)}
                self._calls.add(1, attributes | {"tarry.reason": event.reason.value})
            case WillWait():
                self._delays.record(event.delay, self._who(event))
            case BreakerMoved():
                moved = {
                    "tarry.breaker.before": event.before.value,
                    "tarry.breaker.after": event.after.value,
                }
                self._transitions.add(1, self._who(event) | moved)
            case HedgeFired():
                self._hedges.add(1, self._who(event) | {"tarry.result": "fired"})
            case HedgeWon():
                self._hedges.add(1, self._who(event) | {"tarry.result": "won"})
            case _:
                return

    def _who(self, event: Event) -> dict[str, str]:
        who: dict[str, str] = {}
        if event.operation:  # a breaker moves for all operations
            who["tarry.operation"] = self._operations(event.operation)
        if event.downstream is not None:
            who["tarry.downstream"] = self._downstreams(event.downstream)
        return who

    def _states(self, _: CallbackOptions) -> Iterator[Observation]:
        for (name, state), number in breakers(self._downstreams).items():
            attributes = {"tarry.downstream": name, "tarry.breaker.state": state.value}
            yield metrics.Observation(number, attributes)

    def _balances(self, _: CallbackOptions) -> Iterator[Observation]:
        for name, balance in balances(self._downstreams).items():
            yield metrics.Observation(balance, {"tarry.downstream": name})
