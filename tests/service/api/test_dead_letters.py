from __future__ import annotations

import pytest

from tests.service.api.harness import NOW, Rig, with_rig


def test_dead_letters_are_listed() -> None:
    """Only what has died, by reason, policy and lane."""

    async def test(rig: Rig) -> None:
        await rig.create(policyId="webhook")
        (first,) = await rig.die("attempts")
        await rig.create(targetUrl="https://example.org/")
        (second,) = await rig.die("permanent")
        await rig.create()

        async def ids(query: str = "") -> list[str]:
            reply = await rig.ask("GET", f"/dead-letters{query}")
            return [letter["taskId"] for letter in reply.json["items"]]

        assert [second, first] == await ids()
        assert [first] == await ids("?reason=attempts")
        assert [first] == await ids("?policyId=webhook")
        assert [second] == await ids("?lane=https:example.org:443")
        letter = (await rig.ask("GET", "/dead-letters?limit=1")).json["items"][0]
        assert ("EXHAUSTED", "permanent", 1) == (
            letter["status"],
            letter["reason"],
            letter["attemptNumber"],
        )

    with_rig(test)


def test_a_dry_run_counts_and_changes_nothing() -> None:
    """200, without a job."""

    async def test(rig: Rig) -> None:
        await rig.create()
        await rig.die()
        reply = await rig.ask("POST", "/dead-letters/replays", {"dryRun": True})
        assert (200, None, "DRY_RUN", 1) == (
            reply.status,
            reply.json["replayId"],
            reply.json["status"],
            reply.json["matched"],
        )
        assert [] == (await rig.ask("GET", "/dead-letters/replays")).json["items"]

    with_rig(test)


def test_a_replay_is_a_job() -> None:
    """201 with its place; it is told, listed, and can be cancelled while it runs."""

    async def test(rig: Rig) -> None:
        await rig.create()
        (letter,) = await rig.die()
        asked = {"filter": {"lane": "https:example.com:443", "reason": "attempts"}, "rate": 5}
        reply = await rig.ask("POST", "/dead-letters/replays", asked)
        path = f"/dead-letters/replays/{reply.json['replayId']}"
        assert (201, path) == (reply.status, reply.header("location"))
        expected = {
            "replayId": reply.json["replayId"],
            "status": "RUNNING",
            "filter": {"lane": "https:example.com:443", "reason": "attempts", "before": NOW},
            "rate": 5.0,
            "matched": 1,
            "replayed": 0,
            "createdAt": NOW,
            "finishedAt": None,
        }
        assert expected == reply.json == (await rig.ask("GET", path)).json
        assert [expected] == (await rig.ask("GET", "/dead-letters/replays")).json["items"]
        cancelled = await rig.ask("DELETE", path)
        assert (200, "CANCELLED") == (cancelled.status, cancelled.json["status"])
        assert "EXHAUSTED" == (await rig.ask("GET", f"/retry-tasks/{letter}")).json["status"]

    with_rig(test)


def test_a_replay_that_is_done_cannot_be_cancelled() -> None:
    """409; what it brought back stays."""

    async def test(rig: Rig) -> None:
        await rig.create()
        (letter,) = await rig.die()
        job = (await rig.ask("POST", "/dead-letters/replays", {})).json
        await rig.store.replay_step(job["replayId"], 10)
        assert 409 == (await rig.ask("DELETE", f"/dead-letters/replays/{job['replayId']}")).status
        assert "PENDING" == (await rig.ask("GET", f"/retry-tasks/{letter}")).json["status"]

    with_rig(test)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_replay_that_is_not_there(method: str) -> None:
    """404."""

    async def test(rig: Rig) -> None:
        assert 404 == (await rig.ask(method, "/dead-letters/replays/x")).status

    with_rig(test)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"rate": -1}, "rate"),
        ({"rate": 0}, "rate"),
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
    ],
)
def test_a_bad_replay_is_refused_by_its_field(asked: dict[str, object], field: str) -> None:
    """422, and there is no job."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask("POST", "/dead-letters/replays", asked)
        assert (422, field) == (reply.status, reply.problem["field"])
        assert [] == (await rig.ask("GET", "/dead-letters/replays")).json["items"]

    with_rig(test)


def test_a_filter_that_there_is_not_is_told_those_that_there_are() -> None:
    """Also within a form."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask("POST", "/dead-letters/replays", {"filter": {"lan": "x"}})
        detail = "filter.lan is not a known field; did you mean lane?"
        assert detail == reply.problem["detail"]

    with_rig(test)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_reason_that_no_letter_has_is_refused(method: str) -> None:
    """422 with those that there are."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask(method, "/dead-letters?reason=bogus")
        assert (422, "reason") == (reply.status, reply.problem["field"])
        assert "permanent or overloaded" in reply.problem["detail"]

    with_rig(test)


def test_dead_letters_can_be_removed() -> None:
    """Those that the filter names, and no task that lives."""

    async def test(rig: Rig) -> None:
        await rig.create()
        await rig.die("attempts")
        await rig.create()
        await rig.die("permanent")
        await rig.create()
        reply = await rig.ask("DELETE", "/dead-letters?reason=permanent")
        assert (200, {"purged": 1, "more": False}) == (reply.status, reply.json)
        assert 2 == await rig.count()
        everything = await rig.ask("DELETE", "/dead-letters")
        assert {"purged": 1, "more": False} == everything.json
        assert 1 == await rig.count()

    with_rig(test)


def test_a_purge_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one request does not remove is told, and takes another."""
    monkeypatch.setattr("tarry.service.api.dead_letters._PURGE_CHUNK", 2)
    monkeypatch.setattr("tarry.service.api.dead_letters._MAX_PURGE_CHUNKS", 2)

    async def test(rig: Rig) -> None:
        for _ in range(5):
            await rig.create()
        await rig.die()
        purged = [(await rig.ask("DELETE", "/dead-letters")).json for _ in range(2)]
        assert [{"purged": 4, "more": True}, {"purged": 1, "more": False}] == purged

    with_rig(test)
