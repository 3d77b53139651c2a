"""Tests for the classification of statuses, codes and exceptions, and should-retry headers."""

from __future__ import annotations

import errno
import socket
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.budget import TokenBudget
from tarry.core.hints import Hint
from tarry.core.outcome import (
    GRPC_CODES,
    PERMANENT,
    RETRYABLE_CODES,
    RETRYABLE_STATUSES,
    SUCCESS,
    TRANSIENT,
    Kind,
    Outcome,
    outcome_of_code,
    outcome_of_exception,
    outcome_of_status,
)
from tarry.core.policy import Policy

NOW = 784_111_777.0  # 6 November 1994, 08:49:37
PUSHBACK = "grpc-retry-pushback-ms"


def of_status(status: int, **headers: str) -> Outcome:
    """Classify a response; underscores stand for hyphens."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return outcome_of_status(status, fields, now=NOW)


# --- what an outcome is --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        (Kind.SUCCESS, False),
        (Kind.TRANSIENT, True),
        (Kind.THROTTLED, True),
        (Kind.OVERLOADED, True),
        (Kind.PERMANENT, False),
    ],
)
def test_what_counts_against_the_breaker(kind: Kind, counts: bool) -> None:
    """Every failure except a permanent one counts against the dependency."""
    assert counts == Outcome(kind).counts_as_failure


def test_what_failed_on_our_side_does_not_count() -> None:
    """A local failure does not count against the dependency."""
    assert not Outcome(Kind.TRANSIENT, local=True).counts_as_failure


def test_each_class_has_its_own_base_delay_and_cost() -> None:
    """Throttling has a longer initial delay than a transient failure, and its own price."""
    policy, budget = Policy(), TokenBudget("aws-2026")
    assert (0.1, 1.0) == (policy.ceiling(1), policy.ceiling(1, throttled=True))
    assert (14, 5) == (budget.cost(Outcome(Kind.TRANSIENT)), budget.cost(Outcome(Kind.THROTTLED)))


def test_outcomes_are_values() -> None:
    """An outcome cannot be changed, has no further attributes, and is equal to its like."""
    outcome = Outcome(Kind.TRANSIENT, Hint(1.0), detail="503")
    with pytest.raises(AttributeError):
        outcome.repeatable = False
    assert not hasattr(outcome, "__dict__")
    assert {outcome} == {Outcome(Kind.TRANSIENT, Hint(1.0), detail="503")}


def test_plain_outcomes() -> None:
    """An outcome of which only the class is known is safe, has no hint and was not retried."""
    for kind, outcome in (
        (Kind.SUCCESS, SUCCESS),
        (Kind.TRANSIENT, TRANSIENT),
        (Kind.PERMANENT, PERMANENT),
    ):
        plain = Outcome(kind, None, repeatable=True, retried_below=False, timeout=False, detail="")
        assert plain == outcome


# --- HTTP ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [100, 200, 201, 202, 204, 206, 301, 302, 304, 307, 399])
def test_statuses_that_are_no_errors(status: int) -> None:
    """Everything below 400 is a success, whatever its headers say."""
    assert SUCCESS is of_status(status, retry_after="5", x_should_retry="false")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, Kind.TRANSIENT) for status in (408, 425, 500, 502, 503, 504)),
        (429, Kind.THROTTLED),
        *((status, Kind.PERMANENT) for status in (400, 401, 403, 404, 405, 409, 410, 422, 451)),
        *((status, Kind.PERMANENT) for status in (501, 505, 511, 599)),
    ],
)
def test_statuses(status: int, kind: Kind) -> None:
    """The retryable statuses are transient, 429 is throttled, and the others are permanent."""
    timeout = status in {408, 504}
    assert Outcome(kind, timeout=timeout, detail=str(status)) == of_status(status)
    assert (kind is not Kind.PERMANENT) == (status in RETRYABLE_STATUSES)


@given(st.integers(400, 599), st.frozensets(st.integers(400, 599), max_size=5))
def test_the_table_of_statuses_is_the_policys(status: int, retryable: frozenset[int]) -> None:
    """With a custom table exactly its statuses are retried."""
    outcome = outcome_of_status(status, now=NOW, retryable=retryable)
    expected = Kind.THROTTLED if status == 429 else Kind.TRANSIENT
    assert (expected if status in retryable else Kind.PERMANENT) is outcome.kind


def test_every_status_that_a_policy_takes_is_retried() -> None:
    """A policy that lists 202 retries it, so that polling until 200 needs no code."""
    retryable = Policy(retryable_statuses=frozenset({202})).retryable_statuses
    assert Kind.TRANSIENT is outcome_of_status(202, now=NOW, retryable=retryable).kind


@pytest.mark.parametrize(
    ("status", "reported", "kind"),
    [
        (400, "true", Kind.TRANSIENT),
        (404, "true", Kind.TRANSIENT),
        (501, "true", Kind.TRANSIENT),
        (503, "true", Kind.TRANSIENT),
        (429, "true", Kind.THROTTLED),
        (503, "false", Kind.OVERLOADED),
        (429, "false", Kind.OVERLOADED),
        (400, "false", Kind.PERMANENT),
        (404, "false", Kind.PERMANENT),
        (503, "maybe", Kind.TRANSIENT),
        (404, "", Kind.PERMANENT),
    ],
)
@pytest.mark.parametrize("field", ["x_should_retry", "stripe_should_retry"])
def test_the_server_overrides_the_table(field: str, status: int, reported: str, kind: Kind) -> None:
    """The should-retry headers override the status; a malformed one is ignored."""
    assert kind is of_status(status, **{field: reported}).kind


@pytest.mark.parametrize(
    ("field", "value", "delay"),
    [
        ("retry_after", "120", 120.0),
        ("retry_after", "Sun, 06 Nov 1994 08:51:37 GMT", 120.0),
        ("retry_after", "Sunday, 06-Nov-94 08:51:37 GMT", 120.0),
        ("retry_after", "Sun Nov  6 08:51:37 1994", 120.0),
        ("retry_after_ms", "1500", 1.5),
        ("x_ms_retry_after_ms", "1500", 1.5),
        ("ratelimit", '"default";r=0;t=30', 30.0),
    ],
)
def test_hints_are_kept(field: str, value: str, delay: float) -> None:
    """The wait that a server asks for is part of the outcome, whatever its status."""
    source = field.replace("_", "-")
    for status in (404, 429, 503):
        assert Hint(delay, source=source) == of_status(status, **{field: value}).hint


@pytest.mark.parametrize("value", ["soon", "-5", "1.5", "", "1e3", "12 Nov", "9" * 5_000 + "x"])
def test_malformed_hints_are_ignored(value: str) -> None:
    """A malformed hint does not change the outcome."""
    assert of_status(503) == of_status(503, retry_after=value)


def test_headers_as_pairs() -> None:
    """Headers may come as pairs, in any case."""
    outcome = outcome_of_status(503, [("Retry-After", "7")], now=NOW)
    assert Hint(7.0, source="retry-after") == outcome.hint


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_response_proves_that_the_request_was_read(repeatable: bool) -> None:
    """The caller decides whether a received request can be repeated."""
    assert repeatable == outcome_of_status(503, now=NOW, repeatable=repeatable).repeatable
    assert repeatable == outcome_of_code("UNAVAILABLE", repeatable=repeatable).repeatable


# --- gRPC ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "name"), list(enumerate(GRPC_CODES)))
def test_codes(number: int, name: str) -> None:
    """UNAVAILABLE is transient, RESOURCE_EXHAUSTED throttled, OK a success, the rest permanent."""
    kinds = {"UNAVAILABLE": Kind.TRANSIENT, "RESOURCE_EXHAUSTED": Kind.THROTTLED}
    timeout = name == "DEADLINE_EXCEEDED"
    failure = Outcome(kinds.get(name, Kind.PERMANENT), timeout=timeout, detail=name)
    expected = SUCCESS if name == "OK" else failure
    assert [expected] * 3 == [outcome_of_code(code) for code in (number, name, name.lower())]
    assert kinds.keys() == RETRYABLE_CODES


def test_the_numbers_of_the_codes() -> None:
    """The index of a name is its number in `grpc.StatusCode`."""
    assert (17, 0, 4, 8, 14, 16) == (
        len(GRPC_CODES),
        *map(GRPC_CODES.index, ("OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")),
        *map(GRPC_CODES.index, ("UNAVAILABLE", "UNAUTHENTICATED")),
    )


@pytest.mark.parametrize("code", [-1, 17, 10**6, "NO_SUCH_CODE"])
def test_unknown_codes_are_permanent(code: str | int) -> None:
    """A code that gRPC does not have is permanent, and the log names it."""
    assert Outcome(Kind.PERMANENT, detail=str(code)) == outcome_of_code(code)


def test_a_code_of_a_string_enumeration() -> None:
    """The value of the member is the name of the code."""

    class Code(str, Enum):  # noqa: UP042 - str() of a StrEnum is its value, of this the name
        LOST = "unavailable"

    assert outcome_of_code("UNAVAILABLE") == outcome_of_code(Code.LOST)


def test_the_table_of_codes_is_the_policys() -> None:
    """With a custom table exactly its codes are retried."""
    retryable = frozenset({"ABORTED"})
    assert Kind.TRANSIENT is outcome_of_code("ABORTED", retryable=retryable).kind
    assert Kind.PERMANENT is outcome_of_code("UNAVAILABLE", retryable=retryable).kind


@pytest.mark.parametrize(
    ("code", "value", "kind"),
    [
        ("UNAVAILABLE", "250", Kind.TRANSIENT),
        ("RESOURCE_EXHAUSTED", "250", Kind.THROTTLED),
        ("INTERNAL", "250", Kind.PERMANENT),  # a pushback does not make a code retryable
        ("UNAVAILABLE", "-1", Kind.OVERLOADED),
        ("UNAVAILABLE", "soon", Kind.OVERLOADED),
        ("RESOURCE_EXHAUSTED", "", Kind.OVERLOADED),
    ],
)
def test_pushback(code: str, value: str, kind: Kind) -> None:
    """A pushback gives an exact delay; a negative or unreadable one means never (gRFC A6)."""
    outcome = outcome_of_code(code, [(PUSHBACK, value)])
    reported = Hint(0.25, exact=True) if value == "250" else Hint(should_retry=False)
    assert (kind, reported._replace(source=PUSHBACK)) == (outcome.kind, outcome.hint)


@pytest.mark.parametrize("value", ["-1", "soon"])
def test_do_not_retry_counts_whatever_the_code(value: str) -> None:
    """A "do not retry" pushback is a failure of the server, also with a code that is permanent."""
    outcome = outcome_of_code("INTERNAL", [(PUSHBACK, value)])
    assert (Kind.OVERLOADED, True) == (outcome.kind, outcome.counts_as_failure)


# --- exceptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ConnectionRefusedError(), ConnectionRefusedError(111, "no")])
@pytest.mark.parametrize("repeatable", [True, False])
def test_connections_that_were_never_made(error: Exception, repeatable: bool) -> None:
    """A refused connection is safe to retry for any operation."""
    expected = Outcome(Kind.TRANSIENT, repeatable=True, detail="ConnectionRefusedError")
    assert expected == outcome_of_exception(error, repeatable=repeatable)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    ],
    ids=["host", "network", "name"],
)
def test_hosts_that_were_never_reached(error: Exception) -> None:
    """Nothing was sent to a host that cannot be reached or found."""
    outcome = outcome_of_exception(error, repeatable=False)
    assert (Kind.TRANSIENT, True) == (outcome.kind, outcome.repeatable)


@pytest.mark.parametrize(
    ("error", "timeout"),
    [
        (ConnectionResetError(), False),
        (ConnectionAbortedError(), False),
        (BrokenPipeError(), False),
        (ConnectionError(), False),
        (TimeoutError(), True),
        (OSError(errno.ETIMEDOUT, "timed out"), True),
        (OSError(errno.ECONNRESET, "reset"), False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("repeatable", [True, False])
def test_connections_that_broke(error: Exception, timeout: bool, repeatable: bool) -> None:
    """A request that may have been received is safe only if the caller says so."""
    detail = type(error).__name__
    expected = Outcome(Kind.TRANSIENT, repeatable=repeatable, timeout=timeout, detail=detail)
    assert expected == outcome_of_exception(error, repeatable=repeatable)


@pytest.mark.parametrize(
    "error", [ValueError(), KeyError("x"), OSError(), FileNotFoundError(), KeyboardInterrupt()]
)
def test_other_errors_are_permanent(error: BaseException) -> None:
    """An error that is no network error is permanent."""
    outcome = outcome_of_exception(error)
    assert Outcome(Kind.PERMANENT, detail=type(error).__name__) == outcome
