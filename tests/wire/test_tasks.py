from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from tarry.service.model import Status
from tarry.wire.policies import JSON_FIELDS, SERVICE_PRESETS, json_choices, policy_to_json
from tarry.wire.tasks import (
    BackoffType,
    JitterType,
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
    cancelling=False,
    replays=0,
    version=0,
)


def test_what_is_not_asked_for_is_not_sent() -> None:
    """A new task is as short as its caller is."""
    assert b'{"targetUrl":"https://a/"}' == msgspec.json.encode(
        RetryTaskRequest(target_url="https://a/")
    )


def test_a_body_is_kept_as_it_was_written() -> None:
    """Numbers of any size and precision pass both ends."""
    raw = b'{"n": 1.10, "big": 123456789012345678901234567890}'
    asked = RetryTaskRequest(target_url="https://a/", body=msgspec.Raw(raw))
    read = msgspec.json.decode(msgspec.json.encode(asked), type=RetryTaskRequest)
    assert raw == bytes(read.body)  # type: ignore[arg-type]


def test_an_unknown_field_is_refused() -> None:
    """A typing mistake must not be taken for a default."""
    with pytest.raises(msgspec.ValidationError, match="unknown field `delay`"):
        msgspec.json.decode(b'{"targetUrl": "https://a/", "delay": 5}', type=RetryTaskRequest)


def test_a_page_of_tasks_comes_back() -> None:
    """What the service writes, a client reads."""
    page = Page(items=[TASK], next_cursor="c")
    written = msgspec.json.encode(page)
    assert page == msgspec.json.decode(written, type=Page[RetryTask])
    assert b'"nextCursor":"c"' in written
    assert b'"attemptNumber":0' in written


def test_news_of_an_event_come_back() -> None:
    """What there is nothing to say about is left out, and read as nothing."""
    news = ServiceEvent(kind="parked", at=5, lane="http:a:80")
    written = msgspec.json.encode(news)
    assert b'{"kind":"parked","at":5,"lane":"http:a:80"}' == written
    assert news == msgspec.json.decode(written, type=ServiceEvent)


def test_a_client_of_today_reads_a_service_of_tomorrow() -> None:
    """A field that is new to it is no error in an answer."""
    written = msgspec.json.encode(msgspec.to_builtins(TASK) | {"novelty": 1})
    assert TASK == msgspec.json.decode(written, type=RetryTask)


def test_the_names_of_statuses() -> None:
    """Those of the service's own table."""
    assert {status.name for status in Status} == set(get_args(StatusName))


@pytest.mark.parametrize("name", sorted(SERVICE_PRESETS))
def test_every_preset_has_the_form_of_a_policy(name: str) -> None:
    """No field of one form is missing in the other."""
    document = policy_to_json(SERVICE_PRESETS[name])
    whole = {"policyId": name, "version": None, "createdAt": None, **document}
    read = msgspec.convert(whole, RetryPolicy)
    assert whole == msgspec.to_builtins(read)


def test_a_policy_has_every_field_that_can_be_set() -> None:
    """Every policy field that can be set is part of the response."""
    fields = set(RetryPolicy.__struct_encode_fields__)
    assert {*JSON_FIELDS, "policyId", "version", "createdAt"} == fields


@pytest.mark.parametrize(
    ("field", "names"), [("backoffType", BackoffType), ("jitterType", JitterType)]
)
def test_the_names_that_a_policy_takes(field: str, names: object) -> None:
    """All of them, and no other."""
    assert sorted(get_args(names)) == sorted(json_choices(JSON_FIELDS[field]))
