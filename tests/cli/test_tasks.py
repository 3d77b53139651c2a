"""`tarry tasks`: list, show, explain, cancel and retry. `tarry dead`: list, replay, purge."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tarry.cli.tasks import explanation_lines, print_explanation
from tarry.client import Client, ServiceUnreachable
from tarry.runtime.effects import effects
from tarry.wire.tasks import BulkCancelResult
from tests.cli.harness import CommandResult
from tests.integration.flaky import FlakyServer

RunCli = Callable[..., CommandResult]
UNKNOWN_TASK_ID = "01a1dedf-0000-7000-8000-000000000000"


@pytest.fixture
def pending_task(client: Client, target: FlakyServer) -> str:
    """The id of a task whose first attempt is due in an hour."""
    return client.enqueue(target.url, {"order": 7}, delay=3600).task_id


@pytest.fixture
def failed_task(client: Client, target: FlakyServer) -> str:
    """The id of a task that is a dead letter after two attempts."""
    sent = client.enqueue(f"{target.url}/?plan=503,404", overrides={"initialDelayMs": 1})
    return client.wait(sent, 30).task_id


def test_list_has_a_row_for_each_task(
    run_cli: RunCli, lane: str, pending_task: str, failed_task: str
) -> None:
    """The list has one line per task, newest first."""
    result = run_cli("tasks", "list", "--lane", lane)

    heading, first, second = result.out.splitlines()
    assert 0 == result.code, result.err
    assert ["task", "status", "attempts", "last", "age", "next", "target"] == heading.split()
    assert [failed_task, "EXHAUSTED", "2", "404"] == first.split()[:4]
    assert [pending_task, "PENDING", "0"] == second.split()[:3]
    assert " in " in second
    age_column = heading.index("age")
    assert "s" in first[age_column:].split("POST")[0]


def test_list_as_json(run_cli: RunCli, lane: str, pending_task: str, failed_task: str) -> None:
    """With --json the list is one document, like a page of the API; filters and limit apply."""

    def list_ids(*options: str) -> list[str]:
        document = run_cli("tasks", "list", "--lane", lane, *options, "--json").json
        assert ["items"] == list(document)
        return [task["taskId"] for task in document["items"]]

    assert [failed_task, pending_task] == list_ids()
    assert [failed_task] == list_ids("--limit", "1")
    assert [pending_task] == list_ids("--status", "pending")
    assert [failed_task] == list_ids("--reason", "permanent")
    assert [] == list_ids("--policy", "webhook")
    assert [failed_task] == list_ids("--last-status", "4xx")


def test_search(
    run_cli: RunCli, client: Client, target: FlakyServer, lane: str, failed_task: str
) -> None:
    """Tasks and dead letters are found by URL, key, time and error."""
    task = client.enqueue(f"{target.url}/orders/7", key="found", delay=3600)

    def list_ids(command: str, *options: str) -> list[str]:
        result = run_cli(command, "list", "--lane", lane, *options, "--json")
        return [found["taskId"] for found in result.json["items"]]

    assert [task.task_id] == list_ids("tasks", "--url", f"{target.url}/orders")
    assert [task.task_id] == list_ids("tasks", "--idempotency-key", "found")
    assert [task.task_id, failed_task] == list_ids("tasks", "--since", "1h")
    assert [] == list_ids("tasks", "--until", "1h")
    assert [failed_task] == list_ids("dead", "--since", "1h", "--until", "2100-01-01")
    assert [] == list_ids("dead", "--error", "timeout")
    invalid = run_cli("tasks", "list", "--since", "yesterday")
    assert 2 == invalid.code
    assert "--since must be a time such as" in invalid.err


def test_limited_list_is_reported(
    run_cli: RunCli, lane: str, pending_task: str, failed_task: str
) -> None:
    """Standard error reports a list that is cut at --limit."""
    limited = run_cli("tasks", "list", "--lane", lane, "--limit", "1", "--json")
    complete = run_cli("tasks", "list", "--lane", lane, "--limit", "2", "--json")

    assert [failed_task] == [task["taskId"] for task in limited.json["items"]]
    assert "only the first 1 are listed; use --limit to list more\n" == limited.err
    assert ([failed_task, pending_task], "") == (
        [task["taskId"] for task in complete.json["items"]],
        complete.err,
    )


@pytest.mark.usefixtures("pending_task")
def test_empty_list(run_cli: RunCli, lane: str) -> None:
    """An empty list prints "none"."""
    assert "none\n" == run_cli("tasks", "list", "--lane", lane, "--status", "succeeded").out


def test_unknown_status_is_rejected(run_cli: RunCli) -> None:
    """An unknown status is rejected with the list of statuses."""
    result = run_cli("tasks", "list", "--status", "lost")

    assert (2, "") == (result.code, result.out)
    assert "--status must be one of CANCELLED, EXHAUSTED," in result.err


def test_show_has_the_task_and_its_attempts(run_cli: RunCli, failed_task: str) -> None:
    """`show` prints the task and its attempts in order."""
    shown, document = (
        run_cli("tasks", "show", failed_task),
        run_cli("tasks", "show", failed_task, "--json").json,
    )

    fields, attempts = shown.out.split("\n\n")
    assert [failed_task, "EXHAUSTED"] == [line.split()[-1] for line in fields.splitlines()[:2]]
    assert 'overrides        {"initialDelayMs": 1}' in fields
    heading, first, second = attempts.splitlines()
    assert ["attempt", "started", "duration", "result", "decision"] == heading.split()
    assert " 503     next after " in first
    assert " 404     stopped: permanent" in second
    assert [failed_task, [503, 404]] == [
        document["taskId"],
        [attempt["responseStatus"] for attempt in document["attempts"]["items"]],
    ]


def test_show_of_a_pending_task(run_cli: RunCli, pending_task: str) -> None:
    """`show` of a pending task has the next attempt and no attempts."""
    out = run_cli("tasks", "show", pending_task).out

    assert "next attempt     in " in out
    assert "started" not in out


def test_explain_has_a_line_for_each_attempt(run_cli: RunCli, failed_task: str) -> None:
    """`explain` prints a line for each attempt, the last response, and what happens next."""
    result = run_cli("tasks", "explain", failed_task)

    first, second, response, following = result.out.splitlines()
    assert first.startswith("attempt 1 got 503; waited ")
    assert "attempt 2 got 404; stopped: the error is not retryable" == second
    assert "response to attempt 2: answer 2" == response
    assert following.startswith("It is a dead letter: no attempt follows")
    assert 2 == len(run_cli("tasks", "explain", failed_task, "--json").json["steps"])


def test_explained_response_is_escaped(client: Client, failed_task: str) -> None:
    """`explain` prints an excerpt as one line without control characters, and marks a cut."""
    explanation = client.explain(failed_task)
    last_attempt = explanation.steps[-1].attempt
    last_attempt.response_excerpt, last_attempt.response_truncated = "no\n\x1b[31mstock", True
    with redirect_stdout(io.StringIO()) as out:
        print_explanation(explanation)

    assert "response to attempt 2: no \\x1b[31mstock ...\n" in out.getvalue()


def test_explanation_lines_keep_all_text() -> None:
    """`explanation_lines` splits an explanation before each attempt and keeps all text."""
    steps = "earlier attempts not shown: 2; attempt 3 got 503; waited 1 s; stopped: cancelled"
    text = f"{steps}. Nothing follows."

    assert [
        "earlier attempts not shown: 2",
        "attempt 3 got 503; waited 1 s; stopped: cancelled",
        "Nothing follows.",
    ] == explanation_lines(text, "Nothing follows.")


def test_cancel(run_cli: RunCli, pending_task: str) -> None:
    """`cancel` cancels a pending task, and is idempotent."""
    first, again = (
        run_cli("tasks", "cancel", pending_task),
        run_cli("tasks", "cancel", pending_task, "--json"),
    )

    assert (0, f"{pending_task} CANCELLED: cancelled\n") == (first.code, first.out)
    assert (0, "CANCELLED") == (again.code, again.json["status"])


def test_cancel_of_matching_tasks(
    run_cli: RunCli, client: Client, target: FlakyServer, lane: str, failed_task: str
) -> None:
    """Matching tasks are counted, and cancelled after a confirmation or with --yes."""
    urls = [f"{target.url}/{path}" for path in ("orders/1", "orders/2", "users")]
    tasks = [client.enqueue(url, delay=3600).task_id for url in urls]
    options = ("tasks", "cancel", "--url", f"{target.url}/orders")

    counted = run_cli(*options, "--dry-run")
    declined = run_cli(*options, stdin=b"n\n", is_terminal=True)
    without_terminal = run_cli(*options)
    unchanged = [client.get(task).status for task in tasks]
    cancelled = run_cli(*options, "--yes")
    again = run_cli(*options, "--yes", "--json")

    assert (0, "2 tasks would be cancelled\n", "") == counted
    assert (1, "", "Cancel 2 tasks? [y/N] nothing was cancelled\n") == declined
    assert 2 == without_terminal.code
    assert ["PENDING"] * 3 == unchanged
    assert (0, "2 tasks cancelled\n", "") == cancelled
    assert 0 == again.json["matched"]
    assert ["CANCELLED", "CANCELLED", "PENDING"] == [client.get(task).status for task in tasks]
    assert "EXHAUSTED" == client.get(failed_task).status


@pytest.mark.parametrize("options", [(), (UNKNOWN_TASK_ID, "--lane", "x")])
def test_cancel_needs_a_task_or_filters(run_cli: RunCli, options: tuple[str, ...]) -> None:
    """`cancel` without a task and filters does not cancel everything."""
    result = run_cli("tasks", "cancel", *options)

    assert (2, "") == (result.code, result.out)
    assert "name either a TASK, or filters" in result.err


def test_cancel_message_depends_on_status(
    run_cli: RunCli,
    client: Client,
    target: FlakyServer,
    pending_task: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message mentions a running attempt only while the task is in flight."""
    cancelled = msgspec.structs.replace(client.cancel(pending_task), cancelling=True)
    running_task = client.enqueue(f"{target.url}/?plan=late&run=slow")
    while client.get(running_task).status != "IN_FLIGHT":
        effects.blocking_sleep(0.01, None)

    in_flight = run_cli("tasks", "cancel", running_task.task_id)
    target.may_continue.set()
    monkeypatch.setattr(Client, "cancel", lambda *_: cancelled)
    result = run_cli("tasks", "cancel", pending_task)

    assert (
        f"{running_task.task_id} IN_FLIGHT: cancelled; the running attempt may finish\n"
        == in_flight.out
    )
    assert f"{pending_task} CANCELLED: cancelled\n" == result.out


