"""`/dead-letters`: list, purge and replay."""

from __future__ import annotations

import pytest

from tarry.service import task_search
from tarry.service.model import ReplayRecord
from tarry.wire.tasks import Search
from tests.service.api.harness import NOW, ApiHarness


async def test_dead_letters_are_listed(api: ApiHarness) -> None:
    """Only EXHAUSTED tasks are listed, filtered by reason, policy and lane."""
    await api.create(policyId="webhook")
    (first,) = await api.exhaust_due_tasks("attempts")
    await api.create(targetUrl="https://example.org/")
    (second,) = await api.exhaust_due_tasks("permanent")
    await api.create()

    async def list_ids(query: str = "") -> list[str]:
        response = await api.request("GET", f"/dead-letters{query}")
        return [letter["taskId"] for letter in response.json["items"]]

    assert [second, first] == await list_ids()
    assert [first] == await list_ids("?reason=attempts")
    assert [first] == await list_ids("?policyId=webhook")
    assert [second] == await list_ids("?lane=https:example.org:443")
    letter = (await api.request("GET", "/dead-letters?limit=1")).json["items"][0]
    assert ("EXHAUSTED", "permanent", 1) == (
        letter["status"],
        letter["reason"],
        letter["attemptNumber"],
    )


async def test_dead_letters_are_grouped(api: ApiHarness) -> None:
    """Groups have a reason, a downstream, a count and the last result of the newest dead letter."""
    for _ in range(2):
        await api.create(policyId="webhook")
        await api.exhaust_due_tasks("attempts")
    await api.create(targetUrl="https://example.org/")
    (newest,) = await api.exhaust_due_tasks("permanent")
    await api.create()

    async def read_groups(query: str = "") -> list[tuple[str, str, int]]:
        response = await api.request("GET", f"/dead-letters/groups{query}")
        assert response.json["nextCursor"] is None
        return [(item["reason"], item["lane"], item["count"]) for item in response.json["items"]]

    permanent = ("permanent", "https:example.org:443", 1)
    attempts = ("attempts", "https:example.com:443", 2)
    assert [permanent, attempts] == await read_groups()
    assert [attempts] == await read_groups("?policyId=webhook")
    assert [permanent] == await read_groups("?urlPrefix=https://example.org")
    group = (await api.request("GET", "/dead-letters/groups")).json["items"][0]
    assert (newest, NOW, 503, None) == (
        group["newestTaskId"],
        group["newestFinishedAt"],
        group["newestStatus"],
        group["newestError"],
    )


async def test_dead_letters_can_be_searched(api: ApiHarness) -> None:
    """URL prefix, key, time, status and error select dead letters in lists, replays and purges."""
    await api.create(targetUrl="https://example.com/orders/1", idempotencyKey="order-1")
    (first,) = await api.exhaust_due_tasks()
    api.time.ms += 5_000
    await api.create(targetUrl="https://EXAMPLE.com:443/users")
    (second,) = await api.exhaust_due_tasks()

    async def list_ids(query: str) -> list[str]:
        response = await api.request("GET", f"/dead-letters?{query}")
        return [letter["taskId"] for letter in response.json["items"]]

    assert [first] == await list_ids("urlPrefix=https://example.com/orders")
    assert [second, first] == await list_ids("urlPrefix=https://Example.com")
    assert [second, first] == await list_ids("lastStatus=5xx&lane=https:example.com:443")
    assert [] == await list_ids("lastStatus=404")
    assert [] == await list_ids("error=timeout")
    assert [first] == await list_ids("idempotencyKey=order-1")
    assert [second] == await list_ids(f"createdAfter={NOW + 1}")
    assert [first] == await list_ids(f"createdBefore={NOW + 1}")
    assert [second] == await list_ids(f"finishedAfter={NOW + 1}")
    assert [first] == await list_ids(f"finishedBefore={NOW + 1}")
    search = {"urlPrefix": "https://example.com/users", "lastStatus": "503"}
    job = await api.request("POST", "/dead-letters/replays", {"filter": search, "dryRun": True})
    assert (1, search) == (job.json["matched"], job.json["filter"])
    purged = await api.request("DELETE", "/dead-letters?urlPrefix=https://example.com/users")
    assert {"purged": 1, "more": False, "nextCursor": None} == purged.json
    assert [first] == await list_ids("")


