"""The API calls of the clients: the request that is sent, and the parsed response."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import msgspec
import pytest

import tarry
from tarry.client import errors
from tarry.client.api import ServiceApi
from tarry.client.errors import NotFinished
from tarry.errors import ConfigurationError
from tarry.testing import VirtualClock, scripted_random
from tarry.wire.tasks import RetryTask
from tests.client.client_drivers import ClientDriver
from tests.client.fake_service import FakeService, ReceivedRequest, problem_response, task_json

pytestmark = pytest.mark.usefixtures("_no_wait")

HOOK = "https://example.com/hook"
REPLAY = {
    "replayId": "r1",
    "status": "RUNNING",
    "filter": {},
    "rate": 5.0,
    "matched": 7,
    "replayed": 0,
    "createdAt": 1,
    "finishedAt": None,
}
LANE = "https://example.com:443"
DOWNSTREAM = {
    "tenant": "acme",
    "lane": LANE,
    "state": "ACTIVE",
    "parkedUntil": None,
    "consecutiveOpens": 0,
    "pending": 3,
    "inFlight": 1,
    "dead": 0,
    "lastClaimAt": None,
    "local": None,
}


def paged_response(key: str, items: list[Any], size: int) -> Any:
    """Return a response function that serves a list in pages; the cursor is an index."""

    def respond(request: ReceivedRequest) -> tuple[int, Any]:
        start = int(request.query.get("cursor", 0))
        end = start + size
        cursor = str(end) if end < len(items) else None
        return 200, {key: items[start:end], "nextCursor": cursor}

    return respond


def test_enqueue_and_wait(driver: ClientDriver, service: FakeService) -> None:
    """`wait` is sent in whole seconds, and the target's response is part of the task."""
    response = {"status": 200, "headers": {}, "body": "done"}
    sent_task = task_json(1, status="SUCCEEDED", response=response)
    service.responses["POST /retry-tasks"] = (201, sent_task)

    task = driver.call("enqueue", HOOK, wait=2.5)

    assert "wait=3" == service.requests[0].headers["prefer"]
    assert ("SUCCEEDED", "done") == (task.status, task.response.body)


def test_list_has_all_pages(driver: ClientDriver, service: FakeService) -> None:
    """A method that lists tasks iterates over all pages, in the order of the service."""
    tasks = [task_json(number) for number in range(250)]
    service.responses["GET /retry-tasks"] = paged_response("items", tasks, 100)

    found = driver.call("tasks", status="PENDING", policy="webhook", lane=LANE, reason="attempts")

    assert [task["taskId"] for task in tasks] == [task.task_id for task in found]
    filters = {"status": "PENDING", "policyId": "webhook", "lane": LANE, "reason": "attempts"}
    assert [
        filters,
        {**filters, "limit": "1000", "cursor": "100"},
        {**filters, "limit": "1000", "cursor": "200"},
    ] == [request.query for request in service.requests]


@pytest.mark.parametrize("method", ["tasks", "dead_letters", "purge", "replay"])
def test_search_filters(driver: ClientDriver, service: FakeService, method: str) -> None:
    """All filters are sent with the names of the API, and times in milliseconds."""
    service.responses["GET /retry-tasks"] = (200, {"items": [], "nextCursor": None})
    service.responses["GET /dead-letters"] = (200, {"items": [], "nextCursor": None})
    service.responses["DELETE /dead-letters"] = (200, {"purged": 0, "more": False})
    service.responses["POST /dead-letters/replays"] = (201, REPLAY)

    found = driver.call(
        method,
        url_prefix=HOOK,
        key="order-7",
        created_after=1_700_000_000.5,
        created_before=datetime(2027, 1, 1, tzinfo=UTC),
        finished_after=1_700_000_001,
        finished_before=None,
        last_status=503,
        error="timeout",
    )
    if method in {"tasks", "dead_letters"}:
        assert [] == list(found)
    [request] = service.requests
    sent = request.json["filter"] if method == "replay" else request.query
    assert {
        "urlPrefix": HOOK,
        "idempotencyKey": "order-7",
        "createdAfter": "1700000000500",
        "createdBefore": "1798761600000",
        "finishedAfter": "1700000001000",
        "lastStatus": "503",
        "error": "timeout",
    } == {name: str(value) for name, value in sent.items()}
    if method == "replay":
        assert (1_700_000_000_500, "503") == (sent["createdAfter"], sent["lastStatus"])