def test_finished_task_cannot_be_cancelled(run_cli: RunCli, failed_task: str) -> None:
    """Cancelling a finished task exits with 1."""
    result = run_cli("tasks", "cancel", failed_task)

    assert (1, "", "error: The task is EXHAUSTED.\n") == result


def test_retry_makes_the_next_attempt_now(
    run_cli: RunCli, client: Client, target: FlakyServer, pending_task: str
) -> None:
    """`retry` makes the attempt that was due in an hour."""
    result = run_cli("tasks", "retry", pending_task)

    assert 0 == result.code, result.err
    assert result.out.startswith(f"{pending_task} ")
    assert "SUCCEEDED" == client.wait(pending_task, 30).status
    assert 1 == len(target.received_requests[""])


def test_retry_reports_a_paused_downstream(
    run_cli: RunCli, client: Client, lane: str, pending_task: str
) -> None:
    client.pause(lane, create=True)
    result = run_cli("tasks", "retry", pending_task)
    client.resume(lane)

    message = "Attempt 1 waits until an operator resumes its downstream."
    assert (0, f"{pending_task} PENDING: {message}\n", "") == result


def test_retry_of_a_running_task(run_cli: RunCli, client: Client, target: FlakyServer) -> None:
    """`retry` during an attempt prints that the attempt is running."""
    running_task = client.enqueue(f"{target.url}/?plan=late&run=slow")
    while client.get(running_task).status != "IN_FLIGHT":
        effects.blocking_sleep(0.01, None)

    result = run_cli("tasks", "retry", running_task.task_id)
    target.may_continue.set()

    assert (0, f"{running_task.task_id} IN_FLIGHT: Attempt 1 is running.\n", "") == result


