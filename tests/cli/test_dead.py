"""`tarry dead`: list, replay and purge dead letters."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tarry.client import Client
from tests.cli.harness import CommandResult
from tests.integration.flaky import FlakyServer

Ask = Callable[..., CommandResult]


@pytest.fixture
def dead_letters(client: Client, target: FlakyServer) -> list[str]:
    """Two dead letters that would succeed when replayed; newest first."""
    sent = [client.enqueue(f"{target.url}/?plan=404,200&run={run}", wait=30) for run in "ab"]
    return [task.task_id for task in reversed(sent)]


def test_list(ask: Ask, lane: str, dead_letters: list[str]) -> None:
    """The list has only dead letters, with the reason of each."""
    shown = ask("dead", "list", "--lane", lane)
    told = ask("dead", "list", "--lane", lane, "--limit", "1", "--json").json

    heading, *rows = shown.out.splitlines()
    assert ["task", "reason", "attempts", "died", "target"] == heading.split()
    assert [[letter, "permanent", "1"] for letter in dead_letters] == [
        row.split()[:3] for row in rows
    ]
    assert all(re.search(r" ago +POST http://", row) for row in rows)  # ages differ in width
    assert dead_letters[:1] == [task["taskId"] for task in told]


def test_dry_run_counts_and_changes_nothing(ask: Ask, lane: str, dead_letters: list[str]) -> None:
    """`replay --dry-run` counts the dead letters and replays none."""
    done = ask("dead", "replay", "--lane", lane, "--dry-run")

    assert (0, "2 dead letters would be replayed\n", "") == done
    assert 2 == len(ask("dead", "list", "--lane", lane, "--json").json)


def test_replay_of_a_downstream(
    ask: Ask, client: Client, lane: str, dead_letters: list[str]
) -> None:
    """`replay --lane` prints the replay job, and its tasks are delivered."""
    done = ask("dead", "replay", "--lane", lane, "--rate", "1000")

    assert 0 == done.code, done.err
    assert done.out.endswith(": 2 dead letters to replay, 1000 per second\n")
    for job in client.replays():
        job.wait(30)
    assert ["SUCCEEDED"] * 2 == [client.wait(letter, 30).status for letter in dead_letters]


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--json",)])
def test_replay_without_match_creates_no_job(
    ask: Ask, client: Client, lane: str, dead_letters: list[str], options: tuple[str, ...]
) -> None:
    """When no dead letter matches, no replay job is created."""
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
def test_unknown_downstream_or_policy(
    ask: Ask,
    client: Client,
    dead_letters: list[str],
    command: tuple[str, ...],
    option: str,
    name: str,
    hint: str,
) -> None:
    """An unknown downstream or policy in a filter exits with 3, and nothing is done."""
    before = [job.replay_id for job in client.replays()]
    done = ask("dead", *command, option, name)

    assert (3, "") == (done.code, done.out)
    assert done.err.startswith(f"error: {option}: there is no ")
    assert done.err.endswith(f"{hint}\n")
    assert before == [job.replay_id for job in client.replays()]


def test_replay_of_one(ask: Ask, client: Client, lane: str, dead_letters: list[str]) -> None:
    """A single dead letter is replayed by its id."""
    done = ask("dead", "replay", dead_letters[0])

    assert 0 == done.code, done.err
    assert "SUCCEEDED" == client.wait(dead_letters[0], 30).status
    assert dead_letters[1:] == [
        task["taskId"] for task in ask("dead", "list", "--lane", lane, "--json").json
    ]


def test_task_id_and_filters_are_exclusive(ask: Ask) -> None:
    """A task id cannot be combined with filters."""
    done = ask("dead", "replay", "some-id", "--lane", "x")

    assert 2 == done.code
    assert "TASK cannot be combined with --policy" in done.err


def test_invalid_rate_names_the_option(ask: Ask) -> None:
    """An invalid rate is reported under the name of the option."""
    done = ask("dead", "replay", "--rate", "-1")

    assert (2, "", "error: --rate must be greater than 0, got -1.0\n") == done


def test_purge_asks_for_confirmation(ask: Ask, lane: str, dead_letters: list[str]) -> None:
    """Without confirmation nothing is deleted and the exit code is 1; "y" deletes."""
    no = ask("dead", "purge", "--lane", lane, stdin=b"n\n", is_terminal=True)
    kept = ask("dead", "list", "--lane", lane, "--json").json
    yes = ask("dead", "purge", "--lane", lane, stdin=b"y\n", is_terminal=True)

    assert 1 == no.code
    assert "Delete 2 dead letters permanently? [y/N] nothing was deleted\n" == no.err
    assert 2 == len(kept)
    assert (0, "2 dead letters deleted\n") == (yes.code, yes.out)


def test_purge_of_nothing_asks_nothing(ask: Ask, lane: str, dead_letters: list[str]) -> None:
    """When no dead letter matches, no confirmation is asked for."""
    done = ask("dead", "purge", "--lane", lane, "--reason", "deadline", is_terminal=True)

    assert (0, "no dead letters match\n", "") == done


def test_purge_without_terminal_requires_yes(ask: Ask, lane: str, dead_letters: list[str]) -> None:
    """Without a terminal, `purge` requires --yes."""
    without = ask("dead", "purge", "--lane", lane)
    given = ask("dead", "purge", "--lane", lane, "--yes", "--json")

    assert 2 == without.code
    assert "--yes is required" in without.err
    assert {"purged": 2} == given.json