def test_cancel_many_continues_until_the_last_part(
    driver: ClientDriver, service: FakeService
) -> None:
    """The parts of a bulk cancel are requested one after the other and added up."""
    parts = [
        {"matched": 3, "cancelled": 2, "running": 1, "nextCursor": "7"},
        {"matched": 1, "cancelled": 1, "running": 0, "nextCursor": None},
    ]
    service.responses["POST /retry-tasks/cancellations"] = lambda _: (200, parts.pop(0))

    result = driver.call("cancel_many", url_prefix=HOOK, last_status=503)

    assert (4, 3, 1) == (result.matched, result.cancelled, result.running)
    body = {"dryRun": False, "filter": {"urlPrefix": HOOK, "lastStatus": "503"}}
    assert [body, {**body, "cursor": "7"}] == [request.json for request in service.requests]


def test_all_is_sent_explicitly(driver: ClientDriver, service: FakeService) -> None:
    """`all=True` of `cancel_many`, `replay` and `purge` is sent to the service."""
    done = {"matched": 0, "cancelled": 0, "running": 0, "nextCursor": None}
    service.responses["POST /retry-tasks/cancellations"] = (200, done)
    service.responses["POST /dead-letters/replays"] = (201, REPLAY)
    service.responses["DELETE /dead-letters"] = (200, {"purged": 0, "more": False})

    for method in ("cancel_many", "replay", "purge"):
        driver.call(method, all=True)

    cancellation, replay, purge = service.requests
    assert {"all": True, "dryRun": False, "filter": {}} == cancellation.json
    assert {"all": True, "filter": {}} == replay.json
    assert {"all": "true"} == purge.query


def test_lost_page_is_requested_again(driver: ClientDriver, service: FakeService) -> None:
    """A page whose response was lost is requested again, without gaps or duplicates."""
    service.responses["GET /dead-letters"] = paged_response(
        "items", [task_json(n) for n in range(5)], 2
    )
    service.faults.extend(["", "drop", ""])
    found = driver.call("dead_letters")
    assert [task_json(n)["taskId"] for n in range(5)] == [task.task_id for task in found]


@pytest.mark.parametrize("method", ["tasks", "dead_letters", "purge", "replay", "cancel_many"])
def test_unknown_filter_is_rejected(
    driver: ClientDriver, service: FakeService, method: str
) -> None:
    """An unknown filter is rejected, because ignoring it would match everything."""
    with pytest.raises(TypeError) as caught:
        driver.call(method, polcy="webhook")
    assert f"polcy is not an argument of {method}; did you mean 'policy'?" == str(caught.value)
    with pytest.raises(
        TypeError, match=rf"^zzz is not an argument of {method}; it has .*policy, lane"
    ):
        driver.call(method, zzz=1)
    assert [] == service.requests


def test_tasks_are_sent_in_batches(driver: ClientDriver, service: FakeService) -> None:
    """Tasks are sent in batches of 1,000; the results are in the order of the tasks."""
    urls = [f"{HOOK}/{number}" for number in range(2_001)]
    results = driver.call("enqueue_many", ({"url": url} for url in urls))
    assert [1000, 1000, 1] == [len(request.json["tasks"]) for request in service.requests]
    assert urls == [result.task.target_url for result in results]


def test_error_of_a_later_batch_has_the_number_of_processed_tasks(
    driver: ClientDriver, service: FakeService
) -> None:
    """When a later batch fails, the error says how many tasks were processed."""
    service.faults.extend(["", *["503"] * 4])
    with pytest.raises(errors.ServiceUnavailable) as caught:
        driver.call("enqueue_many", [{"url": HOOK}] * 1_001)
    assert any("first 1000 tasks" in note for note in caught.value.__notes__)


