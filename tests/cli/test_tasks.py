"""`tarry tasks`: list, show, explain, cancel and retry."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tarry.cli.output import format_cell, pluralize, time_of_day, time_since, time_until
from tarry.cli.tasks import explanation_lines
from tarry.client import Client
from tarry.runtime.clocks import system
from tests.cli.harness import CommandResult
from tests.integration.flaky import FlakyServer

Ask = Callable[..., CommandResult]
NOBODY = "01a1dedf-0000-7000-8000-000000000000"


@pytest.fixture
def waiting(client: Client, target: FlakyServer) -> str:
    """A task whose first attempt is in an hour."""
    return client.enqueue(target.url, {"order": 7}, delay=3600).task_id


@pytest.fixture
def failed(client: Client, target: FlakyServer) -> str:
    """A task that is a dead letter after two attempts."""
    sent = client.enqueue(f"{target.url}/?plan=503,404", overrides={"initialDelayMs": 1})
    return client.wait(sent, 30).task_id


def test_list_is_a_row_for_each_task(ask: Ask, lane: str, waiting: str, failed: str) -> None:
    """The list has one line per task, newest first."""
    done = ask("tasks", "list", "--lane", lane)

    heading, first, second = done.out.splitlines()
    assert 0 == done.code, done.err
    assert ["task", "status", "attempts", "next", "target"] == heading.split()
    assert [failed, "EXHAUSTED", "2", "POST"] == first.split()[:4]
    assert [waiting, "PENDING", "0", "in"] == second.split()[:4]


def test_list_as_json(ask: Ask, lane: str, waiting: str, failed: str) -> None:
    """With --json the list is one document; filters and limit apply."""
    every = ask("tasks", "list", "--lane", lane, "--json").json
    one = ask("tasks", "list", "--lane", lane, "--limit", "1", "--json").json
    pending = ask("tasks", "list", "--lane", lane, "--status", "pending", "--json").json
    reason = ask("tasks", "list", "--lane", lane, "--reason", "permanent", "--json").json
    policy = ask("tasks", "list", "--lane", lane, "--policy", "webhook", "--json").json

    assert [failed, waiting] == [task["taskId"] for task in every]
    assert [failed] == [task["taskId"] for task in one]
    assert [waiting] == [task["taskId"] for task in pending]
    assert [failed] == [task["taskId"] for task in reason]
    assert [] == policy


def test_limited_list_is_reported(ask: Ask, lane: str, waiting: str, failed: str) -> None:
    """A list that reaches the limit is reported on standard error."""
    one = ask("tasks", "list", "--lane", lane, "--limit", "1", "--json")
    every = ask("tasks", "list", "--lane", lane, "--limit", "2", "--json")

    assert [failed] == [task["taskId"] for task in one.json]
    assert "only the first 1 are listed; use --limit to list more\n" == one.err
    assert ([failed, waiting], "") == ([task["taskId"] for task in every.json], every.err)


def test_empty_list(ask: Ask, lane: str) -> None:
    """An empty list prints "none"."""
    assert "none\n" == ask("tasks", "list", "--lane", lane).out


def test_unknown_status_is_rejected(ask: Ask) -> None:
    """An unknown status is rejected with the list of statuses."""
    done = ask("tasks", "list", "--status", "lost")

    assert (2, "") == (done.code, done.out)
    assert "--status must be one of CANCELLED, EXHAUSTED," in done.err


def test_show_has_the_task_and_its_attempts(ask: Ask, failed: str) -> None:
    """`show` prints the task and its attempts in order."""
    shown, told = ask("tasks", "show", failed), ask("tasks", "show", failed, "--json").json

    facts, attempts = shown.out.split("\n\n")
    assert [failed, "EXHAUSTED"] == [line.split()[-1] for line in facts.splitlines()[:2]]
    assert 'overrides        {"initialDelayMs": 1}' in facts
    heading, first, second = attempts.splitlines()
    assert ["attempt", "started", "took", "result", "then"] == heading.split()
    assert " 503     next after " in first
    assert " 404     stopped: permanent" in second
    assert [failed, [503, 404]] == [
        told["taskId"],
        [attempt["responseStatus"] for attempt in told["attempts"]],
    ]


def test_show_of_a_pending_task(ask: Ask, waiting: str) -> None:
    """`show` of a pending task has the next attempt and no attempts."""
    out = ask("tasks", "show", waiting).out

    assert "next attempt     in " in out
    assert "started" not in out


def test_explain_is_a_line_for_each_attempt(ask: Ask, failed: str) -> None:
    """`explain` prints a line for each attempt, and what happens next."""
    done = ask("tasks", "explain", failed)

    first, second, following = done.out.splitlines()
    assert first.startswith("attempt 1 got 503; waited ")
    assert "attempt 2 got 404; stopped: the error is not retryable" == second
    assert following.startswith("It is a dead letter: no attempt follows")
    assert 2 == len(ask("tasks", "explain", failed, "--json").json["steps"])


def test_explanation_lines_keep_all_text() -> None:
    """Splitting an explanation keeps all text."""
    text = "2 attempts before; attempt 3 got 503; waited 1 s; stopped: cancelled. Nothing follows."

    assert [
        "2 attempts before",
        "attempt 3 got 503; waited 1 s; stopped: cancelled",
        "Nothing follows.",
    ] == explanation_lines(text, "Nothing follows.")


def test_cancel(ask: Ask, waiting: str) -> None:
    """Cancelling is idempotent."""
    first, again = ask("tasks", "cancel", waiting), ask("tasks", "cancel", waiting, "--json")

    assert (0, f"{waiting} CANCELLED: cancelled\n") == (first.code, first.out)
    assert (0, "CANCELLED") == (again.code, again.json["status"])


def test_cancel_message_depends_on_status(
    ask: Ask, client: Client, target: FlakyServer, waiting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message depends on whether an attempt is running."""
    ended = msgspec.structs.replace(client.cancel(waiting), cancelling=True)
    running = client.enqueue(f"{target.url}/?plan=late&run=slow")
    while client.get(running).status != "IN_FLIGHT":
        system.sleep(0.01, None)

    slow = ask("tasks", "cancel", running.task_id)
    target.go_on.set()
    monkeypatch.setattr(Client, "cancel", lambda *_: ended)
    done = ask("tasks", "cancel", waiting)

    assert f"{running.task_id} IN_FLIGHT: cancelled; the running attempt may finish\n" == slow.out
    assert f"{waiting} CANCELLED: cancelled\n" == done.out


