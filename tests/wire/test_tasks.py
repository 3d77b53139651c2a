from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from tarry.service.model import Status
from tarry.wire.policies import JSON_FIELDS, SERVICE_PRESETS, json_choices, policy_to_json
from tarry.wire.tasks import (
    BackoffType,
    JitterType,
    KeyFormatName,
    Page,
    RetryPolicy,
    RetryTask,
    RetryTaskRequest,
    ServiceEvent,
    StatusName,
)

TASK = RetryTask(
    task_id="i",
    status="PENDING",
    reason=None,
    idempotency_key="k",
    target_url="https://a/",
    method="POST",
    headers={"X-A": "b"},
    policy_id="default",
    policy_version=None,
    policy=None,
    lane="https:a:443",
    attempt_number=0,
    next_attempt_at=5,
    created_at=4,
    finished_at=None,
    body_size=0,
    body_ref=None,
    callback_url=None,
    callback_policy_id=None,
    cancelling=False,
    replays=0,
    version=0,
)


def test_unset_fields_are_not_sent() -> None:
    """A request for a new task contains only the fields that are set."""
    assert b'{"targetUrl":"https://a/"}' == msgspec.json.encode(
        RetryTaskRequest(target_url="https://a/")
    )


def test_a_body_is_kept_as_it_was_written() -> None:
    """A JSON body is encoded and decoded byte for byte, so that numbers keep their precision."""
    raw = b'{"n": 1.10, "big": 123456789012345678901234567890}'
    request = RetryTaskRequest(target_url="https://a/", body=msgspec.Raw(raw))
    decoded = msgspec.json.decode(msgspec.json.encode(request), type=RetryTaskRequest)
    assert raw == bytes(decoded.body)  # type: ignore[arg-type]


def test_an_unknown_field_is_rejected() -> None:
    """A request with a misspelled field name is rejected."""
    with pytest.raises(msgspec.ValidationError, match="unknown field `delay`"):
        msgspec.json.decode(b'{"targetUrl": "https://a/", "delay": 5}', type=RetryTaskRequest)


def test_page_of_tasks_round_trip() -> None:
    """An encoded page of tasks has JSON names and is decoded to an equal page."""
    page = Page(items=[TASK], next_cursor="c")
    encoded = msgspec.json.encode(page)
    assert page == msgspec.json.decode(encoded, type=Page[RetryTask])
    assert b'"nextCursor":"c"' in encoded
    assert b'"attemptNumber":0' in encoded


def test_service_event_round_trip() -> None:
    """An encoded event omits unset fields and is decoded to an equal event."""
    event = ServiceEvent(kind="parked", at=5, lane="http:a:80")
    encoded = msgspec.json.encode(event)
    assert b'{"kind":"parked","at":5,"lane":"http:a:80"}' == encoded
    assert event == msgspec.json.decode(encoded, type=ServiceEvent)


def test_unknown_fields_in_a_response_are_ignored() -> None:
    """A client ignores response fields that a later version of the service adds."""
    encoded = msgspec.json.encode(msgspec.to_builtins(TASK) | {"newField": 1})
    assert TASK == msgspec.json.decode(encoded, type=RetryTask)


def test_names_of_statuses() -> None:
    """StatusName has the names of all statuses of the service."""
    assert {status.name for status in Status} == set(get_args(StatusName))


@pytest.mark.parametrize("name", sorted(SERVICE_PRESETS))
def test_presets_are_valid_policy_responses(name: str) -> None:
    """The JSON of every preset can be converted to RetryPolicy and back without loss."""
    fields = policy_to_json(SERVICE_PRESETS[name])
    document = {"policyId": name, "version": None, "createdAt": None, **fields}
    policy = msgspec.convert(document, RetryPolicy)
    assert document == msgspec.to_builtins(policy)


def test_policy_response_has_every_field_that_can_be_set() -> None:
    fields = set(RetryPolicy.__struct_encode_fields__)
    assert {*JSON_FIELDS, "policyId", "version", "createdAt"} == fields


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("backoffType", BackoffType),
        ("jitterType", JitterType),
        ("idempotencyKeyFormat", KeyFormatName),
    ],
)
def test_choices_of_policy_fields(field: str, names: object) -> None:
    """The literal type of a field has exactly the names that the field accepts."""
    assert sorted(get_args(names)) == sorted(json_choices(JSON_FIELDS[field]))
