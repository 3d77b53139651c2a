"""Each call: what is sent, and what is made of the answer."""

from __future__ import annotations

from typing import Any

import pytest

import tarry
from tarry.client import errors
from tests.client.playing import Played, Seen, problem, task_of
from tests.client.talking import Talker

pytestmark = pytest.mark.usefixtures("_hurry")

HOOK = "https://example.com/hook"
JOB = {
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
    "lane": LANE,
    "state": "OPEN",
    "parkedUntil": None,
    "consecutiveOpens": 0,
    "pending": 3,
    "inFlight": 1,
    "dead": 0,
    "lastClaimAt": None,
    "local": None,
}


def paged(key: str, items: list[Any], size: int) -> Any:
    """Answers with pages of a list; the cursor is a place in it."""

    def answer(seen: Seen) -> tuple[int, Any]:
        start = int(seen.query.get("cursor", 0))
        end = start + size
        more = str(end) if end < len(items) else None
        return 200, {key: items[start:end], "nextCursor": more}

    return answer


def test_enqueue_and_wait(talker: Talker, service: Played) -> None:
    """`wait` is asked for in whole seconds, and the target's answer comes with the task."""
    response = {"status": 200, "headers": {}, "body": "done"}
    done = task_of(1, status="SUCCEEDED", response=response)
    service.answers["POST /retry-tasks"] = (201, done)

    task = talker.do("enqueue", HOOK, wait=2.5)

    assert "wait=3" == service.seen[0].headers["prefer"]
    assert ("SUCCEEDED", "done") == (task.status, task.response.body)


def test_pages(talker: Talker, service: Played) -> None:
    """A list is one iterator, however many pages it has, in the order of the service."""
    tasks = [task_of(number) for number in range(250)]
    service.answers["GET /retry-tasks"] = paged("items", tasks, 100)

    found = talker.do("tasks", status="PENDING", policy="webhook", lane=LANE, reason="why")

    assert [task["taskId"] for task in tasks] == [task.task_id for task in found]
    which = {"status": "PENDING", "policyId": "webhook", "lane": LANE, "reason": "why"}
    assert [
        which,
        {**which, "limit": "1000", "cursor": "100"},
        {**which, "limit": "1000", "cursor": "200"},
    ] == [seen.query for seen in service.seen]


def test_a_page_that_is_lost(talker: Talker, service: Played) -> None:
    """A page whose answer was lost is asked for again: nothing twice, nothing left out."""
    service.answers["GET /dead-letters"] = paged("items", [task_of(n) for n in range(5)], 2)
    service.faults.extend(["", "drop", ""])
    found = talker.do("dead_letters")
    assert [task_of(n)["taskId"] for n in range(5)] == [task.task_id for task in found]


@pytest.mark.parametrize("method", ["tasks", "dead_letters", "purge", "replay"])
def test_an_unknown_filter(talker: Talker, service: Played, method: str) -> None:
    """A filter that does not exist is refused, for it would ask for everything."""
    with pytest.raises(TypeError) as caught:
        talker.do(method, polcy="webhook")
    assert f"polcy is not an argument of {method}; did you mean 'policy'?" == str(caught.value)
    with pytest.raises(
        TypeError, match=rf"^zzz is not an argument of {method}; it has .*lane, reason"
    ):
        talker.do(method, zzz=1)
    assert [] == service.seen


def test_many_tasks(talker: Talker, service: Played) -> None:
    """Any number goes in batches of 1,000, and the verdicts come in the order of the tasks."""
    urls = [f"{HOOK}/{number}" for number in range(2_001)]
    results = talker.do("enqueue_many", ({"url": url} for url in urls))
    assert [1000, 1000, 1] == [len(seen.json["tasks"]) for seen in service.seen]
    assert urls == [result.task.target_url for result in results]


def test_many_tasks_half_way(talker: Talker, service: Played) -> None:
    """When a later batch fails, the error says how many tasks had their verdicts."""
    service.faults.extend(["", *["503"] * 4])
    with pytest.raises(errors.ServiceUnavailable) as caught:
        talker.do("enqueue_many", [{"url": HOOK}] * 1_001)
    assert any("first 1000 tasks" in note for note in caught.value.__notes__)


def test_many_tasks_not_at_all(talker: Talker, service: Played) -> None:
    """When the first batch fails, nothing is said of tasks before."""
    service.faults.extend(["503"] * 4)
    with pytest.raises(errors.ServiceUnavailable) as caught:
        talker.do("enqueue_many", [{"url": HOOK}])
    assert not [note for note in getattr(caught.value, "__notes__", ()) if "tasks" in note]