def test_finished_task_cannot_be_cancelled(ask: Ask, failed: str) -> None:
    """Cancelling a finished task exits with 1."""
    done = ask("tasks", "cancel", failed)

    assert (1, "", "error: The task is EXHAUSTED.\n") == done


def test_retry_makes_the_next_attempt_now(
    ask: Ask, client: Client, target: FlakyServer, waiting: str
) -> None:
    """`retry` makes the attempt that was due in an hour."""
    done = ask("tasks", "retry", waiting)

    assert 0 == done.code, done.err
    assert done.out.startswith(f"{waiting} ")
    assert "SUCCEEDED" == client.wait(waiting, 30).status
    assert 1 == len(target.seen[""])


def test_retry_reports_a_paused_downstream(
    ask: Ask, client: Client, lane: str, waiting: str
) -> None:
    """`retry` prints that the downstream is paused."""
    client.pause(lane)
    done = ask("tasks", "retry", waiting)
    client.resume(lane)

    words = "Attempt 1 of 5 waits until an operator resumes its downstream."
    assert (0, f"{waiting} PENDING: {words}\n", "") == done


def test_retry_of_a_running_task(ask: Ask, client: Client, target: FlakyServer) -> None:
    """`retry` during an attempt does not promise another attempt."""
    running = client.enqueue(f"{target.url}/?plan=late&run=slow")
    while client.get(running).status != "IN_FLIGHT":
        system.sleep(0.01, None)

    done = ask("tasks", "retry", running.task_id)
    target.go_on.set()

    words = "an attempt is running; if it fails, the policy decides when the next starts"
    assert (0, f"{running.task_id} IN_FLIGHT: {words}\n", "") == done


@pytest.mark.parametrize("command", ["show", "explain", "cancel", "retry"])
def test_unknown_task_exits_with_3(ask: Ask, command: str) -> None:
    """An unknown task exits with 3."""
    done = ask("tasks", command, NOBODY)

    assert (3, "", "error: There is no such task.\n") == done


def test_cells_are_escaped() -> None:
    """Cells have no markup and no control characters; None is empty."""
    assert ["[bold]\\x1b[2J", "", "7"] == [
        format_cell(one).plain for one in ("[bold]\x1b[2J", None, 7)
    ]


def test_times_are_relative() -> None:
    """Times are shown relative to now."""
    assert ["in 3 s", "now", "3 s ago"] == [
        time_until(5000, 2.0),
        time_until(1000, 2.0),
        time_since(2000, 5.0),
    ]
    assert time_of_day(1_700_000_000_042).endswith(".042")
    assert ["1 attempt", "1,200 attempts"] == [pluralize(1, "attempt"), pluralize(1200, "attempt")]


@pytest.mark.parametrize("command", ["show", "explain", "cancel", "retry"])
def test_id_with_a_slash_exits_with_3(ask: Ask, command: str) -> None:
    """An id with a slash exits with 3, and does not change the path."""
    done = ask("tasks", command, "../x")

    assert (3, "", "error: There is no such task: '../x' has a slash.\n") == done
