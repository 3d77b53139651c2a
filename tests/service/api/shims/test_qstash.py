"""The API of QStash."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import product
from typing import Any

import pytest

from tarry.service.api.problems import ApiError
from tarry.service.api.shims.qstash import (
    _HEADERS,
    _IGNORED_PREFIXES,
    _UNSUPPORTED_HEADERS,
    translate_message,
)
from tarry.wire.tasks import DownstreamLimits
from tests.service.api.harness import NOW, TARGET, ApiHarness, Response, run_with_api
from tests.test_docs import DOCS, table_of

UNKNOWN_ID = "01890000-0000-7000-8000-0000000000ff"
MINUTE_MS = 60_000


async def publish(
    api: ApiHarness,
    headers: dict[str, str] | None = None,
    destination: str = TARGET,
    body: bytes = b"{}",
) -> Response:
    """Publish a message."""
    path = f"/v2/publish/{destination}"
    return await api.request("POST", path, body=body, headers=headers)


async def publish_ok(api: ApiHarness, headers: dict[str, str] | None = None) -> str:
    """Publish a new message and return its id."""
    response = await publish(api, headers)
    assert 201 == response.status, response.body
    assert {"messageId", "deduplicated"} == response.json.keys()
    assert not response.json["deduplicated"]
    message_id: str = response.json["messageId"]
    return message_id


def fields_of(headers: dict[str, str], now_ms: int = NOW) -> dict[str, Any]:
    """Return the task fields for the headers of a message."""
    return translate_message(TARGET, headers.items(), b"", now_ms).fields


def error_for(headers: dict[str, str]) -> str:
    """Return the detail of the error for the headers of a message."""
    with pytest.raises(ApiError) as caught:
        translate_message(TARGET, headers.items(), b"", NOW)
    return caught.value.problem.detail or ""


async def test_message_becomes_a_task() -> None:
    """Method, forwarded headers, content type and body of a message are those of its task."""
    api = ApiHarness(compatibility=("qstash",))
    message_id = await publish_ok(
        api,
        {
            "Content-Type": "text/plain",
            "Upstash-Method": "PUT",
            "Upstash-Forward-X-Order": "7",
            "Upstash-Forward-Authorization": "Bearer abc",
            "Upstash-Callback": "https://example.com/done",
            "Upstash-Flow-Control-Key": "orders",
            "Upstash-Flow-Control-Value": "",
            "Upstash-Label": "ignored",
            "Upstash-Telemetry-Sdk": "ignored",
            "X-Other": "not forwarded",
        },
    )
    task, content = await api.stored_task(message_id)
    assert (TARGET, "PUT", b"{}") == (content.url, content.method, content.body)
    assert {
        "content-type": "text/plain",
        "x-order": "7",
        "authorization": "Bearer abc",
    } == content.headers
    assert ("qstash", None) == (task.policy_id, content.overrides)
    assert "https://example.com/done" == content.callback_url
    assert "default/https:example.com:443@orders" == task.lane
    assert NOW == task.next_attempt_at


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"Upstash-Delay": "10s"}, {"delayMs": 10_000}),
        ({"Upstash-Delay": "1d2h3m4s"}, {"delayMs": 93_784_000}),
        ({"Upstash-Not-Before": f"{NOW // 1000 + 60}"}, {"nextAttemptAt": NOW + 60_000}),
        ({"Upstash-Not-Before": "5"}, {}),
        (
            {"Upstash-Not-Before": f"{NOW // 1000 + 60}", "Upstash-Delay": "1s"},
            {"nextAttemptAt": NOW + 60_000},
        ),
    ],
)
def test_time_of_the_first_attempt(headers: dict[str, str], fields: dict[str, Any]) -> None:
    """Upstash-Not-Before has precedence over Upstash-Delay; a time in the past means now."""
    actual = fields_of(headers)

    assert fields == {name: actual[name] for name in ("delayMs", "nextAttemptAt") if name in actual}


@pytest.mark.parametrize(
    ("headers", "overrides"),
    [
        ({}, {}),
        ({"Upstash-Retries": "0"}, {"maxAttempts": 1}),
        ({"upstash-retries": "5"}, {"maxAttempts": 6}),
        ({"Upstash-Timeout": "90s"}, {"attemptTimeoutMs": 90_000}),
        (
            {"Upstash-Retries": "3", "Upstash-Retry-Delay": "1000 * (1 + retried)"},
            {
                "maxAttempts": 4,
                "backoffType": "SCHEDULE",
                "scheduleMs": [1000, 2000, 3000],
                "jitterType": "NONE",
            },
        ),
        (
            {"Upstash-Retry-Delay": "pow(2, retried) * 1000"},
            {"backoffType": "SCHEDULE", "scheduleMs": [1000, 2000, 4000], "jitterType": "NONE"},
        ),
        (
            {"Upstash-Retries": "0", "Upstash-Retry-Delay": "500"},
            {
                "maxAttempts": 1,
                "backoffType": "SCHEDULE",
                "scheduleMs": [500],
                "jitterType": "NONE",
            },
        ),
    ],
)
def test_retries_override_the_policy(headers: dict[str, str], overrides: dict[str, Any]) -> None:
    """Retries, their delay and the timeout are overrides of the policy `qstash`."""
    assert overrides == fields_of(headers)["policy"]


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Upstash-Delay": "10"}, "Upstash-Delay must be a duration, such as 10s, 5m, 2h"),
        ({"Upstash-Delay": ""}, "Upstash-Delay must be a duration"),
        ({"Upstash-Delay": "999999d"}, "Upstash-Delay must be at most 100 years"),
        ({"Upstash-Timeout": "5 s"}, "Upstash-Timeout must be a duration"),
        ({"Upstash-Not-Before": "soon"}, "Upstash-Not-Before must be a whole number"),
        ({"Upstash-Not-Before": f"{NOW}"}, "Upstash-Not-Before must be seconds since 1970 (are "),
        ({"Upstash-Retries": "-1"}, "Upstash-Retries must be a whole number, at least 0"),
        ({"Upstash-Retries": "100000"}, "Upstash-Retries must be less than 100000"),
        (
            {"Upstash-Retries": "101", "Upstash-Retry-Delay": "retried"},
            "Upstash-Retries must be at most 100 with Upstash-Retry-Delay",
        ),
        ({"Upstash-Retry-Delay": "x("}, "Upstash-Retry-Delay must be an expression"),
        ({"Upstash-Deduplication-Id": "x" * 201}, "Upstash-Deduplication-Id must have 1 to 200"),
        (
            {"Upstash-Content-Based-Deduplication": "yes"},
            "Upstash-Content-Based-Deduplication must be true or false, got 'yes'",
        ),
        ({"Upstash-Flow-Control-Value": "speed=1"}, "Upstash-Flow-Control-Value must consist of"),
        ({"Upstash-Flow-Control-Value": "rate=0"}, "Upstash-Flow-Control-Value must consist of"),
        (
            {"Upstash-Flow-Control-Value": "rate=1," * 30},
            "Upstash-Flow-Control-Value must have at most 200 characters",
        ),
        ({"Upstash-Flow-Control-Value": "period=x"}, "Upstash-Flow-Control-Value must be a dur"),
        ({"Upstash-Redact-Fields": "body,header"}, "Upstash-Redact-Fields must be body: headers"),
        (
            {"Upstash-Failure-Callback": "https://x"},
            "Upstash-Failure-Callback is not supported: use Upstash-Callback",
        ),
        ({"Upstash-Callback-Retries": "1"}, "Upstash-Callback-Retries is not supported: a callb"),
        ({"Upstash-Failure-Callback-Delay": "1s"}, "Upstash-Failure-Callback-Delay is not supp"),
        ({"Upstash-Cron": "* * * * *"}, "Upstash-Cron is not supported: let cron publish"),
        ({"Upstash-Retires": "1"}, "Upstash-Retires is not a known header; did you mean 'Upstash-"),
        ({"Upstash-Zzzzzzzzzz": "1"}, "Upstash-Zzzzzzzzzz is not a known header; the headers are"),
        ({"Upstash-Delay": "1s", "upstash-delay": "2s"}, "Upstash-Delay must be given only once"),
    ],
)
def test_invalid_and_unsupported_headers(headers: dict[str, str], message: str) -> None:
    """The error names the header and what to do."""
    assert error_for(headers).startswith(message)


def test_repeated_forwarded_headers_are_joined() -> None:
    """A forwarded header that is given twice has both values."""
    headers = [
        ("Upstash-Forward-Accept", "a"),
        ("upstash-forward-accept", "b"),
        ("Content-Type", "text/plain"),
        ("Upstash-Forward-Content-Type", "text/html"),
    ]

    message = translate_message(TARGET, headers, b"", NOW)

    assert {"accept": "a, b", "content-type": "text/html"} == message.fields["headers"]


async def test_body_that_the_caller_redacts_is_never_shown() -> None:
    """The beginning of other bodies is shown in the explanation of the task."""
    api = ApiHarness(compatibility=("qstash",))
    excerpts = []
    for headers in ({}, {"Upstash-Redact-Fields": "body"}):
        task_id = await publish_ok(api, headers)
        explanation = await api.request("GET", f"/retry-tasks/{task_id}/explain")
        excerpts.append(explanation.json["requestExcerpt"])
    assert ["{}", None] == excerpts


def test_number_of_headers_is_limited() -> None:
    """A message with more headers than a request may have is rejected before they are read."""
    names = map("".join, product("aA", repeat=8))
    headers = {f"Upstash-Forward-{name}": "x" for name in names}

    assert 256 == len(headers)
    assert {"a" * 8: ", ".join("x" * 256)} == fields_of(headers)["headers"]
    error = "headers must have at most 256 entries, got 257."
    assert error == error_for({**headers, "Upstash-Unknown": "x"})


async def test_headers_of_a_message_in_a_batch_are_limited() -> None:
    """The error for a message with too many headers has its index, and nothing is stored."""
    api = ApiHarness(compatibility=("qstash",))
    headers = {f"Upstash-Label-{number}": "x" for number in range(100_000)}
    batch = [{"destination": TARGET}, {"destination": TARGET, "headers": headers}]
    response = await api.request("POST", "/v2/batch", batch)
    error = "[1] headers must have at most 256 entries, got 100000."
    assert (400, {"error": error}) == (response.status, response.json)
    assert 0 == await api.count_tasks()


@pytest.mark.parametrize("name", ["Upstash-Cron", "Upstash-Unknown"])
def test_errors_show_the_beginning_of_a_long_name(name: str) -> None:
    """The response to a long name of a header is short."""
    assert len(error_for({name + "a" * 100_000: "1"})) < 1_000


@pytest.mark.parametrize(
    ("headers", "destination", "message"),
    [
        ({"Upstash-Forward-Host": "x"}, TARGET, "Upstash-Forward-host is set by the service itse"),
        ({"Upstash-Method": "CONNECT"}, TARGET, "Upstash-Method must be one of GET"),
        ({"Upstash-Callback": "x"}, TARGET, "Upstash-Callback must start with http"),
        ({"Upstash-Flow-Control-Key": "a b"}, TARGET, "Upstash-Flow-Control-Key must consist of"),
        ({"Upstash-Deduplication-Id": "é"}, TARGET, "Upstash-Deduplication-Id must be visible AS"),
        ({"Upstash-Timeout": "2m"}, TARGET, "Upstash-Timeout must be more than 0 s and at most 60"),
        ({"Upstash-Timeout": "0s"}, TARGET, "Upstash-Timeout must be more than 0 s"),
        ({}, "http://127.0.0.1/", "The destination "),
        ({}, "my-url-group", "The destination must be a URL with http:// or https://: URL groups"),
        ({}, "https:/example.com", "The destination must have two slashes after the scheme"),
    ],
)
async def test_errors_of_the_task_name_the_header(
    headers: dict[str, str], destination: str, message: str
) -> None:
    """An error that task creation finds has the status 400 and the names of QStash."""
    api = ApiHarness(compatibility=("qstash",))
    response = await publish(api, headers, destination)
    assert (400, {"error"}) == (response.status, response.json.keys())
    assert response.json["error"].startswith(message)
    assert 0 == await api.count_tasks()


@pytest.mark.parametrize(
    ("destination", "url"),
    [
        ("https://example.com/a?b=c%20d&e=f", "https://example.com/a?b=c%20d&e=f"),
        ("https://example.com/a%2Fb", "https://example.com/a%2Fb"),
        ("https%3A%2F%2Fexample.com%2Fa", "https://example.com/a"),
    ],
)
async def test_destination_is_the_rest_of_the_path(destination: str, url: str) -> None:
    """The query of the request belongs to the destination; escapes in it are kept."""
    api = ApiHarness(compatibility=("qstash",))
    response = await publish(api, destination=destination)
    _, content = await api.stored_task(response.json["messageId"])
    assert url == content.url


@pytest.mark.parametrize(
    "headers",
    [{"Upstash-Deduplication-Id": "order-7"}, {"Upstash-Content-Based-Deduplication": "True"}],
)
async def test_duplicates_are_recognised_for_ten_minutes(headers: dict[str, str]) -> None:
    """A duplicate within ten minutes is a 202 with the first id, a later one is a new message."""
    api = ApiHarness(compatibility=("qstash",))
    first = await publish_ok(api, headers)
    new_ids = [first]
    for minutes in (9, 9, 9, 1, 9, 30):
        api.time.ms += minutes * MINUTE_MS
        response = await publish(api, headers)
        if response.status == 202:
            assert {"messageId": new_ids[-1], "deduplicated": True} == response.json
        else:
            new_ids.append(response.json["messageId"])
    # At minute 0, 18, 28 and 67; those at 9, 27 and 37 are duplicates.
    created = [(await api.stored_task(each))[0].created_at - NOW for each in new_ids]
    assert [0, 18, 28, 67] == [each // MINUTE_MS for each in created]


async def test_deduplication_id_decides_alone() -> None:
    """A message with other content and the same deduplication id is a duplicate."""
    api = ApiHarness(compatibility=("qstash",))
    headers = {"Upstash-Deduplication-Id": "order-7"}
    first = await publish_ok(api, headers)
    second = await publish(api, headers, body=b'{"other": 1}')
    assert (202, first) == (second.status, second.json["messageId"])


async def test_id_that_looks_like_a_generated_key_is_another_id() -> None:
    """The ids `x@1` and `x` are not duplicates, although `x@1` is the key of `x` in window 1."""
    api = ApiHarness(compatibility=("qstash",))
    await publish_ok(api, {"Upstash-Deduplication-Id": "x"})
    api.time.ms += 11 * MINUTE_MS
    await publish_ok(api, {"Upstash-Deduplication-Id": "x"})
    await publish_ok(api, {"Upstash-Deduplication-Id": "x@1"})
    api.time.ms += 11 * MINUTE_MS
    await publish_ok(api, {"Upstash-Deduplication-Id": "x@1"})


def test_no_two_ids_have_a_key_in_common() -> None:
    """Different ids have different keys in all windows, also an id like the key of a content."""
    by_content = {"Upstash-Content-Based-Deduplication": "true"}
    content = translate_message(TARGET, by_content.items(), b"", NOW).deduplication
    assert content is not None
    all_keys = [content.first, *(f"{content.prefix}{window}" for window in range(1, 4))]
    for given in ("x", *(f"x@{window}" for window in range(4)), "x@1@0", "x@1@1", *all_keys):
        headers = {"Upstash-Deduplication-Id": given}
        keys = translate_message(TARGET, headers.items(), b"", NOW).deduplication
        assert keys is not None
        all_keys += [keys.first, *(f"{keys.prefix}{window}" for window in range(1, 4))]

    assert len(all_keys) == len(set(all_keys))


@pytest.mark.parametrize("given", ["order-7", "ann@example.com", "content-1", "@", "7@"])
def test_deduplication_id_is_the_idempotency_key(given: str) -> None:
    """An ordinary id is the idempotency key of the task as it is."""

    async def test(api: ApiHarness) -> None:
        message_id = await publish_ok(api, {"Upstash-Deduplication-Id": given})
        task, _ = await api.stored_task(message_id)
        assert given == task.key

    run_with_api(test, compatibility=("qstash",))


async def test_content_decides_about_duplicates() -> None:
    """With content-based deduplication, another body, header or URL makes another message."""
    api = ApiHarness(compatibility=("qstash",))
    headers = {"Upstash-Content-Based-Deduplication": "true"}
    await publish_ok(api, headers)
    other_header = {**headers, "Upstash-Forward-X-A": "1"}
    assert 201 == (await publish(api, other_header)).status
    assert 201 == (await publish(api, headers, body=b"[]")).status
    assert 201 == (await publish(api, headers, f"{TARGET}/2")).status
    assert 202 == (await publish(api, {**headers, "Upstash-Retries": "1"})).status
    assert 201 == (await publish(api, {"Upstash-Content-Based-Deduplication": "false"})).status


async def test_flow_control_needs_the_limits_of_the_lane() -> None:
    """Limits of a message are accepted if its lane has them; the error has the request to send."""
    api = ApiHarness(compatibility=("qstash",))
    headers = {
        "Upstash-Flow-Control-Key": "mail",
        "Upstash-Flow-Control-Value": "parallelism=4, rate=120, period=1m",
    }
    refused = await publish(api, headers)
    assert 400 == refused.status
    expected = (
        "PUT /downstreams/https:example.com:443@mail with the body "
        '{"concurrency":4,"ratePerSecond":2.0}'
    )
    assert expected in refused.json["error"]
    lane = "default/https:example.com:443@mail"
    await api.engine.set_limits(lane, DownstreamLimits(concurrency=4, rate_per_second=2.0))
    await publish_ok(api, headers)


async def test_batch_creates_all_messages_or_none() -> None:
    """A batch returns a result for each message; one invalid message rejects the batch."""
    api = ApiHarness(compatibility=("qstash",))
    message = {"destination": TARGET, "headers": {"Upstash-Method": "PUT"}, "body": "é"}
    batch = [
        {**message, "queue": None},
        {"destination": TARGET, "headers": {"Upstash-Deduplication-Id": "a"}},
        {"destination": TARGET, "headers": {"Upstash-Deduplication-Id": "a"}},
    ]
    response = await api.request("POST", "/v2/batch", batch)
    assert 200 == response.status
    assert [False, False, True] == [each["deduplicated"] for each in response.json]
    _, content = await api.stored_task(response.json[0]["messageId"])
    assert ("PUT", "é".encode()) == (content.method, content.body)
    for invalid_message, error in (
        ({**message, "queue": "q"}, "[1] queue is not supported"),
        ({"destination": "group"}, "[1] The destination must be a URL"),
        ({**message, "headers": {"Upstash-Callback": "x"}}, "[1] Upstash-Callback must start"),
        ({**message, "headers": {"Upstash-Delay": "x"}}, "[1] Upstash-Delay must be a dur"),
    ):
        rejected = await api.request("POST", "/v2/batch", [message, invalid_message])
        assert 400 == rejected.status
        assert rejected.json["error"].startswith(error)
    assert 2 == await api.count_tasks()
    assert [] == (await api.request("POST", "/v2/batch", [])).json
    assert 400 == (await api.request("POST", "/v2/batch", [message] * 1001)).status


async def test_batch_lets_other_requests_run() -> None:
    """The event loop runs other tasks after each translated message of a batch."""
    api = ApiHarness(compatibility=("qstash",))
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count_turns())
    await api.request("POST", "/v2/batch", [{"destination": TARGET}] * 200)
    counter.cancel()
    assert turns > 200


async def test_large_bodies_of_a_rejected_batch_are_deleted() -> None:
    """A batch that is rejected, and a duplicate, leave no body in the body store."""
    api = ApiHarness(compatibility=("qstash",))
    large = {"destination": TARGET, "body": "x" * 100_000}
    batch = [large, {**large, "headers": {"Upstash-Callback": "x"}}]
    assert 400 == (await api.request("POST", "/v2/batch", batch)).status
    limited = {"Upstash-Flow-Control-Value": "rate=1"}
    assert 400 == (await publish(api, limited, body=b"x" * 100_000)).status
    assert {} == api.payloads.bodies
    headers = {"Upstash-Deduplication-Id": "a"}
    assert 201 == (await publish(api, headers, body=b"x" * 100_000)).status
    assert 202 == (await publish(api, headers, body=b"x" * 100_000)).status
    assert 1 == len(api.payloads.bodies)


async def test_limits_of_the_tenant_apply() -> None:
    """A tenant at its quota gets a 429 with the time to wait; a batch lists its stored messages."""
    api = ApiHarness(compatibility=("qstash",), quota=2)
    batch = [{"destination": TARGET}] * 3
    response = await api.request("POST", "/v2/batch", batch)
    assert 429 == response.status
    assert "setting tenant_pending" in response.json["error"]
    assert 2 == response.json["error"].count("01890000-")
    for refused in (response, await publish(api)):
        assert (429, "10") == (refused.status, refused.header("retry-after"))
        # The time of the reset, in seconds since 1970, is what the clients of QStash read.
        assert f"{NOW // 1000 + 10}" == refused.header("burst-ratelimit-reset")


async def test_rate_and_lanes_of_the_tenant_are_limited() -> None:
    """The limits of the rate and of the lanes apply to messages."""
    api = ApiHarness(compatibility=("qstash",), lane_quota=1, rate=1.0, burst=2.0)
    assert 201 == (await publish(api)).status
    lane = await publish(api, destination="https://example.org/")
    assert (429, True) == (lane.status, "tenant_lanes" in lane.json["error"])
    rate = await publish(api)
    assert (429, True) == (rate.status, "tenant_rate" in rate.json["error"])


async def test_messages_above_the_rate_are_not_translated() -> None:
    """A message above the rate costs nothing, so its errors are not found."""
    api = ApiHarness(compatibility=("qstash",), rate=1.0, burst=1.0)
    headers = {"Upstash-Retry-Delay": "invalid"}
    assert 400 == (await publish(api, headers)).status
    assert 429 == (await publish(api, headers)).status
    batch = [{"destination": TARGET, "headers": headers}]
    assert 429 == (await api.request("POST", "/v2/batch", batch)).status


async def test_get_shows_a_message_until_it_is_finished() -> None:
    """A message in delivery has QStash's fields; a finished or unknown one is a 404."""
    api = ApiHarness(compatibility=("qstash",))
    message_id = await publish_ok(
        api,
        {
            "Upstash-Retries": "7",
            "Upstash-Forward-X-Api-Key": "secret-7",
            "Upstash-Callback": "https://example.com/done",
            "Upstash-Flow-Control-Key": "orders",
        },
    )
    message = await api.request("GET", f"/v2/messages/{message_id}")
    assert {
        "messageId": message_id,
        "url": TARGET,
        "method": "POST",
        "header": {"content-type": ["application/json"], "x-api-key": ["[redacted]"]},
        "maxRetries": 7,
        "notBefore": NOW,
        "createdAt": NOW,
        "callback": "https://example.com/done",
        "flowControlKey": "orders",
    } == message.json
    default_id = await publish_ok(api)
    default = await api.request("GET", f"/v2/messages/{default_id}")
    assert 3 == default.json["maxRetries"]
    await api.exhaust_due_tasks()
    for method in ("GET", "DELETE"):
        finished = await api.request(method, f"/v2/messages/{message_id}")
        assert (404, True) == (finished.status, "EXHAUSTED" in finished.json["error"])
        for unknown in (UNKNOWN_ID, "msg_1"):
            missing = await api.request(method, f"/v2/messages/{unknown}")
            assert (404, {"error": f"There is no message {unknown}."}) == (
                missing.status,
                missing.json,
            )