def test_no_tasks(talker: Talker, service: Played) -> None:
    """Nothing to enqueue asks nobody."""
    assert [] == talker.do("enqueue_many", [])
    assert [] == service.seen


def test_verdicts(talker: Talker, service: Played) -> None:
    """A task that is refused does not keep the others out; its problem is in its verdict."""
    refused = {"status": 422, "problem": {"title": "Invalid request", "field": "targetUrl"}}
    told = {"results": [{"status": 201, "task": task_of(1)}, refused]}
    service.answers["POST /retry-tasks/batch"] = (200, told)
    good, bad = talker.do("enqueue_many", [{"url": HOOK}, {"url": "nonsense"}])
    assert (201, "PENDING") == (good.status, good.task.status)
    assert (422, None, "targetUrl") == (bad.status, bad.task, bad.problem["field"])


def test_wait_for_a_task(talker: Talker, service: Played) -> None:
    """A task is looked at until it has ended, however it ended."""
    states = iter(["PENDING", "IN_FLIGHT", "PENDING", "EXHAUSTED"])
    service.answers["GET /retry-tasks/a"] = lambda _: (200, task_of(1, status=next(states)))
    assert "EXHAUSTED" == talker.do("wait", "a").status
    assert ["wait=20"] * 4 == [seen.headers["prefer"] for seen in service.seen]


def test_wait_is_over(talker: Talker, service: Played) -> None:
    """A wait of no time is one look; the error is a TimeoutError that has the task."""
    service.answers["GET /retry-tasks/a"] = (200, task_of(1))
    with pytest.raises(TimeoutError, match="/retry-tasks/a is still PENDING") as caught:
        talker.do("wait", "a", timeout=0)
    assert isinstance(caught.value, errors.NotFinished)
    assert "PENDING" == getattr(caught.value.last, "status", None)
    assert [False] == ["prefer" in seen.headers for seen in service.seen]


def test_retry_and_explain(talker: Talker, service: Played) -> None:
    """A task is named by its id or by itself."""
    task = talker.do("enqueue", HOOK)
    path = f"/retry-tasks/{task.task_id}"
    service.answers[f"POST {path}/retry"] = (200, task_of(1))
    service.answers[f"GET {path}/explain"] = (
        200,
        {
            "taskId": task.task_id,
            "status": "PENDING",
            "reason": None,
            "text": "It waits.",
            "steps": [],
            "next": {"text": "attempt 1", "at": None},
        },
    )
    service.answers[f"GET {path}/attempts"] = paged("items", [], 10)
    assert task.task_id == talker.do("retry", task).task_id
    assert "It waits." == talker.do("explain", task.task_id).text
    assert [] == talker.do("attempts", task)
    assert task.task_id == talker.do("get", task).task_id


def test_replay(talker: Talker, service: Played) -> None:
    """A replay is a handle: it can be looked at again, waited for and ended."""
    states = iter([("RUNNING", 2), ("RUNNING", 5), ("DONE", 7)])

    def look(_: Seen) -> tuple[int, Any]:
        status, replayed = next(states)
        return 200, {**JOB, "status": status, "replayed": replayed}

    service.answers["POST /dead-letters/replays"] = (201, JOB)
    service.answers["GET /dead-letters/replays/r1"] = look
    service.answers["DELETE /dead-letters/replays/r1"] = problem(409, "Already ended", "DONE.")

    replay = talker.do("replay", policy="webhook", before=12.5, rate=5)

    wanted = {"filter": {"policyId": "webhook", "before": 12_500}, "rate": 5.0}
    assert wanted == service.seen[0].json
    assert ("r1", "RUNNING", 7, 0) == (
        replay.replay_id,
        replay.status,
        replay.matched,
        replay.replayed,
    )
    assert 2 == talker.do(replay.refresh).replayed
    assert "DONE" == talker.do(replay.wait).status
    with pytest.raises(errors.Conflict):
        talker.do(replay.cancel)
    assert "DONE" == replay.status


def test_a_dry_run(talker: Talker, service: Played) -> None:
    """A dry run is over as it begins: nobody is asked about it again."""
    told = {**JOB, "replayId": None, "status": "DRY_RUN", "createdAt": None}
    service.answers["POST /dead-letters/replays"] = (200, told)
    replay = talker.do("replay", dry_run=True)
    for act in (replay.refresh, replay.wait, replay.cancel):
        assert 7 == talker.do(act).matched
    assert 1 == len(service.seen)
    assert service.seen[0].json["dryRun"] is True