@pytest.mark.usefixtures("pending_task")
def test_unanswered_bulk_cancel_says_that_tasks_may_be_cancelled(
    run_cli: RunCli, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a response, `cancel` does not print a number of cancelled tasks."""
    cancel_many = Client.cancel_many

    def lose_response(client: Client, *, dry_run: bool = False, **filters: Any) -> BulkCancelResult:
        result = cancel_many(client, **filters, dry_run=dry_run)
        if not dry_run:
            raise ServiceUnreachable("read timeout")
        return result

    monkeypatch.setattr(Client, "cancel_many", lose_response)
    result = run_cli("tasks", "cancel", "--lane", lane, "--yes")

    assert "" == result.out
    note = "no response: tasks may have been cancelled; run the command again\n"
    assert result.err.startswith(note)


@pytest.mark.parametrize("format_", ["jsonl", "csv"])
def test_exported_attempts_can_be_tuned(
    run_cli: RunCli, lane: str, failed_task: str, tmp_path: Path, format_: str
) -> None:
    """`export` writes the attempts of the matching tasks in a format that `tune` reads."""
    path = tmp_path / "attempts.log"
    printed = run_cli("tasks", "export", "--format", format_, "--lane", lane)
    written = run_cli("tasks", "export", "--format", format_, "--lane", lane, "--out", path)
    tuned = run_cli("tune", path, "--no-simulate", "--json")

    assert (0, "", "") == written
    assert printed.out == path.read_text()
    assert 2 == printed.out.count(failed_task)
    assert 0 == tuned.code, tuned.err
    assert 2 == tuned.json["log"]["attempts"]


def test_tune_reads_the_attempts_of_a_service(
    run_cli: RunCli, address: str, lane: str, failed_task: str
) -> None:
    """`tune --service` gives the same result as an exported log."""
    options = ("--service", address, "--downstream", lane, "--since", "1h")
    tuned = run_cli("tune", *options, "--no-simulate", "--json")

    assert 0 == tuned.code, tuned.err
    assert 2 == tuned.json["log"]["attempts"]


@pytest.mark.usefixtures("failed_task")
def test_tune_needs_attempts(run_cli: RunCli, address: str, lane: str) -> None:
    """An unknown downstream is named, as by other commands; else the options match no attempt."""
    unknown = run_cli("tune", "--service", address, "--downstream", "https:unknown:443")
    none = run_cli("tune", "--service", address, "--downstream", lane, "--since", "2100-01-01")

    assert 3 == unknown.code
    assert "--downstream: there is no downstream 'https:unknown:443'" in unknown.err
    assert 2 == none.code
    assert "has no attempts that match" in none.err


def test_tune_compares_with_the_policy_of_the_tasks(
    run_cli: RunCli, client: Client, address: str, target: FlakyServer, lane: str
) -> None:
    """With `--service`, the current policy is the policy of the service that most tasks used."""
    client.put_policy("orders", {"maxAttempts": 7, "initialDelayMs": 1})
    client.enqueue(target.url, wait=30)
    for _ in range(2):
        client.enqueue(target.url, policy="orders", wait=30)
    tuned = run_cli("tune", "--service", address, "--downstream", lane, "--no-simulate", "--json")

    assert 0 == tuned.code, tuned.err
    current = {row["field"]: row["current"] for row in tuned.json["suggestions"]}
    assert 7 == current["max_attempts"]


@pytest.mark.parametrize(
    "options", [(), ("log.csv", "--service", "http://x"), ("log.csv", "--since", "1h")]
)
def test_tune_reads_one_source(run_cli: RunCli, options: tuple[str, ...]) -> None:
    """`tune` needs either a file or a service."""
    assert 2 == run_cli("tune", *options).code


@pytest.mark.parametrize("command", ["show", "explain", "cancel", "retry"])
def test_unknown_task_exits_with_3(run_cli: RunCli, command: str) -> None:
    result = run_cli("tasks", command, UNKNOWN_TASK_ID)

    assert (3, "", "error: There is no such task.\n") == result


@pytest.mark.parametrize("command", ["show", "explain", "cancel", "retry"])
def test_id_with_a_slash_exits_with_3(run_cli: RunCli, command: str) -> None:
    """An id with a slash exits with 3; it is not used as part of a URL path."""
    result = run_cli("tasks", command, "../x")

    assert (3, "", "error: There is no such task: '../x' has a slash.\n") == result


@pytest.fixture
def dead_letters(client: Client, target: FlakyServer) -> list[str]:
    """The ids of two dead letters that succeed when replayed, newest first."""
    sent = [client.enqueue(f"{target.url}/?plan=404,200&run={run}", wait=30) for run in "ab"]
    return [task.task_id for task in reversed(sent)]


def test_list_of_dead_letters(run_cli: RunCli, lane: str, dead_letters: list[str]) -> None:
    """The list has only dead letters, with the reason of each."""
    shown = run_cli("dead", "list", "--lane", lane)
    document = run_cli("dead", "list", "--lane", lane, "--limit", "1", "--json").json["items"]

    heading, *rows = shown.out.splitlines()
    assert ["task", "reason", "attempts", "last", "age", "finished", "target"] == heading.split()
    assert [[letter, "permanent", "1", "404"] for letter in dead_letters] == [
        row.split()[:4] for row in rows
    ]
    assert all(re.search(r" ago +POST http://", row) for row in rows)  # the width of the age varies
    assert dead_letters[:1] == [task["taskId"] for task in document]


def test_dry_run_replays_nothing(run_cli: RunCli, lane: str, dead_letters: list[str]) -> None:
    """`replay --dry-run` counts the dead letters and replays none."""
    result = run_cli("dead", "replay", "--lane", lane, "--dry-run")

    assert (0, "2 dead letters would be replayed\n", "") == result
    assert 2 == len(run_cli("dead", "list", "--lane", lane, "--json").json["items"])


def test_replay_of_a_downstream(
    run_cli: RunCli, client: Client, lane: str, dead_letters: list[str]
) -> None:
    """`replay --lane` prints the replay job, and its tasks are delivered."""
    result = run_cli("dead", "replay", "--lane", lane, "--rate", "1000")

    assert 0 == result.code, result.err
    assert result.out.endswith(": 2 dead letters to replay, 1000 per second\n")
    for job in client.replays():
        job.wait(30)
    assert ["SUCCEEDED"] * 2 == [client.wait(letter, 30).status for letter in dead_letters]


def test_replay_of_everything_asks_for_confirmation(
    run_cli: RunCli, client: Client, dead_letters: list[str]
) -> None:
    """Without a filter, `replay` asks; if the user declines, nothing is replayed."""
    before = [job.replay_id for job in client.replays()]
    declined = run_cli("dead", "replay", stdin=b"n\n", is_terminal=True)
    without_terminal = run_cli("dead", "replay")

    assert (1, "") == (declined.code, declined.out)
    assert re.search(r"Replay all \d+ dead letters, 50 per second\? \[y/N\] ", declined.err)
    assert declined.err.endswith("nothing was replayed\n")
    assert (2, "") == (without_terminal.code, without_terminal.out)
    assert "--yes or a filter is required" in without_terminal.err
    assert before == [job.replay_id for job in client.replays()]


def test_replay_waits_for_its_tasks(
    run_cli: RunCli, client: Client, target: FlakyServer, lane: str, dead_letters: list[str]
) -> None:
    """With --wait, the counts by final status are printed; a failed task exits with 1."""
    succeeded = run_cli("dead", "replay", "--lane", lane, "--rate", "0", "--wait")
    client.enqueue(f"{target.url}/?plan=404&run=c", wait=30)
    failed = run_cli("dead", "replay", "--lane", lane, "--wait", "--json")

    assert 0 == succeeded.code, succeeded.err
    assert succeeded.out.endswith(" DONE: 2 SUCCEEDED\n")
    assert (1, "DONE", {"EXHAUSTED": 1}) == (
        failed.code,
        failed.json["status"],
        failed.json["finished"],
    )


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--json",)])
def test_replay_without_match_creates_no_job(
    run_cli: RunCli, client: Client, lane: str, dead_letters: list[str], options: tuple[str, ...]
) -> None:
    """When no dead letter matches, no replay job is created."""
    before = [job.replay_id for job in client.replays()]
    result = run_cli(
        "dead", "replay", "--lane", lane, "--policy", "default", "--reason", "deadline", *options
    )

    assert 0 == result.code, result.err
    if "--json" in options:
        assert (None, 0) == (result.json["replayId"], result.json["matched"])
    else:
        assert "no dead letters match\n" == result.out
    assert before == [job.replay_id for job in client.replays()]


@pytest.mark.parametrize(
    "command",
    [
        ("dead", "list"),
        ("dead", "replay"),
        ("dead", "replay", "--dry-run"),
        ("dead", "purge", "--yes"),
        ("tasks", "cancel", "--dry-run"),
        ("tasks", "cancel", "--yes"),
        ("tasks", "export"),
        ("tasks", "list"),
        ("tasks", "list", "--status", "PENDING", "--json"),
    ],
)
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
    run_cli: RunCli,
    client: Client,
    dead_letters: list[str],
    command: tuple[str, ...],
    option: str,
    name: str,
    hint: str,
) -> None:
    """An unknown downstream or policy in a filter exits with 3, and nothing is done."""
    before = [job.replay_id for job in client.replays()]
    result = run_cli(*command, option, name)

    assert (3, "") == (result.code, result.out)
    assert result.err.startswith(f"error: {option}: there is no ")
    assert result.err.endswith(f"{hint}\n")
    assert before == [job.replay_id for job in client.replays()]


@pytest.mark.parametrize(
    "command",
    [
        ("tasks", "cancel", "--yes"),
        ("tasks", "list"),
        ("dead", "replay"),
        ("dead", "purge", "--yes"),
    ],
)
@pytest.mark.parametrize(
    ("option", "value"),
    [("--url", "http://127.1."), ("--last-status", "9"), ("--idempotency-key", "")],
)
def test_invalid_filter_names_the_option(
    run_cli: RunCli, command: tuple[str, ...], option: str, value: str
) -> None:
    """An invalid filter is reported under the name of the option, not of the API's field."""
    result = run_cli(*command, option, value)

    assert (2, "") == (result.code, result.out)
    assert result.err.startswith(f"error: {option} ")


def test_replay_of_one_dead_letter(
    run_cli: RunCli, client: Client, lane: str, dead_letters: list[str]
) -> None:
    """A single dead letter is replayed by its id."""
    result = run_cli("dead", "replay", dead_letters[0])

    assert 0 == result.code, result.err
    assert "SUCCEEDED" == client.wait(dead_letters[0], 30).status
    assert dead_letters[1:] == [
        task["taskId"] for task in run_cli("dead", "list", "--lane", lane, "--json").json["items"]
    ]


def test_task_id_and_filters_are_exclusive(run_cli: RunCli) -> None:
    """A task id cannot be combined with filters."""
    result = run_cli("dead", "replay", "some-id", "--lane", "x")

    assert 2 == result.code
    assert "TASK cannot be combined with filters" in result.err


def test_invalid_rate_names_the_option(run_cli: RunCli) -> None:
    result = run_cli("dead", "replay", "--rate", "-1")

    assert (2, "", "error: --rate must be at least 0, got -1.0\n") == result


def test_purge_asks_for_confirmation(run_cli: RunCli, lane: str, dead_letters: list[str]) -> None:
    """If the user declines, `purge` deletes nothing and exits with 1; "y" deletes."""
    declined = run_cli("dead", "purge", "--lane", lane, stdin=b"n\n", is_terminal=True)
    remaining = run_cli("dead", "list", "--lane", lane, "--json").json["items"]
    confirmed = run_cli("dead", "purge", "--lane", lane, stdin=b"y\n", is_terminal=True)

    assert 1 == declined.code
    assert "Delete 2 dead letters permanently? [y/N] nothing was deleted\n" == declined.err
    assert 2 == len(remaining)
    assert (0, "2 dead letters deleted\n") == (confirmed.code, confirmed.out)


def test_purge_without_match_needs_no_confirmation(
    run_cli: RunCli, lane: str, dead_letters: list[str]
) -> None:
    """When no dead letter matches, no confirmation is asked for."""
    result = run_cli("dead", "purge", "--lane", lane, "--reason", "deadline", is_terminal=True)

    assert (0, "no dead letters match\n", "") == result


def test_purge_without_terminal_requires_yes(
    run_cli: RunCli, lane: str, dead_letters: list[str]
) -> None:
    without_yes = run_cli("dead", "purge", "--lane", lane)
    with_yes = run_cli("dead", "purge", "--lane", lane, "--yes", "--json")

    assert 2 == without_yes.code
    assert "--yes is required" in without_yes.err
    assert {"purged": 2, "more": False} == with_yes.json
