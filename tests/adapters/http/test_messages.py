"""Functions for requests and responses that the HTTP adapters share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tarry
from tarry import Kind, Policy, Reason
from tarry.adapters.http.messages import (
    RequestSnapshot,
    add_not_repeatable_note,
    check_idempotency_key,
    classify_status,
    is_worth_draining,
    limit_by_deadline,
    make_response_classifier,
    set_attempt_headers,
    try_make_repeatable,
)
from tarry.testing import VirtualClock


def snapshot(_request: object) -> RequestSnapshot:
    """Return a snapshot of a POST."""
    return RequestSnapshot("POST", "https://pay.example/charges", [], b"10 EUR")


# --- idempotency keys -----------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "auto", lambda _: "8e03"])
def test_valid_idempotency_key(key: Any) -> None:
    """None, "auto" and a function are valid values of `idempotency_key`."""
    assert key is check_idempotency_key(key)


@pytest.mark.parametrize("key", ["8e03", "", 7, b"auto"])
def test_invalid_idempotency_key_raises(key: Any) -> None:
    """Any other value raises, in particular a string: all requests would have the same key."""
    with pytest.raises(tarry.ConfigurationError, match=r"^idempotency_key must be \"auto\""):
        check_idempotency_key(key)


@pytest.mark.parametrize(
    ("method", "key", "headers", "repeatable", "expected"),
    [
        ("POST", None, {}, False, None),
        ("POST", lambda request: request, {}, True, "the request"),
        ("POST", lambda _: None, {}, False, None),
        ("POST", "auto", {"Idempotency-Key": "mine"}, True, "mine"),
        ("POST", None, {"Idempotency-Key": "mine"}, True, "mine"),
        ("POST", None, {"Idempotency-Key": ""}, False, ""),
        ("POST", lambda _: "a", {"Idempotency-Key": ""}, True, "a"),
        ("POST", lambda _: '"a"', {}, True, '"a"'),
        ("GET", "auto", {}, True, None),
        ("PUT", None, {}, True, None),
        ("get", None, {}, True, None),
    ],
)
def test_key_is_added_if_needed(
    method: str, key: Any, headers: dict[str, str], repeatable: bool, expected: str | None
) -> None:
    """A request that is not idempotent gets the key of `idempotency_key`, unless it has one."""
    policy = tarry.Policy()
    assert repeatable == try_make_repeatable(method, headers, key, policy, "the request", snapshot)
    assert expected == headers.get("Idempotency-Key")


def test_policy_sets_header_and_format_of_the_key() -> None:
    """The policy names the header of the key, and can add quotes."""
    policy = tarry.Policy(idempotency_key_header="X-Key", idempotency_key_format="quoted")
    headers: dict[str, str] = {"Idempotency-Key": "other"}

    assert try_make_repeatable("POST", headers, lambda _: "a", policy, None, snapshot)
    assert {"Idempotency-Key": "other", "X-Key": '"a"'} == headers


def test_automatic_keys_differ() -> None:
    """Two requests get different automatic keys."""
    all_headers: list[dict[str, str]] = [{}, {}]
    for headers in all_headers:
        try_make_repeatable("POST", headers, "auto", tarry.Policy(), None, snapshot)

    first, second = (headers["Idempotency-Key"] for headers in all_headers)
    assert first != second


# --- headers of attempts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "remaining", "expected"),
    [(None, None, None), (2.0, None, 2.0), (None, 3.0, 3.0), (2.0, 3.0, 2.0), (4.0, 3.0, 3.0)],
)
def test_limit_by_deadline(
    limit: float | None, remaining: float | None, expected: float | None
) -> None:
    """The limit is the attempt timeout or the remaining time, whichever is less."""
    with VirtualClock(start=0.0):
        if remaining is None:
            actual = limit_by_deadline(limit)
        else:
            with tarry.deadline(remaining):
                actual = limit_by_deadline(limit)

    assert expected == actual


def test_deadline_in_the_past() -> None:
    """A deadline in the past gives a limit of 0, not None."""
    with VirtualClock(), tarry.deadline(0):
        assert 0.0 == limit_by_deadline(None)


@pytest.mark.parametrize(
    ("attempt", "limit", "expected"),
    [
        (1, None, {}),
        (2, None, {"X-Retry-Attempt": "2"}),
        (1, 0.0, {"X-Deadline-Ms": "0"}),
        (11, 1.5, {"X-Retry-Attempt": "11", "X-Deadline-Ms": "1500"}),
    ],
)
def test_attempt_headers(attempt: int, limit: float | None, expected: dict[str, str]) -> None:
    """Later attempts have their number in a header; attempts with a time limit have a deadline."""
    headers: dict[str, str] = {}

    set_attempt_headers(headers, attempt, limit)

    assert expected == headers


# --- responses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, Kind.SUCCESS),
        (202, Kind.TRANSIENT),
        (304, Kind.SUCCESS),
        (404, Kind.PERMANENT),
        (503, Kind.TRANSIENT),
    ],
)
def test_responses_are_classified_by_the_policy(status: int, kind: Kind) -> None:
    """The retryable statuses of the policy are transient, even a 202."""
    policy = Policy(retryable_statuses={202, 503})
    response = SimpleNamespace(status_code=status, headers={})

    classify = make_response_classifier(lambda response: response.headers)
    assert kind is classify(policy, True, response).kind
    assert kind is classify_status(status, {}, policy, repeatable=True).kind


@pytest.mark.parametrize(
    ("content_length", "expected"),
    [
        (None, True),
        ("0", True),
        ("65536", True),
        ("65537", False),
        ("9" * 5000, False),
        ("-1", False),
        ("many", False),
        ("", False),
        ("²", False),
    ],
)
def test_is_worth_draining(content_length: str | None, expected: bool) -> None:
    """A response is drained if its Content-Length is missing, or valid and at most 65,536."""
    headers = {} if content_length is None else {"Content-Length": content_length}

    assert expected == is_worth_draining(headers)


# --- notes ----------------------------------------------------------------------------------------


def failed_call_error(*, repeatable: bool) -> ConnectionError:
    """Return the error of a call that was given up after one attempt."""

    def fail() -> None:
        raise ConnectionError

    def classify(_: Exception) -> tarry.Outcome:
        return tarry.Outcome(Kind.TRANSIENT, repeatable=repeatable)

    with pytest.raises(ConnectionError) as caught:
        tarry.call(fail, on=classify, attempts=1, name="op")
    return caught.value


@pytest.mark.parametrize(
    ("can_resend_body", "expected_note"),
    [(True, "its method is not idempotent"), (False, "its body cannot be sent a second time")],
)
def test_not_repeatable_note(can_resend_body: bool, expected_note: str) -> None:
    """The note that explains why the call was not retried is added only once."""
    error = failed_call_error(repeatable=False)

    for _ in range(2):
        add_not_repeatable_note(error, can_resend_body=can_resend_body)

    assert 2 == len(error.__notes__)
    assert expected_note in error.__notes__[-1]


@pytest.mark.parametrize(
    "error",
    [ValueError(), failed_call_error(repeatable=True)],
    ids=["error without a record", "attempts exhausted"],
)
def test_other_errors_get_no_note(error: Exception) -> None:
    """An error with another reason, or without a record, stays unchanged."""
    before = list(getattr(error, "__notes__", []))

    add_not_repeatable_note(error, can_resend_body=True)

    assert before == getattr(error, "__notes__", [])
    record = tarry.record_of(error)
    assert record is None or Reason.NOT_REPEATABLE != record.reason
