"""The standard log: the fields of every event, and warnings without configuration."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import tarry
from tarry import Downstream, Hint, Kind, Outcome
from tarry.testing import VirtualClock, scripted_random


@pytest.fixture(autouse=True)
def clock() -> Iterator[VirtualClock]:
    """Virtual time and random numbers of 0.5."""
    with VirtualClock() as clock, scripted_random([0.5]):
        yield clock


@pytest.fixture(autouse=True)
def _log_every_level(caplog: pytest.LogCaptureFixture) -> None:
    """Enable every log level."""
    caplog.set_level(logging.DEBUG, logger="tarry")


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a log record, except those that differ from run to run."""
    log_fields: dict[str, Any] = record.__dict__["tarry"]
    return {name: log_fields[name] for name in log_fields if name not in ("call_id", "duration")}


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the records that are shown without configuration."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def make_call(*results: object, **options: Any) -> None:
    """Make a call whose attempts raise these errors or return these results."""
    remaining = iter(results)

    def work() -> object:
        result = next(remaining)
        if isinstance(result, Exception):
            raise result
        return result

    arguments: dict[str, Any] = {"on": ConnectionError, "name": "load"} | options
    tarry.call(work, **arguments)


def test_wait_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A wait is logged as a warning with the operation, retry number, ceiling, delay and error."""
    make_call(ConnectionError("unreachable"), ConnectionError("unreachable"), "done", attempts=6)

    first, second = warnings(caplog)
    assert ("tarry", logging.WARNING) == (second.name, second.levelno)
    assert (
        "load: ConnectionError: unreachable; retry 1 of 5 in 50 ms (ceiling 100 ms)"
        == first.getMessage()
    )
    assert (
        "load: ConnectionError: unreachable; retry 2 of 5 in 100 ms (ceiling 200 ms)"
        == second.getMessage()
    )
    assert {
        "operation": "load",
        "downstream": None,
        "retry": 2,
        "max_retries": 5,
        "ceiling": 0.2,
        "delay": 0.1,
        "hint": None,
        "error": "ConnectionError",
        "detail": "ConnectionError",
    } == fields(second)


def test_time_slept(caplog: pytest.LogCaptureFixture) -> None:
    """After a wait, its actual duration is logged at DEBUG with all its fields."""
    make_call(ConnectionError("unreachable"), "done")

    [slept] = [record for record in caplog.records if "slept" in fields(record)]
    assert logging.DEBUG == slept.levelno
    assert "load: slept 50 ms (delay 50 ms)" == slept.getMessage()
    [wait] = warnings(caplog)
    assert fields(wait) | {"slept": pytest.approx(0.05)} == fields(slept)


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (Hint(3.0, source="retry-after"), "3.5 s (ceiling 1 s, the server asked for 3 s"),
        (Hint(0.0, source="retry-after"), "500 ms (ceiling 1 s, the server asked for 0 ms"),
        (
            Hint(should_retry=True, source="retry-after"),
            "500 ms (ceiling 1 s, the server asked for a retry",
        ),
    ],
)
def test_hint_is_logged(caplog: pytest.LogCaptureFixture, hint: Hint, expected: str) -> None:
    """The server's hint and the actual wait are logged separately."""
    outcome = Outcome(Kind.THROTTLED, hint)

    make_call(ConnectionError("busy"), "done", on=lambda _: outcome)

    assert (f"load: ConnectionError: busy; retry 1 of 3 in {expected} (retry-after))") == warnings(
        caplog
    )[0].getMessage()
    assert hint._asdict() == fields(warnings(caplog)[0])["hint"]


def test_detail_of_an_outcome(caplog: pytest.LogCaptureFixture) -> None:
    """The detail of an outcome is in the message and in a field of every event with an error."""
    outcome = Outcome(Kind.TRANSIENT, detail="503")
    with pytest.raises(ConnectionError):
        make_call(*[ConnectionError("busy")] * 2, on=lambda _: outcome, attempts=2)

    wait, gave_up = warnings(caplog)
    assert wait.getMessage().startswith("load: 503: busy; retry 1 of 1 in ")
    assert gave_up.getMessage().endswith(": no attempts left (503: busy)")
    logged = [fields(record) for record in caplog.records if "error" in fields(record)]
    assert [("ConnectionError", "503")] * 5 == [
        (log_fields["error"], log_fields["detail"]) for log_fields in logged
    ]


