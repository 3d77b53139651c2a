"""The log of operators' actions: one line for each change."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.api.action_log import changed_fields, format_action
from tarry.service.api.auth import make_api_key
from tarry.service.api.messages import Change
from tarry.service.records.api_keys import put_api_key
from tests.service.api.harness import TARGET, ApiHarness, run_with_api

LANE = "https:example.com:443"
NOT_LOGGED = {"createTask", "createTasks", "planRetries", "simulatePolicy", "advisePolicy"}
"""Operations that are not a GET, but add tasks or change nothing."""
LINE = re.compile(
    r"operator action, action=(\w+) tenant=(\".*?\") key=(\".*?\") "
    r"object=(.+) before=(.+) after=(.+)"
)


class Operator:
    """Sends requests with a key named `laptop`."""

    def __init__(self, api: ApiHarness, key: str) -> None:
        self.api = api
        self._headers = {"X-API-Key": key}

    async def __call__(self, method: str, path: str, document: object = None) -> Any:
        """Send a request, which must succeed; return the JSON of the response."""
        response = await self.api.request(method, path, document, headers=self._headers)
        assert response.status < 300, response.body
        return response.json if response.body else None

    async def post_task(self) -> str:
        """Create a task; return its id."""
        return str((await self("POST", "/retry-tasks", {"targetUrl": TARGET}))["taskId"])


async def pause(send: Operator) -> tuple[Any, ...]:
    """Pause a lane."""
    await send.post_task()
    await send("POST", f"/downstreams/{LANE}/pause")
    active = {"state": "ACTIVE", "breaker": "closed"}
    return LANE, active, {"state": "PAUSED", "breaker": "closed"}


async def resume(send: Operator) -> tuple[Any, ...]:
    """Resume a paused lane."""
    await send.api.store.pause(f"acme/{LANE}")
    await send("POST", f"/downstreams/{LANE}/resume")
    paused = {"state": "PAUSED", "breaker": "closed"}
    return LANE, paused, {"state": "ACTIVE", "breaker": "closed"}


async def reset(send: Operator) -> tuple[Any, ...]:
    """Reset a paused lane."""
    await send.api.store.pause(f"acme/{LANE}")
    await send("POST", f"/downstreams/{LANE}/reset")
    paused = {"state": "PAUSED", "breaker": "closed"}
    return LANE, paused, {"state": "ACTIVE", "breaker": "closed"}


async def set_limits(send: Operator) -> tuple[Any, ...]:
    """Set the limits of a lane that does not exist."""
    await send("PUT", f"/downstreams/{LANE}?create=true", {"concurrency": 4})
    return LANE, None, {"limits": {"concurrency": 4}}


async def cancel_task(send: Operator) -> tuple[Any, ...]:
    """Cancel a task."""
    task_id = await send.post_task()
    await send("DELETE", f"/retry-tasks/{task_id}")
    return task_id, {"status": "PENDING"}, {"status": "CANCELLED"}


async def cancel_tasks(send: Operator) -> tuple[Any, ...]:
    """Cancel the tasks of a lane."""
    await send.post_task()
    await send("POST", "/retry-tasks/cancellations", {"filter": {"lane": LANE}})
    return {"lane": LANE}, {"matched": 1}, {"cancelled": 1, "running": 0}


async def retry_task(send: Operator) -> tuple[Any, ...]:
    """Retry a dead letter."""
    task_id = await send.post_task()
    await send.api.exhaust_due_tasks()
    await send("POST", f"/retry-tasks/{task_id}/retry")
    return task_id, {"status": "EXHAUSTED"}, {"status": "PENDING"}


async def create_replay(send: Operator) -> tuple[Any, ...]:
    """Replay dead letters; the dry run before it is not logged."""
    await send.post_task()
    await send.api.exhaust_due_tasks()
    document = {"filter": {"lane": LANE}, "rate": 5}
    await send("POST", "/dead-letters/replays", {**document, "dryRun": True})
    replay = await send("POST", "/dead-letters/replays", document)
    return replay["replayId"], None, {"filter": replay["filter"], "rate": 5.0, "matched": 1}


async def cancel_replay(send: Operator) -> tuple[Any, ...]:
    """Cancel a replay."""
    await send.post_task()
    await send.api.exhaust_due_tasks()
    replay = await send("POST", "/dead-letters/replays", {"all": True})
    await send("DELETE", f"/dead-letters/replays/{replay['replayId']}")
    after = {"status": "CANCELLED", "replayed": 0}
    return replay["replayId"], {"status": "RUNNING"}, after


async def purge(send: Operator) -> tuple[Any, ...]:
    """Purge the dead letters of a lane."""
    await send.post_task()
    await send.api.exhaust_due_tasks()
    await send("DELETE", f"/dead-letters?lane={LANE}")
    return {"lane": LANE}, None, {"purged": 1}


async def create_policy(send: Operator) -> tuple[Any, ...]:
    """Create a policy, whose fields are all logged."""
    policy = await send("POST", "/retry-policies", {"policyId": "mine", "maxAttempts": 3})
    fields = {name: policy[name] for name in policy if name not in {"policyId", "createdAt"}}
    return "mine", None, fields


async def put_policy(send: Operator) -> tuple[Any, ...]:
    """Change a policy; only the changed fields are logged."""
    for attempts in (3, 5):
        await send("PUT", "/retry-policies/mine", {"maxAttempts": attempts})
    return "mine", {"version": 1, "maxAttempts": 3}, {"version": 2, "maxAttempts": 5}


async def delete_policy(send: Operator) -> tuple[Any, ...]:
    """Delete a policy."""
    policy = await send("PUT", "/retry-policies/mine", {"maxAttempts": 3})
    await send("DELETE", "/retry-policies/mine")
    fields = {name: policy[name] for name in policy if name not in {"policyId", "createdAt"}}
    return "mine", fields, None


async def create_secret(send: Operator) -> tuple[Any, ...]:
    """Create a signing secret, whose value is not logged."""
    secret = await send("POST", "/signing-secrets", {"lane": LANE})
    return secret["secretId"], None, {"lane": LANE, "type": "HMAC", "expiresAt": None}


async def delete_secret(send: Operator) -> tuple[Any, ...]:
    """Delete a signing secret."""
    secret = await send("POST", "/signing-secrets", {})
    await send("DELETE", f"/signing-secrets/{secret['secretId']}")
    return secret["secretId"], {"lane": None, "type": "HMAC", "expiresAt": None}, None


ACTIONS = {
    "pauseDownstream": pause,
    "resumeDownstream": resume,
    "resetDownstream": reset,
    "setDownstreamLimits": set_limits,
    "cancelTask": cancel_task,
    "cancelTasks": cancel_tasks,
    "retryTask": retry_task,
    "createReplay": create_replay,
    "cancelReplay": cancel_replay,
    "purgeDeadLetters": purge,
    "createPolicy": create_policy,
    "putPolicy": put_policy,
    "deletePolicy": delete_policy,
    "createSigningSecret": create_secret,
    "deleteSigningSecret": delete_secret,
}


def logged_actions(caplog: pytest.LogCaptureFixture) -> list[tuple[Any, ...]]:
    """Return action, tenant, key, object, before and after of each line."""
    found = [LINE.fullmatch(message) for message in caplog.messages]
    return [
        (match[1], *(json.loads(match[number]) for number in range(2, 7)))
        for match in found
        if match is not None
    ]


async def test_all_operations_that_change_something_have_a_test(api: ApiHarness) -> None:
    """A new operation that is not a GET must be logged, or be listed as one that is not."""
    document = (await api.request("GET", "/openapi.json")).json
    operation_ids = {
        operation["operationId"]
        for path in document["paths"].values()
        for method, operation in path.items()
        if method in {"post", "put", "patch", "delete"}
    }
    assert operation_ids == {*ACTIONS, *NOT_LOGGED}


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_is_logged_once(action: str, caplog: pytest.LogCaptureFixture) -> None:
    """The line has the action, the tenant, the name and id of the key, the object, and values."""

    async def test(api: ApiHarness) -> tuple[Any, ...]:
        key, record = make_api_key("acme", "key-1", "laptop")
        await put_api_key(api.store, record)
        return await ACTIONS[action](Operator(api, key))

    with caplog.at_level(logging.INFO, "tarry.service"):
        expected = run_with_api(test, keys=True)
    lines = [line for line in logged_actions(caplog) if line[0] == action]
    assert (action, "acme", "laptop (key-1)", *expected) == lines[-1]
    assert (2 if action == "putPolicy" else 1) == len(lines)


async def test_a_service_without_keys_logs_actions(caplog: pytest.LogCaptureFixture) -> None:
    """Without API keys, the line says that none is required."""
    api = ApiHarness()
    with caplog.at_level(logging.INFO, "tarry.service"):
        await api.request("POST", f"/downstreams/{LANE}/pause?create=true")
    assert ["none required"] == [line[2] for line in logged_actions(caplog)]


def test_actions_through_the_api_of_a_vendor_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A cancellation through such an API writes the same line, with the vendor and the method."""

    async def test(api: ApiHarness) -> str:
        task_id = str((await api.create())["taskId"])
        response = await api.request("DELETE", f"/v2/messages/{task_id}")
        assert response.status < 300, response.body
        return task_id

    pattern = r"operator action, action=(\S+) .* object=(\S+) before=(\S+) after=(\S+)"
    with caplog.at_level(logging.INFO, "tarry.service"):
        task_id = run_with_api(test, compatibility=("qstash",))
    (message,) = [each for each in caplog.messages if each.startswith("operator action")]
    match = re.fullmatch(pattern, message)
    assert match is not None
    assert ("qstash.DELETE", f'"{task_id}"', '{"status":"PENDING"}', '{"status":"CANCELLED"}') == (
        match.groups()
    )


