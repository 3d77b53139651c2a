"""`tarry downstreams`: list, pause, resume and reset."""

from __future__ import annotations

from collections.abc import Callable

from tarry.client import Client
from tests.cli.harness import CommandResult
from tests.integration.flaky import FlakyServer

Ask = Callable[..., CommandResult]


def test_list_has_state_backlog_and_latency(
    ask: Ask, client: Client, target: FlakyServer, lane: str
) -> None:
    """Each host that a task goes to has a row with state, backlog and latency."""
    client.enqueue(target.url, wait=30)
    client.enqueue(target.url, delay=3600)

    heading, *rows = ask("downstreams").out.splitlines()
    (row,) = [row.split() for row in rows if row.split()[0] == lane]
    (told,) = [one for one in ask("downstreams", "--json").json if one["lane"] == lane]

    assert "downstream state pending running dead p50 p95" == " ".join(heading.split())
    assert [lane, "OPEN", "1", "0", "0"] == row[:5]
    assert row[6] in {"ms", "s"}
    assert 1 == told["pending"]


def test_pause_resume_and_reset(ask: Ask, client: Client, target: FlakyServer, lane: str) -> None:
    """A paused downstream gets no attempts until it is resumed."""
    client.enqueue(target.url, wait=30)

    paused = ask("downstreams", "pause", lane)
    held = ask("send", target.url, "--wait", "200ms", "--json")
    resumed = ask("downstreams", "resume", lane, "--json")
    reset = ask("downstreams", "reset", lane)

    assert (0, f"{lane} PAUSED\n") == (paused.code, paused.out)
    assert (1, 0) == (held.code, held.json["attemptNumber"])
    assert "OPEN" == resumed.json["state"]
    assert f"{lane} OPEN\n" == reset.out
    assert "SUCCEEDED" == client.wait(held.json["taskId"], 30).status


def test_invalid_arguments_are_reported(ask: Ask) -> None:
    """An unknown action, a missing and an unknown downstream are reported."""
    unknown = ask("downstreams", "stop", "http:x")
    without = ask("downstreams", "pause")
    missing = ask("downstreams", "pause", "http:nowhere:80")

    assert 2 == unknown.code
    assert "must be one of pause, reset, resume, got 'stop'" in unknown.err
    assert 2 == without.code
    assert "LANE is required: the downstream to pause" in without.err
    assert (3, "", "error: There is no such downstream.\n") == missing