def test_replays(talker: Talker, service: Played) -> None:
    """A replay can be found again, by another process too."""
    service.answers["GET /dead-letters/replays"] = (200, {"items": [JOB], "nextCursor": None})
    service.answers["DELETE /dead-letters/replays/r1"] = (200, {**JOB, "status": "CANCELLED"})
    (replay,) = talker.do("replays")
    assert "CANCELLED" == talker.do(replay.cancel).status


def test_purge(talker: Talker, service: Played) -> None:
    """What the service leaves for another request is asked for, and counted."""
    left = iter([{"purged": 10, "more": True}, {"purged": 3, "more": False}])
    service.answers["DELETE /dead-letters"] = lambda _: (200, next(left))
    assert 13 == talker.do("purge", lane=LANE)
    assert [{"lane": LANE}] * 2 == [seen.query for seen in service.seen]


def test_policies(talker: Talker, service: Played) -> None:
    """A policy goes out as the API writes it, and comes back in full."""
    kept: dict[str, Any] = {}

    def put(seen: Seen) -> tuple[int, Any]:
        kept.update(
            seen.json,
            policyId="slow",
            version=1,
            createdAt=1,
            totalBudgetMs=None,
            attemptTimeoutMs=30_000,
            maxHintMs=86_400_000,
        )
        return 201, kept

    service.answers["PUT /retry-policies/slow"] = put
    service.answers["GET /retry-policies/slow"] = lambda _: (200, kept)
    service.answers["GET /retry-policies"] = lambda _: (200, {"items": [kept], "nextCursor": None})
    service.answers["DELETE /retry-policies/slow"] = (204, b"")

    put_policy = talker.do("put_policy", "slow", tarry.Policy(max_attempts=9, initial_delay=2.0))

    sent = service.seen[0].json
    assert (9, 2000, "FULL") == (sent["maxAttempts"], sent["initialDelayMs"], sent["jitterType"])
    assert sent.keys().isdisjoint({"attemptTimeoutMs", "maxHintMs"})
    assert (9, 1) == (put_policy.max_attempts, put_policy.version)
    assert put_policy == talker.do("policy", "slow", 1)
    assert {"version": "1"} == service.seen[-1].query
    assert [put_policy] == talker.do("policies")
    assert None is talker.do("delete_policy", "slow")
    talker.do("put_policy", "slow", dict(sent))
    assert sent == service.seen[-1].json


def test_a_policy_that_cannot_be_written(talker: Talker, service: Played) -> None:
    """A policy with a function in it is refused before anything is sent."""
    with pytest.raises(tarry.ConfigurationError, match="backoff is a callable"):
        talker.do("put_policy", "slow", tarry.Policy(backoff=float))
    assert [] == service.seen


@pytest.mark.parametrize("act", ["pause", "resume", "reset"])
def test_downstreams(talker: Talker, service: Played, act: str) -> None:
    """A lane's name is one part of the path, slashes and all; moving it may be repeated."""
    service.answers["GET /downstreams"] = (200, {"items": [DOWNSTREAM], "nextCursor": None})
    path = f"/downstreams/https%3A%2F%2Fexample.com%3A443/{act}"
    service.answers[f"POST {path}"] = (200, DOWNSTREAM)
    (downstream,) = talker.do("downstreams")
    service.faults.append("drop")
    assert downstream == talker.do(act, downstream.lane)
    assert [path, path] == [seen.path for seen in service.seen[1:]]


def test_health(talker: Talker, service: Played) -> None:
    """What the service says of itself is the answer, at once, also when it is ill."""
    service.answers["GET /readyz"] = (200, {"status": "ok"})
    assert talker.do("health").ready
    ill = problem(503, "Service unavailable", "Failing: store.", failing={"store": "disk full"})
    service.answers["GET /readyz"] = ill
    health = talker.do("health")
    assert (False, {"store": "disk full"}) == (health.ready, health.failing)
    assert 2 == len(service.seen)


def test_health_of_another(talker: Talker, service: Played) -> None:
    """A 503 of something that stands before the service is an error."""
    service.answers["GET /readyz"] = (503, b"<html>no upstream</html>")
    with pytest.raises(errors.ServiceUnavailable):
        talker.do("health")
    assert 1 == len(service.seen)
