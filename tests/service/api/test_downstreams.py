from __future__ import annotations

import pytest

from tests.service.api.harness import NOW, Rig, with_rig

LANE = "https:example.com:443"


def test_downstreams_are_listed_with_what_is_known_here() -> None:
    """The backlog that all share, and the standing of this process."""

    async def test(rig: Rig) -> None:
        await rig.create()
        await rig.create(targetUrl="https://example.org/")
        reply = await rig.ask("GET", "/downstreams")
        expected = {
            "lane": LANE,
            "state": "OPEN",
            "parkedUntil": None,
            "consecutiveOpens": 0,
            "pending": 1,
            "inFlight": 0,
            "dead": 0,
            "lastClaimAt": None,
            "local": {
                "breaker": "closed",
                "budget": 9.5,
                "running": 1,
                "leased": 2,
                "p50Ms": 12.0,
                "p95Ms": None,
            },
        }
        assert expected == reply.json["items"][0]
        assert [LANE, "https:example.org:443"] == [one["lane"] for one in reply.json["items"]]
        first = (await rig.ask("GET", "/downstreams?limit=1")).json
        rest = (await rig.ask("GET", f"/downstreams?cursor={first['nextCursor']}")).json
        assert reply.json["items"] == first["items"] + rest["items"]

    with_rig(test)


def test_an_operator_has_a_hand_on_it() -> None:
    """Pause, resume and reset, each answered with the new state."""

    async def test(rig: Rig) -> None:
        await rig.create()
        states = [
            (await rig.ask("POST", f"/downstreams/{LANE}/{hand}")).json["state"]
            for hand in ("pause", "resume", "pause", "reset")
        ]
        assert ["PAUSED", "OPEN", "PAUSED", "OPEN"] == states

    with_rig(test)


def test_a_breaker_shows_in_the_state() -> None:
    """Parked until its time, probing from then on."""

    async def test(rig: Rig) -> None:
        await rig.create()
        await rig.store.park(f"default/{LANE}", NOW + 1_000, probes=1, opened=2)
        parked = (await rig.ask("GET", f"/downstreams/{LANE}")).json
        assert ("PARKED", NOW + 1_000, 2) == (
            parked["state"],
            parked["parkedUntil"],
            parked["consecutiveOpens"],
        )
        rig.time.ms += 1_000
        assert "PROBING" == (await rig.ask("GET", f"/downstreams/{LANE}")).json["state"]

    with_rig(test)


@pytest.mark.parametrize("lane", ["x", "a/b/c", "https://example.com", "default%2Fx"])
@pytest.mark.parametrize("rest", ["", "/pause", "/resume", "/reset"])
def test_a_downstream_that_is_not_there(lane: str, rest: str) -> None:
    """404, and none is made."""

    async def test(rig: Rig) -> None:
        method = "POST" if rest else "GET"
        assert 404 == (await rig.ask(method, f"/downstreams/{lane}{rest}")).status
        assert [] == (await rig.store.list_lanes(None)).items

    with_rig(test)