async def test_groups_are_not_counted_for_a_client_that_has_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one page is read; the cursor continues after it."""
    monkeypatch.setattr(task_search, "_GROUP_PAGE_TASKS", 1)
    api = ApiHarness()

    for _ in range(3):
        await api.create()
        await api.exhaust_due_tasks()
    path = "/dead-letters/groups"
    first = (await api.request("GET", path, is_abandoned=lambda: True)).json
    assert [1] == [group["count"] for group in first["items"]]
    rest = (await api.request("GET", f"{path}?cursor={first['nextCursor']}")).json
    assert [2] == [group["count"] for group in rest["items"]]


async def test_tasks_are_found_by_a_url_up_to_a_secret_query_parameter(api: ApiHarness) -> None:
    """A longer prefix is rejected: its matches would reveal the secret, one character at a time."""
    await api.create(targetUrl="https://example.com/?user=7&token=s3cret")
    for prefix, matches in (("user=7", 1), ("user=7%26token=", 1), ("user=8%26token=", 0)):
        response = await api.request(
            "GET", f"/retry-tasks?urlPrefix=https://example.com/%3F{prefix}"
        )
        assert (200, matches) == (response.status, len(response.json["items"]))


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("urlPrefix=example.com/orders", "urlPrefix"),
        ("urlPrefix=https:", "urlPrefix"),
        ("urlPrefix=https://example.com/%3Ftoken=s", "urlPrefix"),
        ("urlPrefix=https://example.com/%3Fa=1%26api%255Fkey=s%26b=1", "urlPrefix"),
        ("createdAfter=1700000000", "createdAfter"),
        ("finishedBefore=x", "finishedBefore"),
        ("lastStatus=600", "lastStatus"),
        ("lastStatus=5*", "lastStatus"),
        ("error=", "error"),
        ("idempotencyKey=", "idempotencyKey"),
    ],
)
@pytest.mark.parametrize("path", ["/retry-tasks", "/dead-letters", "/dead-letters/groups"])
async def test_an_invalid_search_is_422_with_its_field(
    api: ApiHarness, path: str, query: str, field: str
) -> None:
    """An invalid value is rejected, because an empty list would be misleading."""
    response = await api.request("GET", f"{path}?{query}")
    assert (422, field) == (response.status, response.problem["field"])


async def test_a_stored_replay_does_not_show_a_secret_of_its_url_prefix(api: ApiHarness) -> None:
    """Earlier versions accepted a prefix with the value of a secret query parameter."""
    search = Search(status="EXHAUSTED", url_prefix="https://a.example/?token=s3cret")
    replay = ReplayRecord(id="r", tenant="default", search=search)

    await api.store.start_replay(replay)
    (item,) = (await api.request("GET", "/dead-letters/replays")).json["items"]
    assert "https://a.example/?token=[redacted]" == item["filter"]["urlPrefix"]


async def test_a_dry_run_counts_and_changes_nothing(api: ApiHarness) -> None:
    """The response is a 200 without a replay id."""
    await api.create()
    await api.exhaust_due_tasks()
    response = await api.request("POST", "/dead-letters/replays", {"dryRun": True})
    assert (200, None, "DRY_RUN", 1) == (
        response.status,
        response.json["replayId"],
        response.json["status"],
        response.json["matched"],
    )
    assert [] == (await api.request("GET", "/dead-letters/replays")).json["items"]


async def test_a_replay_is_a_job(api: ApiHarness) -> None:
    """A replay has a Location, can be read and listed, and can be cancelled while it runs."""
    await api.create()
    (letter,) = await api.exhaust_due_tasks()
    document = {"filter": {"lane": "https:example.com:443", "reason": "attempts"}, "rate": 5}
    response = await api.request("POST", "/dead-letters/replays", document)
    path = f"/dead-letters/replays/{response.json['replayId']}"
    assert (201, path) == (response.status, response.header("location"))
    expected = {
        "replayId": response.json["replayId"],
        "status": "RUNNING",
        "filter": {"lane": "https:example.com:443", "reason": "attempts", "before": NOW},
        "rate": 5.0,
        "matched": 1,
        "replayed": 0,
        "createdAt": NOW,
        "finishedAt": None,
        "finished": {},
    }
    assert expected == response.json == (await api.request("GET", path)).json
    assert [expected] == (await api.request("GET", "/dead-letters/replays")).json["items"]
    cancelled = await api.request("DELETE", path)
    assert (200, "CANCELLED") == (cancelled.status, cancelled.json["status"])
    assert "EXHAUSTED" == (await api.request("GET", f"/retry-tasks/{letter}")).json["status"]


@pytest.mark.parametrize(("document", "rate"), [({}, 50), ({"rate": 0}, 0), ({"rate": 7}, 7)])
async def test_a_replay_has_a_default_rate(
    api: ApiHarness, document: dict[str, object], rate: float
) -> None:
    """Without a rate, a replay has 50 tasks per second; 0 means no limit."""
    response = await api.request("POST", "/dead-letters/replays", {"all": True, **document})
    assert (201, rate) == (response.status, response.json["rate"])


async def test_the_number_of_unfinished_replays_is_limited(api: ApiHarness) -> None:
    """The 101st unfinished replay of a tenant is a 429; after a cancel, another can start."""
    path = "/dead-letters/replays"
    created = [await api.request("POST", path, {"all": True}) for _ in range(100)]
    assert {201} == {response.status for response in created}
    rejected = await api.request("POST", path, {"all": True})
    assert 429 == rejected.status
    assert "100 replays" in rejected.problem["detail"]
    assert 200 == (await api.request("POST", path, {"dryRun": True})).status
    await api.request("DELETE", f"{path}/{created[0].json['replayId']}")
    assert 201 == (await api.request("POST", path, {"all": True})).status


async def test_a_replay_that_is_done_cannot_be_cancelled(api: ApiHarness) -> None:
    """A replay is DONE when its tasks have finished; then cancelling it is a 409."""
    await api.create()
    (letter,) = await api.exhaust_due_tasks()
    path = (await api.request("POST", "/dead-letters/replays", {"all": True})).header(
        "location"
    ) or ""
    job = (await api.request("GET", path)).json
    await api.store.replay_step(job["replayId"], None, [letter], None)
    running = (await api.request("GET", path)).json
    assert ("RUNNING", 1, {}) == (running["status"], running["replayed"], running["finished"])
    await api.exhaust_due_tasks()
    api.time.ms += 1_000
    await api.store.replay_step(job["replayId"], None, [], None)
    done = (await api.request("GET", path)).json
    assert ("DONE", {"EXHAUSTED": 1}) == (done["status"], done["finished"])
    assert 409 == (await api.request("DELETE", path)).status
    assert "EXHAUSTED" == (await api.request("GET", f"/retry-tasks/{letter}")).json["status"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_an_unknown_replay_is_404(api: ApiHarness, method: str) -> None:
    """GET and DELETE of an unknown replay return 404."""
    assert 404 == (await api.request(method, "/dead-letters/replays/x")).status


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"rate": -1}, "rate"),
        ({"rate": 0.0009}, "rate"),
        ({"rate": 1e-300}, "rate"),
        ({"filter": {"before": NOW // 1000}}, "filter.before"),
        ({"filter": {"reason": "bogus"}}, "filter.reason"),
        ({"rate": "fast"}, "rate"),
        ({"dryRun": 1}, "dryRun"),
        ({"filter": {"status": "PENDING"}}, "filter.status"),
        ({"filter": {"before": -1}}, "filter.before"),
        ({"filter": {"policyId": ""}}, "filter.policyId"),
        ({"filter": {"lane": ""}}, "filter.lane"),
        ({"lane": "x"}, "lane"),
        ({}, "all"),
        ({"filter": {"lane": None}, "all": False}, "all"),
    ],
)
async def test_an_invalid_replay_is_422_with_its_field(
    api: ApiHarness, document: dict[str, object], field: str
) -> None:
    """An invalid replay creates no job."""
    response = await api.request("POST", "/dead-letters/replays", document)
    assert (422, field) == (response.status, response.problem["field"])
    assert [] == (await api.request("GET", "/dead-letters/replays")).json["items"]


async def test_an_unknown_filter_suggests_a_similar_filter(api: ApiHarness) -> None:
    """The suggestion works for a field of a nested object."""
    response = await api.request("POST", "/dead-letters/replays", {"filter": {"lan": "x"}})
    detail = "filter.lan is not a known field; did you mean lane?"
    assert detail == response.problem["detail"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_an_unknown_reason_is_422(api: ApiHarness, method: str) -> None:
    """The problem lists the known reasons."""
    response = await api.request(method, "/dead-letters?reason=bogus")
    assert (422, "reason") == (response.status, response.problem["field"])
    assert "permanent or overloaded" in response.problem["detail"]


async def test_matching_dead_letters_are_purged(api: ApiHarness) -> None:
    """Only dead letters that match the filter are deleted."""
    await api.create()
    await api.exhaust_due_tasks("attempts")
    await api.create()
    await api.exhaust_due_tasks("permanent")
    await api.create()
    response = await api.request("DELETE", "/dead-letters?reason=permanent")
    result = {"purged": 1, "more": False, "nextCursor": None}
    assert (200, result) == (response.status, response.json)
    assert 2 == await api.count_tasks()
    everything = await api.request("DELETE", "/dead-letters?all=true")
    assert result == everything.json
    assert 1 == await api.count_tasks()


@pytest.mark.parametrize("query", ["", "?all=false"])
async def test_a_purge_without_a_filter_is_422(api: ApiHarness, query: str) -> None:
    """Nothing is deleted without a filter, unless `all` is true."""
    await api.create()
    await api.exhaust_due_tasks()
    response = await api.request("DELETE", f"/dead-letters{query}")
    detail = (
        "all must be true if no filter is given; filters are policyId, lane, reason, "
        "urlPrefix, idempotencyKey, createdAfter, createdBefore, finishedAfter, "
        "finishedBefore, lastStatus, error."
    )
    assert (422, detail) == (response.status, response.problem["detail"])
    assert 1 == await api.count_tasks()


async def test_a_replay_without_a_filter_is_422(api: ApiHarness) -> None:
    """The error lists all filters of a replay."""
    response = await api.request("POST", "/dead-letters/replays", {"filter": {}})
    detail = (
        "all must be true if no filter is given; filters are lane, policyId, urlPrefix, "
        "idempotencyKey, createdAfter, createdBefore, lastStatus, error, reason, before, "
        "finishedAfter, finishedBefore."
    )
    assert (422, detail) == (response.status, response.problem["detail"])


async def test_one_request_purges_a_limited_number(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The field `more` of the response is true while matching dead letters remain."""
    monkeypatch.setattr("tarry.service.api.dead_letters._PURGE_CHUNK_TASKS", 2)
    monkeypatch.setattr("tarry.service.api.dead_letters._MAX_PURGE_CHUNKS", 2)

    for _ in range(5):
        await api.create()
    await api.exhaust_due_tasks()
    first = (await api.request("DELETE", "/dead-letters?all=true")).json
    assert (4, True) == (first["purged"], first["more"])
    second = await api.request("DELETE", f"/dead-letters?all=true&cursor={first['nextCursor']}")
    assert {"purged": 1, "more": False, "nextCursor": None} == second.json
    invalid = await api.request("DELETE", "/dead-letters?all=true&cursor=x")
    assert (422, "cursor") == (invalid.status, invalid.problem["field"])