def test_error_of_the_first_batch_mentions_no_processed_tasks(
    driver: ClientDriver, service: FakeService
) -> None:
    service.faults.extend(["503"] * 4)
    with pytest.raises(errors.ServiceUnavailable) as caught:
        driver.call("enqueue_many", [{"url": HOOK}])
    assert not [note for note in getattr(caught.value, "__notes__", ()) if "tasks" in note]


def test_empty_list_of_tasks(driver: ClientDriver, service: FakeService) -> None:
    """An empty list of tasks sends no request."""
    assert [] == driver.call("enqueue_many", [])
    assert [] == service.requests


def test_invalid_task_of_a_batch_does_not_affect_others(
    driver: ClientDriver, service: FakeService
) -> None:
    rejected_item = {
        "status": 422,
        "problem": {"title": "Invalid request", "field": "targetUrl"},
    }
    response = {"results": [{"status": 201, "task": task_json(1)}, rejected_item]}
    service.responses["POST /retry-tasks/batch"] = (200, response)
    good, bad = driver.call("enqueue_many", [{"url": HOOK}, {"url": "nonsense"}])
    assert (201, "PENDING") == (good.status, good.task.status)
    assert (422, None, "targetUrl") == (bad.status, bad.task, bad.problem["field"])


def test_wait_for_a_task(driver: ClientDriver, service: FakeService) -> None:
    """A task is polled until it has finished, successfully or not."""
    statuses = iter(["PENDING", "IN_FLIGHT", "PENDING", "EXHAUSTED"])
    service.responses["GET /retry-tasks/a"] = lambda _: (200, task_json(1, status=next(statuses)))
    assert "EXHAUSTED" == driver.call("wait", "a").status
    assert ["wait=20"] * 4 == [request.headers["prefer"] for request in service.requests]


def test_wait_with_a_timeout_of_zero(driver: ClientDriver, service: FakeService) -> None:
    """A timeout of 0 polls once; the TimeoutError has the task."""
    service.responses["GET /retry-tasks/a"] = (200, task_json(1))
    with pytest.raises(TimeoutError, match="/retry-tasks/a is still PENDING") as caught:
        driver.call("wait", "a", timeout=0)
    assert isinstance(caught.value, errors.NotFinished)
    assert "PENDING" == getattr(caught.value.last, "status", None)
    assert [False] == ["prefer" in request.headers for request in service.requests]


def test_task_as_object_or_id(driver: ClientDriver, service: FakeService) -> None:
    """A task can be passed as an object or as an id."""
    task = driver.call("enqueue", HOOK)
    path = f"/retry-tasks/{task.task_id}"
    service.responses[f"POST {path}/retry"] = (200, task_json(1))
    service.responses[f"GET {path}/explain"] = (
        200,
        {
            "taskId": task.task_id,
            "status": "PENDING",
            "reason": None,
            "text": "The task waits.",
            "steps": [],
            "next": {"text": "attempt 1", "at": None},
        },
    )
    service.responses[f"GET {path}/attempts"] = paged_response("items", [], 10)
    assert task.task_id == driver.call("retry", task).task_id
    assert "The task waits." == driver.call("explain", task.task_id).text
    assert [] == driver.call("attempts", task)
    assert task.task_id == driver.call("get", task).task_id