def test_every_field_of_an_attempt(caplog: pytest.LogCaptureFixture) -> None:
    """Every record has operation and downstream; records of attempts have max_attempts too."""
    make_call(ConnectionError("unreachable"), "done", downstream=Downstream("payments"))

    first, failed, *_, last = (fields(record) for record in caplog.records)
    common_fields = {"operation": "load", "downstream": "payments"}
    assert common_fields | {"attempt": 1, "max_attempts": 4} == first
    failure = {"kind": "transient", "error": "ConnectionError", "detail": "ConnectionError"}
    assert first | failure | {"delay": 0.05} == failed
    assert common_fields | {"attempts": 2} == last


def test_rejection_between_attempts(caplog: pytest.LogCaptureFixture) -> None:
    """A call that ends with the error of its last attempt logs the detail of that error."""
    payments = Downstream("payments", breaker=tarry.Breaker(consecutive=2, spread=0))
    outcome = Outcome(Kind.TRANSIENT, detail="503")
    with pytest.raises(ConnectionError):
        make_call(*[ConnectionError("unreachable")] * 2, on=lambda _: outcome, downstream=payments)

    gave_up = fields(warnings(caplog)[-1])
    assert ("breaker-open", "503") == (gave_up["reason"], gave_up["detail"])
    caplog.clear()
    with pytest.raises(tarry.BreakerOpen):
        make_call("never", downstream=payments)
    assert "BreakerOpen" == fields(caplog.records[-1])["detail"]


def test_success_after_retries(caplog: pytest.LogCaptureFixture) -> None:
    """A success after retries is logged at INFO."""
    make_call(ConnectionError("unreachable"), "done")

    last = caplog.records[-1]
    assert logging.INFO == last.levelno
    assert "load: succeeded on attempt 2" == last.getMessage()
    assert ("load", 2) == (fields(last)["operation"], fields(last)["attempts"])


def test_success_at_once_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A call that succeeds at once is not logged."""
    make_call("done")

    assert [] == caplog.records


def test_giving_up_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A call that gives up is logged as a warning with its reason."""
    with pytest.raises(ConnectionError):
        make_call(ConnectionError("unreachable"), ConnectionError("gone"), attempts=2)

    last = caplog.records[-1]
    assert logging.WARNING == last.levelno
    assert (
        "load: gave up after 2 attempts: no attempts left (ConnectionError: gone)"
        == last.getMessage()
    )
    assert {
        "operation": "load",
        "downstream": None,
        "attempts": 2,
        "reason": "attempts",
        "waited": 0.05,
        "retry_after": None,
        "error": "ConnectionError",
        "detail": "ConnectionError",
    } == {name: value for name, value in fields(last).items() if name != "hint"}


def test_giving_up_at_a_hint(caplog: pytest.LogCaptureFixture) -> None:
    """A hint that ends the call is logged as the seconds to wait."""
    hint = Hint(600.0, source="retry-after")
    with pytest.raises(ConnectionError):
        make_call(ConnectionError("busy"), on=lambda _: Outcome(Kind.TRANSIENT, hint))

    last = fields(caplog.records[-1])
    assert ("hint-too-long", 600.0) == (last["reason"], last["retry_after"])


def test_one_attempt_is_singular(caplog: pytest.LogCaptureFixture) -> None:
    """The message says "1 attempt" and not "1 attempts"."""
    with pytest.raises(ValueError, match="bad"):
        make_call(ValueError("bad"))

    assert (
        "load: gave up after 1 attempt: the error is not retryable (ValueError: bad)"
    ) == caplog.records[-1].getMessage()


def test_state_change_of_a_breaker(caplog: pytest.LogCaptureFixture) -> None:
    """A state change of a breaker is logged as a warning with both states."""
    payments = Downstream("payments", breaker=tarry.Breaker(consecutive=1))
    with pytest.raises(ConnectionError):
        make_call(ConnectionError("unreachable"), downstream=payments)

    [state_change] = [record for record in warnings(caplog) if "before" in fields(record)]
    assert "payments: breaker closed -> open" == state_change.getMessage()
    assert {
        "operation": "",  # a breaker belongs to all operations
        "downstream": "payments",
        "before": "closed",
        "after": "open",
    } == fields(state_change)


