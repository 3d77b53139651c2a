"""`tarry tasks`: list, show, explain, cancel and retry tasks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from tarry.cli.options import (
    DEFAULT_LIMIT,
    DEFAULT_SERVER,
    ApiKeyOption,
    JsonOption,
    LaneFilter,
    LimitOption,
    PolicyFilter,
    ReasonFilter,
    ServerOption,
    TaskArgument,
    example_epilog,
)
from tarry.cli.remote import connect

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tarry.client.options import Status
    from tarry.wire.tasks import AttemptLog, RetryTask

app: typer.Typer = typer.Typer(
    name="tasks", help="List, show, explain, cancel or retry tasks.", no_args_is_help=True
)


@app.command(
    "list", epilog=example_epilog("tarry tasks list --status PENDING --lane https:example.com:443")
)
def list_(
    status: Annotated[str | None, typer.Option(help="Only tasks with this status.")] = None,
    policy: PolicyFilter = None,
    lane: LaneFilter = None,
    reason: ReasonFilter = None,
    limit: LimitOption = DEFAULT_LIMIT,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List tasks, newest first."""
    from itertools import islice

    from tarry.core.checks import check_one_of

    with connect(server, api_key) as client:
        from tarry.wire.tasks import StatusName

        if status is not None:
            status = status.upper().replace("-", "_")
            check_one_of("--status", status, get_args(StatusName))
        tasks = client.tasks(
            status=cast("Status | None", status), policy=policy, lane=lane, reason=reason
        )
        show_tasks(list(islice(tasks, limit + 1)), limit, as_json=as_json)


@app.command(epilog=example_epilog("tarry tasks show 0199c0de-0000-7000-8000-000000000000"))
def show(
    task: TaskArgument,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a task and its attempts."""
    from tarry.cli.output import print_json, to_builtins

    with connect(server, api_key) as client:
        details = client.get(task)
        attempts = list(client.attempts(details))
    if as_json:
        print_json({**to_builtins(details), "attempts": to_builtins(attempts)})
    else:
        _print_details(details, attempts)


@app.command(epilog=example_epilog("tarry tasks explain 0199c0de-0000-7000-8000-000000000000"))
def explain(
    task: TaskArgument,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain why a task was retried or not, and what happens next."""
    from tarry.cli.output import print_json, print_text

    with connect(server, api_key) as client:
        explanation = client.explain(task)
    if as_json:
        print_json(explanation)
        return
    for line in explanation_lines(explanation.text, explanation.next.text):
        print_text(line)


@app.command(epilog=example_epilog("tarry tasks cancel 0199c0de-0000-7000-8000-000000000000"))
def cancel(
    task: TaskArgument,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel a task. A running attempt may finish; no other attempt follows."""
    with connect(server, api_key) as client:
        cancelled = client.cancel(task)
    is_running = cancelled.status == "IN_FLIGHT"
    message = "cancelled; the running attempt may finish" if is_running else "cancelled"
    _print_state(cancelled, cancelled.status, message, as_json=as_json)


@app.command(epilog=example_epilog("tarry tasks retry 0199c0de-0000-7000-8000-000000000000"))
def retry(
    task: TaskArgument,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the next attempt now; a dead letter starts again with attempt 1."""
    with connect(server, api_key) as client:
        retried = client.retry(task)
        if retried.status == "IN_FLIGHT":
            message = "an attempt is running; if it fails, the policy decides when the next starts"
            _print_state(retried, retried.status, message, as_json=as_json)
            return
        # The task may still have to wait, because its downstream is paused or fails.
        explanation = client.explain(retried)
    _print_state(retried, explanation.status, explanation.next.text, as_json=as_json)


def show_tasks(tasks: list[RetryTask], limit: int, *, as_json: bool, dead: bool = False) -> None:
    """Print up to `limit` tasks, and a hint to standard error if there are more.

    With `dead`, the tasks are dead letters, whose table has other columns.
    """
    from tarry.cli import output
    from tarry.runtime.clocks import system

    if len(tasks) > limit:
        tasks = tasks[:limit]
        typer.echo(f"only the first {limit} are listed; use --limit to list more", err=True)
    if as_json:
        output.print_json(tasks)
    elif not tasks:
        output.print_text("none")
    else:
        now = system.unix_time()
        headings = output.DEAD_LETTER_HEADINGS if dead else output.TASK_HEADINGS
        row = output.dead_letter_row if dead else output.task_row
        rows = [row(task, now) for task in tasks]
        output.console().print(output.table(headings, rows, truncate=headings[-1]))


def explanation_lines(text: str, next_step: str) -> list[str]:
    """Return an explanation as one line per attempt, and a last line for the next step."""
    history = text.removesuffix(next_step).rstrip(" .")
    first, *rest = history.split("; attempt ")
    return [first, *(f"attempt {attempt}" for attempt in rest), next_step]


def _print_state(task: RetryTask, status: str, message: str, *, as_json: bool) -> None:
    from tarry.cli.output import print_json, print_text

    if as_json:
        print_json(task)
    else:
        print_text(f"{task.task_id} {status}: {message}")


def _print_details(task: RetryTask, attempts: list[AttemptLog]) -> None:
    from tarry.cli.output import console, table

    terminal = console()
    terminal.print(table(("task", task.task_id), _properties(task)))
    if attempts:
        terminal.print()
        headings = ("attempt", "started", "took", "result", "then")
        terminal.print(table(headings, map(_attempt_row, attempts)))


def _properties(task: RetryTask) -> Iterable[tuple[str, object]]:
    from tarry.cli.output import time_since, time_until
    from tarry.runtime.clocks import system

    now = system.unix_time()
    pinned = "" if task.policy_version is None else f", version {task.policy_version}"
    next_attempt = None if task.next_attempt_at is None else time_until(task.next_attempt_at, now)
    finished = None if task.finished_at is None else time_since(task.finished_at, now)
    properties: dict[str, object] = {
        "status": task.status,
        "reason": task.reason,
        "target": f"{task.method} {task.target_url}",
        "lane": task.lane,
        "policy": f"{task.policy_id}{pinned}",
        "overrides": json.dumps(task.policy) if task.policy else None,
        "idempotency key": task.idempotency_key,
        "body": f"{task.body_size:,} bytes",
        "attempts": task.attempt_number,
        "replays": task.replays or None,
        "created": time_since(task.created_at, now),
        "next attempt": next_attempt,
        "finished": finished,
    }
    return ((name, value) for name, value in properties.items() if value is not None)


def _attempt_row(attempt: AttemptLog) -> tuple[object, ...]:
    from tarry.cli.output import attempt_result, decision_text, time_of_day
    from tarry.core.text import format_duration

    took = None if attempt.duration_ms is None else format_duration(attempt.duration_ms / 1000)
    started = time_of_day(attempt.started_at)
    return (attempt.attempt_number, started, took, attempt_result(attempt), decision_text(attempt))
