"""Tests for the classification of HTTP statuses, gRPC codes and exceptions."""

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
from tarry.errors import ConfigurationError

NOW = 784_111_777.0  # 6 November 1994, 08:49:37
PUSHBACK = "grpc-retry-pushback-ms"


def classify_status(status: int, **headers: str) -> Outcome:
    """Return the outcome of a response; underscores in header names become hyphens."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return outcome_of_status(status, fields, now=NOW)


# --- Outcome -------------------------------------------------------------------------------------


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
def test_kinds_that_count_as_failures(kind: Kind, counts: bool) -> None:
    """Every failure except a permanent one counts as a failure of the dependency."""
    assert counts == Outcome(kind).counts_as_failure


def test_throttling_has_its_own_initial_delay_and_price() -> None:
    """Throttling has a longer initial delay than a transient failure, and another price."""
    policy, budget = Policy(), TokenBudget("aws-2026")
    assert (0.1, 1.0) == (policy.ceiling(1), policy.ceiling(1, throttled=True))
    assert (14, 5) == (budget.cost(Outcome(Kind.TRANSIENT)), budget.cost(Outcome(Kind.THROTTLED)))


def test_outcomes_are_values() -> None:
    """An outcome is immutable, has no `__dict__` and is equal to an outcome with equal fields."""
    outcome = Outcome(Kind.TRANSIENT, Hint(1.0), detail="503")
    with pytest.raises(AttributeError):
        outcome.repeatable = False
    assert not hasattr(outcome, "__dict__")
    assert {outcome} == {Outcome(Kind.TRANSIENT, Hint(1.0), detail="503")}


def test_name_of_a_kind() -> None:
    """An outcome can be created with the name of its kind; another name is rejected."""
    assert Outcome(Kind.THROTTLED) == Outcome("throttled")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="kind must be one of"):
        Outcome("slow")  # type: ignore[arg-type]


def test_replaced_fields_of_an_outcome() -> None:
    """replace() returns a copy with other fields."""
    outcome = Outcome(Kind.TRANSIENT, Hint(1.0), detail="503")
    assert Outcome(Kind.TRANSIENT, Hint(1.0), detail="504") == outcome.replace(detail="504")


def test_defaults_of_outcomes() -> None:
    """By default an outcome is repeatable, has no hint and was not retried by a layer below."""
    for kind, outcome in (
        (Kind.SUCCESS, SUCCESS),
        (Kind.TRANSIENT, TRANSIENT),
        (Kind.PERMANENT, PERMANENT),
    ):
        plain = Outcome(kind, None, repeatable=True, retried_below=False, timeout=False, detail="")
        assert plain == outcome


# --- HTTP ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [100, 200, 201, 202, 204, 206, 301, 302, 304, 307, 399])
def test_successful_statuses(status: int) -> None:
    """Every status below 400 is a success, regardless of the headers."""
    assert SUCCESS is classify_status(status, retry_after="5", x_should_retry="false")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, Kind.TRANSIENT) for status in (408, 425, 500, 502, 503, 504)),
        (429, Kind.THROTTLED),
        *((status, Kind.PERMANENT) for status in (400, 401, 403, 404, 405, 409, 410, 422, 451)),
        *((status, Kind.TRANSIENT) for status in (507, 509, 512, 520, 524, 527, 530, 598, 599)),
        (529, Kind.THROTTLED),
        *((status, Kind.PERMANENT) for status in (501, 505, 506, 508, 510, 511)),
    ],
)
def test_statuses(status: int, kind: Kind) -> None:
    """The retryable statuses are transient, 429 and 529 throttled, and the others permanent."""
    timeout = status in {408, 504}
    assert Outcome(kind, timeout=timeout, detail=str(status)) == classify_status(status)
    assert (kind is not Kind.PERMANENT) == (status in RETRYABLE_STATUSES)


@given(st.integers(400, 599), st.frozensets(st.integers(400, 599), max_size=5))
def test_custom_retryable_statuses(status: int, retryable: frozenset[int]) -> None:
    """With custom retryable statuses exactly these are retryable."""
    outcome = outcome_of_status(status, now=NOW, retryable=retryable)
    expected = Kind.THROTTLED if status in {429, 529} else Kind.TRANSIENT
    assert (expected if status in retryable else Kind.PERMANENT) is outcome.kind


@pytest.mark.parametrize("status", [409, 423, 451, 507, 520, 529, 599])
def test_retry_after_of_any_retryable_status(status: int) -> None:
    """A `Retry-After` is honoured with each status that the policy retries, 4xx and 5xx."""
    outcome = outcome_of_status(status, {"Retry-After": "7"}, now=NOW, retryable={status})
    assert (True, 7.0) == (outcome.counts_as_failure, outcome.hint and outcome.hint.delay)


def test_a_successful_status_can_be_retryable() -> None:
    """A policy can list 202 as retryable, which polls until the status is another one."""
    retryable = Policy(retryable_statuses=frozenset({202})).retryable_statuses
    assert Kind.TRANSIENT is outcome_of_status(202, now=NOW, retryable=retryable).kind


@pytest.mark.parametrize(
    ("status", "should_retry", "kind"),
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
def test_should_retry_headers(field: str, status: int, should_retry: str, kind: Kind) -> None:
    """A should-retry header overrides the status; a malformed one is ignored."""
    assert kind is classify_status(status, **{field: should_retry}).kind


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
    """The outcome of every failed status contains the hint of the headers."""
    source = field.replace("_", "-")
    for status in (404, 429, 503):
        assert Hint(delay, source=source) == classify_status(status, **{field: value}).hint


def test_headers_as_pairs() -> None:
    """Headers can be pairs with names in any case."""
    outcome = outcome_of_status(503, [("Retry-After", "7")], now=NOW)
    assert Hint(7.0, source="retry-after") == outcome.hint


@pytest.mark.parametrize("repeatable", [True, False])
def test_caller_decides_whether_a_failed_response_is_repeatable(repeatable: bool) -> None:
    assert repeatable == outcome_of_status(503, now=NOW, repeatable=repeatable).repeatable
    assert repeatable == outcome_of_code("UNAVAILABLE", repeatable=repeatable).repeatable


def test_equal_responses_without_a_hint_share_an_outcome() -> None:
    """The outcome of a status is built once, unless the response has a hint."""
    assert classify_status(503) is classify_status(503)
    assert classify_status(503) is not classify_status(503, retry_after="5")
    outcomes = [outcome_of_status(503, now=NOW, repeatable=each) for each in (True, False)]
    assert [True, False] == [outcome.repeatable for outcome in outcomes]


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


def test_numbers_of_the_codes() -> None:
    """The index of a name in GRPC_CODES is its number in `grpc.StatusCode`."""
    assert (17, 0, 4, 8, 14, 16) == (
        len(GRPC_CODES),
        *map(GRPC_CODES.index, ("OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")),
        *map(GRPC_CODES.index, ("UNAVAILABLE", "UNAUTHENTICATED")),
    )


@pytest.mark.parametrize("code", [-1, 17, 10**6, "NO_SUCH_CODE"])
def test_unknown_codes_are_permanent(code: str | int) -> None:
    """A code that gRPC does not have is permanent, and the outcome has it as its detail."""
    assert Outcome(Kind.PERMANENT, detail=str(code)) == outcome_of_code(code)


def test_a_code_of_a_string_enumeration() -> None:
    """The value of a string enumeration's member is the name of the code."""

    class Code(str, Enum):  # noqa: UP042 - str() of a StrEnum is the value, of this class the name
        LOST = "unavailable"

    assert outcome_of_code("UNAVAILABLE") == outcome_of_code(Code.LOST)