async def test_cancel() -> None:
    """One message or a list of messages can be cancelled, but not all messages at once."""
    api = ApiHarness(compatibility=("qstash",))
    first, second, third = [await publish_ok(api) for _ in range(3)]
    assert 202 == (await api.request("DELETE", f"/v2/messages/{first}")).status
    ids = {"messageIds": [first, second, UNKNOWN_ID, "x"]}
    cancelled = await api.request("DELETE", "/v2/messages", ids)
    assert {"cancelled": 1} == cancelled.json
    everything = await api.request("DELETE", "/v2/messages")
    assert (400, True) == (everything.status, "messageIds" in everything.json["error"])
    too_many = await api.request("DELETE", "/v2/messages", {"messageIds": ["x"] * 1001})
    assert 400 == too_many.status
    statuses = [(await api.stored_task(each))[0].status.name for each in (first, second, third)]
    assert ["CANCELLED", "CANCELLED", "PENDING"] == statuses


async def test_other_paths_are_not_supported() -> None:
    """A path of QStash without a counterpart is a 501 that names the alternative."""
    api = ApiHarness(compatibility=("qstash",))
    for path, hint in (
        ("/v2/enqueue/q/https://example.com", "tasks are not delivered in order"),
        ("/v2/schedules/https://example.com", "let cron publish the messages"),
        ("/v2/dlq", "Use /dead-letters."),
        ("/v2/x", "lists what is"),
    ):
        response = await api.request("POST", path)
        assert (501, True) == (response.status, hint in response.json["error"])
    assert 405 == (await api.request("GET", "/v2/batch")).status