def test_replay_handle(driver: ClientDriver, service: FakeService) -> None:
    """A replay handle can be refreshed, waited for and cancelled."""
    statuses = iter([("RUNNING", 2), ("RUNNING", 5), ("DONE", 7)])

    def get_replay(_: ReceivedRequest) -> tuple[int, Any]:
        status, replayed = next(statuses)
        return 200, {**REPLAY, "status": status, "replayed": replayed}

    service.responses["POST /dead-letters/replays"] = (201, REPLAY)
    service.responses["GET /dead-letters/replays/r1"] = get_replay
    service.responses["DELETE /dead-letters/replays/r1"] = problem_response(
        409, "Already ended", "DONE."
    )

    replay = driver.call("replay", policy="webhook", before=12.5, rate=5)

    expected = {"filter": {"policyId": "webhook", "before": 12_500}, "rate": 5.0}
    assert expected == service.requests[0].json
    assert ("r1", "RUNNING", 7, 0) == (
        replay.replay_id,
        replay.status,
        replay.matched,
        replay.replayed,
    )
    assert 2 == driver.call(replay.refresh).replayed
    assert "DONE" == driver.call(replay.wait).status
    with pytest.raises(errors.Conflict):
        driver.call(replay.cancel)
    assert "DONE" == replay.status


def test_dry_run_is_finished_at_once(driver: ClientDriver, service: FakeService) -> None:
    """A dry run is finished at once, so its handle sends no further request."""
    response = {**REPLAY, "replayId": None, "status": "DRY_RUN", "createdAt": None}
    service.responses["POST /dead-letters/replays"] = (200, response)
    replay = driver.call("replay", dry_run=True)
    for action in (replay.refresh, replay.wait, replay.cancel):
        assert 7 == driver.call(action).matched
    assert 1 == len(service.requests)
    assert service.requests[0].json["dryRun"] is True


def test_list_of_replays(driver: ClientDriver, service: FakeService) -> None:
    """A replay can be found in the list of replays, and cancelled."""
    service.responses["GET /dead-letters/replays"] = (200, {"items": [REPLAY], "nextCursor": None})
    service.responses["DELETE /dead-letters/replays/r1"] = (200, {**REPLAY, "status": "CANCELLED"})
    (replay,) = driver.call("replays")
    assert "CANCELLED" == driver.call(replay.cancel).status


def test_purge_sends_requests_until_nothing_is_left(
    driver: ClientDriver, service: FakeService
) -> None:
    """`purge` sends requests until no dead letter is left, and returns the total."""
    responses = iter([{"purged": 10, "more": True}, {"purged": 3, "more": False}])
    service.responses["DELETE /dead-letters"] = lambda _: (200, next(responses))
    assert 13 == driver.call("purge", lane=LANE)
    assert [{"lane": LANE}] * 2 == [request.query for request in service.requests]


def test_policies_are_sent_and_returned(driver: ClientDriver, service: FakeService) -> None:
    """A policy is sent in the API's format, and returned with all fields."""
    stored: dict[str, Any] = {}

    def put(request: ReceivedRequest) -> tuple[int, Any]:
        stored.update(
            request.json,
            policyId="slow",
            version=1,
            createdAt=1,
            totalBudgetMs=None,
            attemptTimeoutMs=30_000,
            maxHintMs=86_400_000,
        )
        return 201, stored

    service.responses["PUT /retry-policies/slow"] = put
    service.responses["GET /retry-policies/slow"] = lambda _: (200, stored)
    service.responses["GET /retry-policies"] = lambda _: (
        200,
        {"items": [stored], "nextCursor": None},
    )
    service.responses["DELETE /retry-policies/slow"] = (204, b"")

    put_policy = driver.call("put_policy", "slow", tarry.Policy(max_attempts=9, initial_delay=2.0))

    sent = service.requests[0].json
    assert (9, 2000, "FULL") == (sent["maxAttempts"], sent["initialDelayMs"], sent["jitterType"])
    assert sent.keys().isdisjoint({"attemptTimeoutMs", "maxHintMs"})
    assert (9, 1) == (put_policy.max_attempts, put_policy.version)
    assert put_policy == driver.call("policy", "slow", 1)
    assert {"version": "1"} == service.requests[-1].query
    assert [put_policy] == driver.call("policies")
    assert None is driver.call("delete_policy", "slow")
    driver.call("put_policy", "slow", dict(sent))
    assert sent == service.requests[-1].json