def test_custom_retryable_codes() -> None:
    """With custom retryable codes exactly these are retryable."""
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
    """A pushback is an exact delay; a negative or malformed one forbids a retry (gRFC A6)."""
    outcome = outcome_of_code(code, [(PUSHBACK, value)])
    expected = (
        Hint(0.25, exact=True, source=PUSHBACK)
        if value == "250"
        else Hint(should_retry=False, source=PUSHBACK)
    )
    assert (kind, expected) == (outcome.kind, outcome.hint)


@pytest.mark.parametrize("value", ["-1", "soon"])
def test_pushback_that_forbids_a_retry_counts_as_failure(value: str) -> None:
    """A pushback that forbids a retry counts as a failure, even with a permanent code."""
    outcome = outcome_of_code("INTERNAL", [(PUSHBACK, value)])
    assert (Kind.OVERLOADED, True) == (outcome.kind, outcome.counts_as_failure)


# --- exceptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ConnectionRefusedError(), ConnectionRefusedError(111, "no")])
@pytest.mark.parametrize("repeatable", [True, False])
def test_refused_connections(error: Exception, repeatable: bool) -> None:
    """A refused connection is repeatable for any operation."""
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
def test_unreachable_hosts(error: Exception) -> None:
    """An unreachable host or a failed name resolution is repeatable, because nothing was sent."""
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
def test_lost_connections(error: Exception, timeout: bool, repeatable: bool) -> None:
    """After a lost connection `repeatable` is the argument of the caller."""
    detail = type(error).__name__
    expected = Outcome(Kind.TRANSIENT, repeatable=repeatable, timeout=timeout, detail=detail)
    assert expected == outcome_of_exception(error, repeatable=repeatable)


@pytest.mark.parametrize(
    "error", [ValueError(), KeyError("x"), OSError(), FileNotFoundError(), KeyboardInterrupt()]
)
def test_other_errors_are_permanent(error: BaseException) -> None:
    """An error that is not a network error is permanent."""
    outcome = outcome_of_exception(error)
    assert Outcome(Kind.PERMANENT, detail=type(error).__name__) == outcome