async def test_a_request_that_changes_nothing_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither an error nor a filter that matches nothing is logged."""
    api = ApiHarness()
    with caplog.at_level(logging.INFO, "tarry.service"):
        await api.request("POST", f"/downstreams/{LANE}/pause")
        await api.request("DELETE", "/retry-policies/mine")
        await api.request("DELETE", "/dead-letters?all=true")
        await api.request("POST", "/retry-tasks/cancellations", {"all": True})
    assert [] == logged_actions(caplog)


@pytest.mark.parametrize(
    ("method", "path", "document", "store_call", "after"),
    [
        ("DELETE", "/dead-letters?all=true", None, "delete_dead_letters", {"purged": 1}),
        (
            *("POST", "/retry-tasks/cancellations", {"all": True}, "cancel"),
            {"cancelled": 1, "running": 0},
        ),
    ],
)
def test_a_change_is_logged_if_the_request_fails_later(
    method: str,
    path: str,
    document: object,
    store_call: str,
    after: dict[str, int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tasks of the first chunks are deleted or cancelled, also if the store fails then."""
    monkeypatch.setattr("tarry.service.api.dead_letters._PURGE_CHUNK_TASKS", 1)
    monkeypatch.setattr("tarry.service.api.tasks._CANCEL_CHUNK_TASKS", 1)

    async def test(api: ApiHarness) -> None:
        for _ in range(3):
            await api.create()
        if method == "DELETE":
            await api.exhaust_due_tasks()
        call, call_count = getattr(api.store, store_call), 0

        async def fail_later(*args: Any, **options: Any) -> Any:
            nonlocal call_count
            call_count += 1
            if call_count > 1:
                raise StoreUnavailable("gone")
            return await call(*args, **options)

        monkeypatch.setattr(api.store, store_call, fail_later)
        assert 503 == (await api.request(method, path, document)).status

    with caplog.at_level(logging.INFO, "tarry.service"):
        run_with_api(test)
    assert [after] == [line[-1] for line in logged_actions(caplog)]


@pytest.mark.parametrize(
    "forged", ["a\nERROR fake", "a\r\x1b[2J", "a\x7f\u2028\u202eb", 'a" key="x']
)
def test_values_cannot_forge_a_line(forged: str) -> None:
    """Control characters, other line ends and quotes are escaped."""
    change = Change(forged, {"reason": forged}, None)
    line = format_action("pauseDownstream", "acme", forged, change)

    assert line.isascii()
    assert line.isprintable()
    match = LINE.fullmatch(line)
    assert match is not None
    assert forged == json.loads(match[4])


def test_long_values_are_cut() -> None:
    """A value has at most about two thousand characters."""
    line = format_action("purgeDeadLetters", "acme", "k", Change("x" * 100_000, None, None))

    assert len(line) < 2_200


def test_only_fields_that_differ_are_shown() -> None:
    """A field that one side lacks differs; if one side is missing, all fields are shown."""
    assert ({"a": 1, "b": 2}, {"a": 2, "c": 3}) == changed_fields(
        {"a": 1, "b": 2, "d": 4}, {"a": 2, "c": 3, "d": 4}
    )
    assert (None, {"a": 1}) == changed_fields(None, {"a": 1})
    assert ({"a": 1}, None) == changed_fields({"a": 1}, None)