async def test_authentication() -> None:
    """The token is an API key of the service; the error has the format of QStash."""
    api = ApiHarness(compatibility=("qstash",), keys=True)
    response = await publish(api, {"Authorization": "Bearer qstash-token"})
    assert (401, {"error"}) == (response.status, json.loads(response.body).keys())


async def test_off_by_default(api: ApiHarness) -> None:
    """Without the setting, the paths do not exist; the error names the setting."""
    response = await publish(api)
    assert (404, True) == (response.status, "`compatibility`" in response.problem["detail"])


async def test_worker_rejects_messages() -> None:
    """A process with the role `worker` creates no tasks."""
    api = ApiHarness(compatibility=("qstash",), role="worker")
    response = await publish(api)
    assert (421, True) == (response.status, "role worker" in response.json["error"])


def test_page_lists_every_header() -> None:
    """The page has each header that is supported, ignored or known to be not supported."""
    rows = table_of(DOCS / "moving-from-qstash-and-cloud-tasks.md", "header")
    listed = {name.lower() for row in rows for name in re.findall(r"`([\w*-]+)`", row[0])}
    prefixes = (*_IGNORED_PREFIXES, *_UNSUPPORTED_HEADERS)

    assert set() == _HEADERS.keys() - listed
    assert set() == {f"{name}*" if name.endswith("-") else name for name in prefixes} - listed