def test_empty_budget(caplog: pytest.LogCaptureFixture) -> None:
    """An empty retry budget is the reason in the warning, and has its own DEBUG line."""
    payments = Downstream("payments", budget=tarry.TokenBudget(capacity=1))
    with pytest.raises(ConnectionError):
        make_call(ConnectionError("unreachable"), downstream=payments)

    [empty] = [r for r in caplog.records if "payments: the retry budget is empty" in r.getMessage()]
    assert logging.DEBUG == empty.levelno
    assert {"operation": "load", "downstream": "payments"} == fields(empty)
    [gave_up] = warnings(caplog)
    assert (
        "load: gave up after 1 attempt: the retry budget is empty (ConnectionError: unreachable)"
        == (gave_up.getMessage())
    )


def test_rejected_call_is_not_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A call that an open breaker rejects is logged, but not as a warning."""
    payments = Downstream("payments", breaker=tarry.Breaker())
    payments.force("open")
    caplog.clear()
    with pytest.raises(tarry.BreakerOpen):
        make_call("never", downstream=payments)

    assert [] == warnings(caplog)
    assert any("the circuit breaker is open" in r.getMessage() for r in caplog.records)


def test_result_that_is_not_accepted(caplog: pytest.LogCaptureFixture) -> None:
    """A result that `until` rejects is logged as not accepted."""
    make_call(1, 2, until=lambda result: result == 2)

    first = warnings(caplog)[0]
    assert "ResultNotAccepted" == fields(first)["error"]
    assert first.getMessage().startswith("load: `until` did not accept the result; retry 1 of 3 ")


def test_the_operation_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """The operation is not repeated for errors whose text begins with it."""
    with pytest.raises(tarry.DeadlineExceeded), tarry.deadline(0):
        make_call("never")

    assert (
        "load: gave up after 0 attempts: the deadline leaves no time for another attempt "
        "(DeadlineExceeded: the deadline leaves no time for another attempt)"
    ) == caplog.records[-1].getMessage()


class RpcError(ConnectionError):
    """An error like a gRPC error: `details()` has the message, and `str` is a long text."""

    def code(self) -> str:
        """Return the status."""
        return "UNAVAILABLE"

    def details(self) -> str:
        """Return the message of the server."""
        return "unreachable"

    def __str__(self) -> str:
        return "<many lines>"


def test_error_of_grpc(caplog: pytest.LogCaptureFixture) -> None:
    """A gRPC error is logged with its code and its details."""
    outcome = tarry.outcome_of_code("UNAVAILABLE")
    make_call(RpcError(), "done", on=lambda _: outcome)

    assert (
        warnings(caplog)[0].getMessage().startswith("load: UNAVAILABLE: unreachable; retry 1 of 3 ")
    )


def test_message_of_an_error_is_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    """Line breaks in the text of an error are replaced, and a long text is cut."""
    make_call(ConnectionError("first\r\nsecond\n" + "x" * 10_000), "done")

    message = warnings(caplog)[0].getMessage()
    assert "first second" in message
    assert 1 == len(message.splitlines())
    assert len(message) < 400


def test_message_with_percent_signs(caplog: pytest.LogCaptureFixture) -> None:
    """An error with percent signs is logged unchanged."""
    make_call(ConnectionError("100 %s %d"), "done")

    assert "100 %s %d" in warnings(caplog)[0].getMessage()


def test_terminal_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    """Control characters in the text of an error are replaced."""
    make_call(ConnectionError("\x1b[2J\x07cleared"), "done")

    message = warnings(caplog)[0].getMessage()
    assert "cleared" in message
    assert message.isprintable()


def test_error_without_a_message(caplog: pytest.LogCaptureFixture) -> None:
    """An error without text is logged by its type."""
    make_call(ConnectionError(), "done")

    assert warnings(caplog)[0].getMessage().startswith("load: ConnectionError; retry 1 of 3")


def test_error_whose_str_raises(caplog: pytest.LogCaptureFixture) -> None:
    """An error whose `__str__` raises is logged by its type and does not fail the call."""

    class Broken(ConnectionError):
        def __str__(self) -> str:
            raise RuntimeError

    make_call(Broken(), "done")

    assert warnings(caplog)[0].getMessage().startswith("load: Broken")


@pytest.mark.parametrize("has_downstream", [False, True], ids=["no downstream", "downstream"])
def test_starts_and_failures(caplog: pytest.LogCaptureFixture, has_downstream: bool) -> None:
    """At DEBUG, the start and the failure of each attempt are logged."""
    downstream = Downstream("payments") if has_downstream else None

    make_call(ConnectionError("unreachable"), "done", downstream=downstream)

    messages = [record.getMessage() for record in caplog.records]
    assert "load: attempt 1 failed (transient)" in messages
    assert ["load: attempt 1 starts", "load: attempt 2 starts"] == [
        message for message in messages if message.endswith("starts")
    ]


def test_hedges_are_logged(caplog: pytest.LogCaptureFixture, clock: VirtualClock) -> None:
    """At DEBUG, sent and winning copies are logged."""
    sent = []

    async def read() -> None:
        sent.append(1)
        await asyncio.sleep(10 / len(sent))

    clock.run(lambda: tarry.hedge(read, after=1, name="load"))

    messages = [record.getMessage() for record in caplog.records]
    expected = ["load: hedge started (attempt 2)", "load: hedge won (attempt 2)"]
    assert expected == messages[:2]


@pytest.mark.parametrize("level", [logging.ERROR, logging.CRITICAL])
def test_nothing_is_logged_above_the_level_warning(
    caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level, logger="tarry")

    make_call(ConnectionError("unreachable"), "done")

    assert [] == caplog.records


# --- programs without logging configuration -------------------------------------------------------

PROGRAM = """
import tarry