def test_policy_with_callable_is_rejected(driver: ClientDriver, service: FakeService) -> None:
    """A policy with a callable is rejected before a request is sent."""
    with pytest.raises(tarry.ConfigurationError, match="backoff is a callable"):
        driver.call("put_policy", "slow", tarry.Policy(backoff=float))
    assert [] == service.requests


def test_workers_are_returned_as_a_list(driver: ClientDriver, service: FakeService) -> None:
    """`workers` returns the processes of the service."""
    worker = {
        "name": "node-1-7-x",
        "host": "node-1",
        "pid": 7,
        "role": "api",
        "version": "1.0",
        "startedAt": 5,
        "seenAt": 9,
        "runningAttempts": 0,
        "leasedTasks": 0,
        "futureField": 1,
    }
    service.responses["GET /workers"] = (200, {"items": [worker], "nextCursor": None})
    [listed] = driver.call("workers")
    assert ("node-1-7-x", "api", 5, 9) == (
        listed.name,
        listed.role,
        listed.started_at,
        listed.seen_at,
    )


@pytest.mark.parametrize("action", ["pause", "resume", "reset"])
def test_lane_name_is_one_path_segment(
    driver: ClientDriver, service: FakeService, action: str
) -> None:
    """The lane name is encoded as one path segment; a request to change its state is retried."""
    service.responses["GET /downstreams"] = (200, {"items": [DOWNSTREAM], "nextCursor": None})
    path = f"/downstreams/https%3A%2F%2Fexample.com%3A443/{action}"
    service.responses[f"POST {path}"] = (200, DOWNSTREAM)
    (downstream,) = driver.call("downstreams")
    service.faults.append("drop")
    assert downstream == driver.call(action, downstream.lane)
    assert [path, path] == [request.path for request in service.requests[1:]]


def test_page_of_downstreams(driver: ClientDriver, service: FakeService) -> None:
    """`downstream_page` requests one page, with a limit and a cursor if they are given."""
    service.responses["GET /downstreams"] = (200, {"items": [DOWNSTREAM], "nextCursor": "n"})
    page = driver.call("downstream_page")
    driver.call("downstream_page", page.next_cursor, limit=5)

    assert (1, "n") == (len(page.items), page.next_cursor)
    assert [{}, {"limit": "5", "cursor": "n"}] == [request.query for request in service.requests]


def test_limits_are_sent_with_the_names_of_the_api(
    driver: ClientDriver, service: FakeService
) -> None:
    """`set_limits` sends all limits, because they replace the earlier ones."""
    path = "/downstreams/https%3Aa.example%3A443"
    limits = {"ratePerSecond": 5.0, "futureField": 1}
    response = {**DOWNSTREAM, "limits": limits, "limitsSource": "API"}
    service.responses[f"PUT {path}"] = (200, response)

    downstream = driver.call(
        "set_limits", "https:a.example:443", rate_per_second=5.0, budget={"ratio": 0.1}
    )

    assert (5.0, "API") == (downstream.limits.rate_per_second, downstream.limits_source)
    expected = {
        "ratePerSecond": 5.0,
        "concurrency": None,
        "breaker": None,
        "budget": {"ratio": 0.1},
    }
    assert expected == service.requests[0].json


@pytest.mark.parametrize("create", [False, True])
def test_lanes_without_tasks_are_changed_only_on_request(
    driver: ClientDriver, service: FakeService, create: bool
) -> None:
    """With `create`, `pause` and `set_limits` send `?create=true`."""
    path = "/downstreams/https%3Aa.example%3A443"
    service.responses[f"POST {path}/pause"] = service.responses[f"PUT {path}"] = (200, DOWNSTREAM)

    paused = driver.call("pause", "https:a.example:443", create=create)
    driver.call("set_limits", "https:a.example:443", concurrency=1, create=create)

    assert "acme" == paused.tenant
    expected = {"create": "true"} if create else {}
    assert [expected] * 2 == [request.query for request in service.requests]


