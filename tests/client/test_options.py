"""JSON encoding of `enqueue` arguments, and invalid arguments."""

from __future__ import annotations

import json
from base64 import b64decode
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, use_span

from tarry.client.options import (
    MAX_BATCH_BYTES,
    EnqueueArguments,
    build_task_request,
    encode_batches,
    encode_task,
)
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError, ConfigurationTypeError

HOOK = "https://example.com/hook"


def request_json(**options: Any) -> Any:
    """Return the JSON of a request to add a task, decoded."""
    return json.loads(encode_task(build_task_request(HOOK, **options)))


def test_minimal_task() -> None:
    """Only the URL is required; the idempotency key is generated."""
    task = request_json()
    assert 36 == len(task.pop("idempotencyKey"))
    assert {"targetUrl": HOOK, "policyId": "default"} == task


def test_all_options() -> None:
    """Each option has its JSON field."""
    task = request_json(
        body={"a": 1},
        method="PUT",
        headers={"X-A": "b"},
        policy="webhook",
        policy_version=2,
        key="k",
        lane_key="customer-7",
        delay=1.5,
        overrides={"maxAttempts": 2},
        callback=HOOK,
        callback_policy="quick",
        prior_attempts=3,
    )
    assert {
        "targetUrl": HOOK,
        "method": "PUT",
        "headers": {"X-A": "b"},
        "body": {"a": 1},
        "policyId": "webhook",
        "policyVersion": 2,
        "idempotencyKey": "k",
        "laneKey": "customer-7",
        "delayMs": 1500,
        "policy": {"maxAttempts": 2},
        "callbackUrl": HOOK,
        "callbackPolicyId": "quick",
        "priorAttempts": 3,
    } == task
    assert "bucket/x" == request_json(body_ref="bucket/x")["bodyRef"]


def test_trace_of_the_caller() -> None:
    """In a span of OpenTelemetry, the task has the trace and the span of the caller."""
    assert "traceparent" not in request_json()
    flags, state = TraceFlags(1), TraceState([("vendor", "a"), ("other", "b")])
    with use_span(NonRecordingSpan(SpanContext(0xABC, 0xDEF, False, flags))):
        assert "tracestate" not in request_json()
    with use_span(NonRecordingSpan(SpanContext(0xABC, 0xDEF, False, flags, state))):
        assert "vendor=a,other=b" == request_json()["tracestate"]
        assert "tracestate" not in request_json(traceparent=None)
        assert "tracestate" not in request_json(traceparent="00-other")
        assert "x=y" == request_json(traceparent="00-other", tracestate="x=y")["tracestate"]
        assert f"00-{0xABC:032x}-{0xDEF:016x}-01" == request_json()["traceparent"]
        assert "traceparent" not in request_json(traceparent=None)
        assert "00-other" == request_json(traceparent="00-other")["traceparent"]


@pytest.mark.parametrize("body", ["text", "", 0, False, [1, "two", None], {"ü": 1.5}, 2**70])
def test_text_and_json_bodies(body: Any) -> None:
    """Text and JSON values, including falsy values, are sent unchanged."""
    assert body == request_json(body=body)["body"]


@pytest.mark.parametrize("body", [b"\x00\xff", b"", bytearray(b"abc")])
def test_bytes_are_sent_as_base64(body: bytes) -> None:
    task = request_json(body=body)
    assert "body" not in task
    assert body == b64decode(task["bodyBase64"])


@pytest.mark.parametrize(
    ("at", "ms"),
    [
        (1_800_000_000, 1_800_000_000_000),
        (1_800_000_000.25, 1_800_000_000_250),
        (datetime(2027, 1, 15, 8, tzinfo=UTC), 1_800_000_000_000),
        (datetime(2027, 1, 15, 9, tzinfo=timezone(timedelta(hours=1))), 1_800_000_000_000),
    ],
)
def test_times(at: Any, ms: int) -> None:
    """A time is given in seconds or as a datetime, and is sent in milliseconds."""
    assert ms == request_json(at=at)["nextAttemptAt"]


def test_delays() -> None:
    """A delay is given in seconds or as a timedelta; a delay of 0 is sent."""
    assert 5_400_000 == request_json(delay=timedelta(hours=1.5))["delayMs"]
    assert 0 == request_json(delay=0)["delayMs"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"body": {1, 2}}, "body must be text, bytes or a value that JSON can represent: .*set"),
        ({"body": float("nan")}, "body must be text, bytes or a value that JSON can represent"),
        ({"body": "\ud800"}, "body must be .*surrogates"),
        ({"headers": "X-A: b"}, "headers must be a dict, got 'X-A: b'"),
        ({"headers": {"X-A": object()}}, "the task has a value that JSON cannot represent"),
        ({"overrides": [1]}, r"overrides must be a dict, got \[1\]"),
        ({"key": ""}, "an idempotency key must be a non-empty string"),
        ({"key": "a\nb"}, "an idempotency key must be a non-empty string"),
        ({"delay": -1}, "delay must be at least 0, got -1"),
        ({"delay": "5"}, "delay must be a number, got '5'"),
        ({"delay": float("inf")}, "delay must be finite"),
        ({"at": 1_800_000_000_000}, "at must be in seconds since 1970.* milliseconds"),
        ({"at": datetime(2027, 1, 15)}, "at must have a time zone"),  # noqa: DTZ001
        ({"at": -1}, "at must be at least 0"),
        ({"delay": 1, "at": 1_800_000_000}, "at cannot be combined with delay: both set the time"),
        ({"policy": Policy()}, r"policy must be the name of a policy, got .*put_policy\(\)"),
    ],
)
def test_invalid_arguments_are_rejected(options: dict[str, Any], message: str) -> None:
    """The error for an invalid argument names it."""
    with pytest.raises(ConfigurationError, match=message):
        request_json(**options)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"url": HOOK, "delay": -1}, r"^tasks\[1\]\.delay must be at least 0"),
        (
            {"url": HOOK, "polcy": "x"},
            r"^tasks\[1\]\.polcy is not an argument of enqueue; did you mean 'policy'\?",
        ),
        (
            {"url": HOOK, "zz": 1},
            r"^tasks\[1\]\.zz is not an argument of enqueue; it has url, body, ",
        ),
        ({}, r"^tasks\[1\] must have a url"),
        (HOOK, r"^tasks\[1\] must be a dict of the arguments of enqueue"),
    ],
)
def test_invalid_batch_item_is_rejected(task: Any, message: str) -> None:
    """The error for an invalid task of a batch has its index."""
    with pytest.raises(ConfigurationError, match=message):
        list(encode_batches([{"url": HOOK}, task]))


def test_unknown_option_is_a_type_error() -> None:
    """An unknown option raises ConfigurationTypeError."""
    with pytest.raises(ConfigurationTypeError):
        list(encode_batches([{"url": HOOK, "polcy": "x"}]))  # type: ignore[typeddict-unknown-key]


def test_batch_size_is_limited() -> None:
    """Batches have a maximum size in bytes; a task that is larger is sent alone."""
    body = "x" * (MAX_BATCH_BYTES // 3)
    tasks: list[EnqueueArguments] = [{"url": HOOK, "body": body}] * 5
    batches = [
        json.loads(batch)["tasks"]
        for batch in encode_batches([*tasks, {"url": HOOK, "body": body * 4}])
    ]
    assert [2, 2, 1, 1] == [len(batch) for batch in batches]