calls = []

@tarry.retry(on=ConnectionError, policy=tarry.Policy(initial_delay=0.001, max_delay=0.001))
def load():
    calls.append(1)
    if len(calls) < 3:
        raise ConnectionError("refused")

{before}
load()
"""


def stderr_of(before: str = "") -> list[str]:
    """Run a program with two failures after the code `before`; return its standard error."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM.format(before=before)],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stderr.splitlines()


def test_warnings_are_printed_without_configuration() -> None:
    """Without logging configuration, warnings are printed to standard error."""
    first, second = stderr_of()

    assert first.startswith("load: ConnectionError: refused; retry 1 of 3 in ")
    assert second.startswith("load: ConnectionError: refused; retry 2 of 3 in ")


def test_logging_configuration_of_the_program_applies() -> None:
    """A program that configures logging gets the lines in its format and level."""
    configure = "import logging; logging.basicConfig(level='INFO', format='%(name)s %(levelname)s')"

    assert ["tarry WARNING", "tarry WARNING", "tarry INFO"] == stderr_of(configure)


def test_log_can_be_turned_off() -> None:
    """Setting the level of the logger `tarry` turns the log off."""
    assert [] == stderr_of("import logging; logging.getLogger('tarry').setLevel('ERROR')")


ADAPTERS = {
    "httpx": """
import httpx
from tarry.adapters.httpx import RetryTransport

httpx.Client(transport=RetryTransport()).get({url!r})
""",
    "requests": """
import requests
from tarry.adapters.requests import RetryAdapter

session = requests.Session()
session.mount("http://", RetryAdapter())
session.get({url!r})
""",
    "aiohttp": """
import aiohttp, asyncio
from tarry.adapters.aiohttp import RetryMiddleware

async def main():
    async with aiohttp.ClientSession(middlewares=(RetryMiddleware(),)) as session:
        await session.get({url!r})

asyncio.run(main())
""",
    "grpc": """
import grpc
from tarry.adapters.grpc import RetryInterceptor

channel = grpc.intercept_channel(grpc.insecure_channel({target!r}), RetryInterceptor())
channel.unary_unary("/shop.Payments/Charge")(b"")
""",
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_log_retries(adapter: str) -> None:
    """A program that imports only an adapter of tarry gets the log lines of retries."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        program = ADAPTERS[adapter].format(url=f"http://{target}", target=target)
        done = subprocess.run(
            [sys.executable, "-I", "-c", program], check=False, capture_output=True, text=True
        )

    for line in ("; retry 1 of 3 in ", "; retry 3 of 3 in ", "gave up after 4 attempts"):
        assert line in done.stderr


def test_a_listener_does_not_disable_the_log() -> None:
    """A listener added before the first failure does not disable the log."""
    assert 2 == len(stderr_of("tarry.listen(lambda event: None)"))


def test_logging_is_not_imported_before_it_is_needed() -> None:
    """A program whose calls succeed does not import the logging module."""
    program = """
import sys, tarry

tarry.call(lambda: 1, on=ConnectionError)
assert "logging" not in sys.modules
"""

    subprocess.run([sys.executable, "-I", "-c", program], check=True)
