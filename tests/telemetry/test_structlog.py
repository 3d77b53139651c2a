"""The structlog listener: names, levels and fields."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

import tarry
from tarry.core import events
from tarry.telemetry.logs import EVENT_NAMES
from tarry.telemetry.structlog import StructlogListener
from tarry.testing import VirtualClock
from tests.runtime.drivers import FAIL, OK, Dependency, Driver
from tests.telemetry.sample_calls import (
    CALL_COUNT,
    ConcurrentCaller,
    SampleCall,
    every_driver,
    every_sample_call,
    in_tasks_and_threads,
    listening,
    reopen_breaker,
    sync_and_async_hedged_call,
)


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    """The lines that structlog received."""
    with capture_logs() as lines, listening(StructlogListener()):
        yield lines


def names_and_levels(lines: list[Any]) -> list[tuple[str, str]]:
    """Return the name and the level of each line."""
    return [(line["event"], line["log_level"]) for line in lines]


def test_every_event_has_a_name() -> None:
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type)]
    defined = {k for k in kinds if issubclass(k, events.Event) and not k.__subclasses__()}

    assert defined == set(EVENT_NAMES)
    assert len(EVENT_NAMES) == len(set(EVENT_NAMES.values()))


@every_driver
def test_names_and_levels(driver: Driver, clock: VirtualClock, lines: list[Any]) -> None:
    """If a retry succeeds, the wait is a WARNING, the success is INFO, and the rest is DEBUG."""
    driver.run(clock, Dependency(clock, FAIL, OK))

    assert [
        ("tarry.attempt_started", "debug"),
        ("tarry.attempt_failed", "debug"),
        ("tarry.will_wait", "warning"),
        ("tarry.waited", "debug"),
        ("tarry.attempt_started", "debug"),
        ("tarry.succeeded", "info"),
    ] == names_and_levels(lines)


def test_success_at_once_logs_only_its_start(lines: list[Any]) -> None:
    tarry.call(int, on=OSError)

    assert [("tarry.attempt_started", "debug")] == names_and_levels(lines)


@every_driver
@every_sample_call
def test_levels_and_fields_equal_the_standard_log(
    driver: Driver,
    sample: SampleCall,
    clock: VirtualClock,
    lines: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="tarry")

    sample.run(driver, clock)

    standard = [(r.levelname.lower(), r.__dict__["tarry"]) for r in caplog.records]
    written = [(line.pop("log_level"), line) for line in lines if line.pop("event")]
    assert standard == written


def test_giving_up_is_a_warning(clock: VirtualClock, lines: list[Any]) -> None:
    """Giving up is a WARNING with its reason and error."""
    payments = tarry.Downstream("payments", budget=tarry.TokenBudget(capacity=1))
    with pytest.raises(ConnectionError):
        tarry.call(Dependency(clock, FAIL).call, on=ConnectionError, downstream=payments)

    assert [("tarry.budget_empty", "debug"), ("tarry.gave_up", "warning")] == names_and_levels(
        lines
    )[2:]
    assert ("budget-empty", "ConnectionError") == (lines[-1]["reason"], lines[-1]["error"])


def test_state_change_is_a_warning(clock: VirtualClock, lines: list[Any]) -> None:
    """A state change of a breaker is a WARNING with both states."""
    reopen_breaker(clock, "payments")

    changes = [line for line in lines if line["event"] == "tarry.breaker_state_changed"]
    assert {
        "event": "tarry.breaker_state_changed",
        "log_level": "warning",
        "operation": "",
        "downstream": "payments",
        "call_id": "",
        "before": "closed",
        "after": "open",
    } == changes[0]
    assert ["open", "half-open", "open"] == [change["after"] for change in changes]


@sync_and_async_hedged_call
def test_hedges_are_logged(make_hedged_call: Callable[[], None], lines: list[Any]) -> None:
    """Hedges that are sent and hedges that win are logged."""
    make_hedged_call()

    assert [
        ("tarry.hedge_fired", "debug"),
        ("tarry.hedge_won", "debug"),
        ("tarry.succeeded", "info"),
    ] == names_and_levels(lines)


@in_tasks_and_threads
def test_concurrent_calls(make_calls: ConcurrentCaller, lines: list[Any]) -> None:
    """The lines of each concurrent call are complete and in order."""
    make_calls(context_of=lambda _: nullcontext())

    for number in range(CALL_COUNT):
        names = [line["event"] for line in lines if line["operation"] == f"op{number}"]
        failed = ["tarry.attempt_failed", "tarry.will_wait", "tarry.waited"]
        success = ["tarry.succeeded"] if number % 3 else []
        retries = [*failed, "tarry.attempt_started"] * (number % 3)
        assert ["tarry.attempt_started", *retries, *success] == names


def test_bound_values_of_the_logger(clock: VirtualClock) -> None:
    """Values bound to the given logger are on each line."""
    logger = structlog.get_logger().bind(service="shop")

    with capture_logs() as lines, listening(StructlogListener(logger)):
        tarry.call(Dependency(clock, FAIL, OK).call, on=ConnectionError)

    assert {"shop"} == {line["service"] for line in lines}


def test_structlog_may_be_configured_later(clock: VirtualClock) -> None:
    """The program may configure structlog after the listener was created."""
    received: list[Any] = []

    def drop(_logger: Any, _method: str, line: Any) -> Any:
        received.append(line["event"])
        raise structlog.DropEvent

    with listening(StructlogListener()):
        structlog.configure(processors=[drop])
        try:
            tarry.call(int, on=OSError)
        finally:
            structlog.reset_defaults()

    assert ["tarry.attempt_started"] == received


@every_driver
def test_processor_that_raises(
    driver: Driver, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of a processor does not fail the call, and is logged."""

    def broken(*_: object) -> str:
        raise RuntimeError("a bug in a processor")

    logger = structlog.wrap_logger(structlog.PrintLogger(), processors=[broken])

    with listening(StructlogListener(logger)):
        assert "done" == driver.run(clock, Dependency(clock, FAIL, OK))

    assert 6 == sum(record.levelno == logging.ERROR for record in caplog.records)
    assert "a bug in a processor" in caplog.text