def test_health_sends_one_request(driver: ClientDriver, service: FakeService) -> None:
    """`health` sends one request, also when the service is not ready."""
    service.responses["GET /readyz"] = (200, {"status": "ok"})
    assert driver.call("health").ready
    failing = problem_response(
        503, "Service unavailable", "Failing: store.", failing={"store": "disk full"}
    )
    service.responses["GET /readyz"] = failing
    health = driver.call("health")
    assert (False, {"store": "disk full"}) == (health.ready, health.failing)
    assert 2 == len(service.requests)


def test_503_of_a_proxy_is_an_error(driver: ClientDriver, service: FakeService) -> None:
    """A 503 without a problem document, as from a proxy, raises ServiceUnavailable."""
    service.responses["GET /readyz"] = (503, b"<html>no upstream</html>")
    with pytest.raises(errors.ServiceUnavailable):
        driver.call("health")
    assert 1 == len(service.requests)


PENDING = msgspec.convert(task_json(1), RetryTask)


def poll_times(
    clock: VirtualClock, timeout: float | timedelta | None, max_polls: int
) -> list[float]:
    """Return the times at which an unfinished task is polled."""
    operation = ServiceApi().wait("a", timeout)
    step = next(operation)
    times: list[float] = []
    while len(times) < max_polls:
        if isinstance(step, (float, int)):
            clock.advance(step)
        else:
            times.append(round(clock.elapsed, 3))
        step = operation.send(PENDING)
    return times


def test_polls_become_rarer() -> None:
    """Polls become rarer, down to one in two seconds."""
    with VirtualClock() as clock, scripted_random([0.999999]):
        times = poll_times(clock, None, 20)
    gaps = [round(b - a, 2) for a, b in pairwise(times)]
    assert sorted(gaps) == gaps
    assert 0.05 == gaps[0]
    assert 2.0 == gaps[-1] == max(gaps)


@pytest.mark.parametrize("timeout", [10.0, timedelta(seconds=10)])
def test_last_poll_is_at_the_timeout(timeout: float | timedelta) -> None:
    """A task is polled for the last time when the timeout ends."""
    with VirtualClock() as clock, pytest.raises(NotFinished) as caught:
        poll_times(clock, timeout, 1000)
    assert 10.0 == pytest.approx(clock.elapsed)
    assert PENDING is caught.value.last


def test_deadline_ends_a_wait() -> None:
    """The caller's deadline limits a wait."""
    with VirtualClock() as clock, tarry.deadline(3), pytest.raises(NotFinished):
        poll_times(clock, 10, 1000)
    assert 3.0 == pytest.approx(clock.elapsed)


def wait_steps(clock: VirtualClock, timeout: float | None, max_steps: int) -> list[float]:
    """Return the seconds of each poll (0 for a short poll), and pauses as negative numbers."""
    operation = ServiceApi().wait("a", timeout)
    step = next(operation)
    steps: list[float] = []
    while len(steps) < max_steps:
        if isinstance(step, (float, int)):
            steps.append(-step)
            clock.advance(step)
        else:
            steps.append(step.wait_s)
            assert ("long_poll" if step.wait_s else "retry") == step.mode
            clock.advance(step.wait_s)
        step = operation.send(PENDING)
    return steps


def test_long_polls_have_no_pauses() -> None:
    """Long polls follow each other without pauses."""
    with VirtualClock() as clock:
        assert [20, 20, 20, 20] == wait_steps(clock, None, 4)


def test_long_polls_end_before_the_timeout() -> None:
    with VirtualClock() as clock, scripted_random([0.999999]):
        steps = wait_steps(clock, 25.0, 4)
        assert [20, 4, 0] == steps[:3]
        assert -0.05 == round(steps[3], 2)
    with VirtualClock() as clock, tarry.deadline(3):
        assert [2, 0] == wait_steps(clock, None, 2)


def test_negative_timeout_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="timeout must be at least 0, got -1"):
        next(ServiceApi().wait("a", -1))
