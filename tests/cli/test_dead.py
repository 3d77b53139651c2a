"""`tarry dead`: dead letters are listed, brought back and removed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tarry.client import Client
from tests.cli.harness import CommandResult
from tests.integration.flaky import FlakyServer

Ask = Callable[..., CommandResult]


@pytest.fixture
def letters(client: Client, target: FlakyServer) -> list[str]:
    """Two dead letters, which would succeed now; newest first."""
    sent = [client.enqueue(f"{target.url}/?plan=404,200&run={run}", wait=30) for run in "ab"]
    return [task.task_id for task in reversed(sent)]


def test_list(ask: Ask, lane: str, letters: list[str]) -> None:
    """Only what has died is there, and why."""
    shown = ask("dead", "list", "--lane", lane)
    told = ask("dead", "list", "--lane", lane, "--limit", "1", "--json").json

    heading, *rows = shown.out.splitlines()
    assert ["task", "reason", "attempts", "died", "target"] == heading.split()
    assert [[letter, "permanent", "1"] for letter in letters] == [row.split()[:3] for row in rows]
    assert all(" ago  POST http://" in row for row in rows)
    assert letters[:1] == [task["taskId"] for task in told]


def test_dry_run_counts_and_changes_nothing(ask: Ask, lane: str, letters: list[str]) -> None:
    """Look before you leap."""
    done = ask("dead", "replay", "--lane", lane, "--dry-run")

    assert (0, "2 dead letters would be replayed\n", "") == done
    assert 2 == len(ask("dead", "list", "--lane", lane, "--json").json)


def test_replay_brings_back_those_of_a_downstream(
    ask: Ask, client: Client, lane: str, letters: list[str]
) -> None:
    """The job is told, and the letters arrive."""
    done = ask("dead", "replay", "--lane", lane, "--rate", "1000")

    assert 0 == done.code, done.err
    assert done.out.endswith(": 2 dead letters to replay, 1000 per second\n")
    for job in client.replays():
        job.wait(30)
    assert ["SUCCEEDED"] * 2 == [client.wait(letter, 30).status for letter in letters]


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--json",)])
def test_replay_of_nothing_stores_no_job(
    ask: Ask, client: Client, lane: str, letters: list[str], options: tuple[str, ...]
) -> None:
    """The downstream is there, and no letter of it ended so."""
    before = [job.replay_id for job in client.replays()]
    done = ask(
        "dead", "replay", "--lane", lane, "--policy", "default", "--reason", "deadline", *options
    )

    assert 0 == done.code, done.err
    if "--json" in options:
        assert (None, 0) == (done.json["replayId"], done.json["matched"])
    else:
        assert "no dead letters match\n" == done.out
    assert before == [job.replay_id for job in client.replays()]


@pytest.mark.parametrize("command", [("replay",), ("replay", "--dry-run"), ("purge", "--yes")])
@pytest.mark.parametrize(
    ("option", "name", "hint"),
    [
        (
            "--lane",
            "127.0.0.1:9009",
            "http:host:port or https:host:port; `tarry downstreams` lists all",
        ),
        ("--policy", "nope", "`tarry policy list` lists all"),
    ],
)
def test_downstream_or_policy_that_is_not_there(
    ask: Ask,
    client: Client,
    letters: list[str],
    command: tuple[str, ...],
    option: str,
    name: str,
    hint: str,
) -> None:
    """It is told from one without dead letters, and nothing is done."""
    before = [job.replay_id for job in client.replays()]
    done = ask("dead", *command, option, name)

    assert (3, "") == (done.code, done.out)
    assert done.err.startswith(f"error: {option}: there is no ")
    assert done.err.endswith(f"{hint}\n")
    assert before == [job.replay_id for job in client.replays()]


def test_replay_of_one(ask: Ask, client: Client, lane: str, letters: list[str]) -> None:
    """By its id; the other stays dead."""
    done = ask("dead", "replay", letters[0])

    assert 0 == done.code, done.err
    assert "SUCCEEDED" == client.wait(letters[0], 30).status
    assert letters[1:] == [
        task["taskId"] for task in ask("dead", "list", "--lane", lane, "--json").json
    ]


def test_one_and_several_cannot_be_meant(ask: Ask) -> None:
    """An option that would be ignored is refused."""
    done = ask("dead", "replay", "some-id", "--lane", "x")

    assert 2 == done.code
    assert "TASK cannot be combined with --policy" in done.err


def test_wrong_rate_is_named_as_it_was_given(ask: Ask) -> None:
    """By the option."""
    done = ask("dead", "replay", "--rate", "-1")

    assert (2, "", "error: --rate must be greater than 0, got -1.0\n") == done


def test_purge_asks_first(ask: Ask, lane: str, letters: list[str]) -> None:
    """A no ends with 1 and removes nothing; a yes removes what was counted."""
    no = ask("dead", "purge", "--lane", lane, stdin=b"n\n", is_terminal=True)
    kept = ask("dead", "list", "--lane", lane, "--json").json
    yes = ask("dead", "purge", "--lane", lane, stdin=b"y\n", is_terminal=True)

    assert 1 == no.code
    assert "Delete 2 dead letters permanently? [y/N] nothing was deleted\n" == no.err
    assert 2 == len(kept)
    assert (0, "2 dead letters deleted\n") == (yes.code, yes.out)


def test_purge_of_nothing_asks_nothing(ask: Ask, lane: str, letters: list[str]) -> None:
    """There is nothing to say yes to."""
    done = ask("dead", "purge", "--lane", lane, "--reason", "deadline", is_terminal=True)

    assert (0, "no dead letters match\n", "") == done


def test_purge_in_a_script_needs_a_yes(ask: Ask, lane: str, letters: list[str]) -> None:
    """Where nobody can be asked, the answer is on the command line."""
    without = ask("dead", "purge", "--lane", lane)
    given = ask("dead", "purge", "--lane", lane, "--yes", "--json")

    assert 2 == without.code
    assert "--yes is required" in without.err
    assert {"purged": 2} == given.json
