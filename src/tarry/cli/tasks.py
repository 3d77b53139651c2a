"""`tarry tasks`: list, show, explain, cancel, retry, export. `tarry dead`: manage dead letters."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tarry.cli import output
from tarry.cli.filters import OPTION_BY_FIELD, Filters, takes_filters
from tarry.cli.options import (
    DEFAULT_LIMIT,
    DEFAULT_SERVER,
    ApiKeyOption,
    JsonOption,
    LimitOption,
    ServerOption,
    example_epilog,
)
from tarry.cli.remote import check_downstream_exists, connect
from tarry.client.errors import NotFound, ServiceUnreachable
from tarry.core.checks import check_at_least, check_one_of
from tarry.core.text import format_count, format_duration
from tarry.errors import ConfigurationError
from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tarry.client import Client
    from tarry.wire.tasks import AttemptLog, BulkCancelResult, Explanation, RetryTask

T = TypeVar("T")

TaskIdArgument = Annotated[str, typer.Argument(metavar="TASK", help="Id of the task.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]

_DEAD_LETTER_FILTERS = (
    "policy_id",
    "lane",
    "reason",
    "url_prefix",
    "idempotency_key",
    "finished_after",
    "finished_before",
    "last_status",
    "error",
)
_NO_MATCH = "no dead letters match"
_EXPORT_FORMATS = ("csv", "jsonl")
_CSV_COLUMNS = (
    "taskId", "attemptNumber", "startedAt", "durationMs", "responseStatus", "outcome",
)  # fmt: skip

tasks_app: typer.Typer = typer.Typer(
    name="tasks", help="List, show, explain, cancel, retry or export tasks.", no_args_is_help=True
)
dead_app: typer.Typer = typer.Typer(
    name="dead",
    help="List, replay or purge dead letters: tasks that failed for good.",
    no_args_is_help=True,
)


@tasks_app.command(
    "list", epilog=example_epilog("tarry tasks list --status PENDING --lane https:example.com:443")
)
@takes_filters(
    "status",
    "policy_id",
    "lane",
    "reason",
    "url_prefix",
    "idempotency_key",
    "created_after",
    "created_before",
    "last_status",
    "error",
)
def list_tasks(
    *,
    filters: Filters,
    limit: LimitOption = DEFAULT_LIMIT,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List tasks, newest first."""
    with connect(server, api_key, option_by_field=OPTION_BY_FIELD) as client:
        tasks = client.tasks(**filters.arguments)
        _print_tasks(_check_if_empty(client, tasks, filters), limit, as_json=as_json)


@tasks_app.command(epilog=example_epilog("tarry tasks show 0199c0de-0000-7000-8000-000000000000"))
def show(
    task_id: TaskIdArgument,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a task and its attempts."""
    with connect(server, api_key) as client:
        task = client.get(task_id)
        attempts = list(client.attempts(task))
    if as_json:
        output.print_json({**output.to_builtins(task), "attempts": {"items": attempts}})
        return
    terminal = output.console()
    terminal.print(output.table(("task", task.task_id), _properties(task)))
    if attempts:
        terminal.print()
        headings = ("attempt", "started", "duration", "result", "decision")
        terminal.print(output.table(headings, map(_attempt_row, attempts)))


@tasks_app.command(
    epilog=example_epilog("tarry tasks explain 0199c0de-0000-7000-8000-000000000000")
)
def explain(
    task_id: TaskIdArgument,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain why a task was retried or not, and what happens next.

    If a failed attempt got a response, the beginning of the last one is printed.
    """
    with connect(server, api_key) as client:
        explanation = client.explain(task_id)
    if as_json:
        output.print_json(explanation)
    else:
        print_explanation(explanation)


@tasks_app.command(
    epilog=example_epilog("tarry tasks cancel --url https://example.com/orders --dry-run")
)
@takes_filters(
    "policy_id",
    "lane",
    "url_prefix",
    "idempotency_key",
    "created_after",
    "created_before",
    "last_status",
    "error",
)
def cancel(
    task_id: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Id of a single task to cancel.")
    ] = None,
    *,
    filters: Filters,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count the matching tasks.")
    ] = False,
    yes: YesOption = False,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel a task, or all unfinished tasks that match the options, after a confirmation.

    A running attempt may finish; no other attempt follows.
    """
    has_filters = bool(filters.arguments)
    if (task_id is None) is not (has_filters or dry_run):
        raise ConfigurationError("name either a TASK, or filters for the tasks to cancel")
    if task_id is None:
        if not (yes or dry_run) and not sys.stdin.isatty():
            rule = "is required when standard input is not a terminal"
            raise ConfigurationError("--yes", rule)
        with connect(server, api_key, option_by_field=OPTION_BY_FIELD) as client:
            result, text = _cancel_many(client, filters, dry_run=dry_run, is_confirmed=yes)
        output.print_result(result, text, as_json=as_json)
        return
    with connect(server, api_key) as client:
        task = client.cancel(task_id)
    is_running = task.status == "IN_FLIGHT"
    message = "cancelled; the running attempt may finish" if is_running else "cancelled"
    output.print_result(task, f"{task.task_id} {task.status}: {message}", as_json=as_json)


def _cancel_many(
    client: Client, filters: Filters, *, dry_run: bool, is_confirmed: bool
) -> tuple[BulkCancelResult, str]:
    """Cancel tasks after a confirmation, or count them; return the result, also as a text."""
    result = client.cancel_many(**filters.arguments, dry_run=True)
    if not result.matched:
        _check_names(client, filters)
        return result, "no unfinished tasks match"
    tasks = format_count(result.matched, "task")
    if dry_run:
        return result, f"{tasks} would be cancelled"
    if not is_confirmed:
        _confirm(f"Cancel {tasks}?", "nothing was cancelled")
    try:
        result = client.cancel_many(**filters.arguments)
    except ServiceUnreachable:
        typer.echo("no response: tasks may have been cancelled; run the command again", err=True)
        raise
    text = f"{format_count(result.cancelled, 'task')} cancelled"
    if result.running:
        text += f"; {format_count(result.running, 'running attempt')} may finish"
    return result, text


@tasks_app.command(epilog=example_epilog("tarry tasks retry 0199c0de-0000-7000-8000-000000000000"))
def retry(
    task_id: TaskIdArgument,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the next attempt now; a dead or cancelled task gets all attempts of its policy again."""
    with connect(server, api_key) as client:
        task = client.retry(task_id)
        # The task may have to wait: for a free slot, or for a paused or failing downstream.
        explanation = client.explain(task)
    text = f"{task.task_id} {explanation.status}: {explanation.next.text}"
    output.print_result(task, text, as_json=as_json)


@tasks_app.command(
    epilog=example_epilog("tarry tasks export --lane https:example.com:443 --out attempts.jsonl")
)
@takes_filters(
    "status",
    "policy_id",
    "lane",
    "idempotency_key",
    "created_after",
    "created_before",
)
def export(
    format_: Annotated[
        str, typer.Option("--format", help="jsonl (JSON Lines) or csv.", metavar="FORMAT")
    ] = "jsonl",
    *,
    filters: Filters,
    out: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="standard output")
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
) -> None:
    """Write the attempt log of all tasks, or of those that match, for `tarry tune`."""
    check_one_of("--format", format_, _EXPORT_FORMATS)
    output.check_output_path(out)
    with connect(server, api_key, option_by_field=OPTION_BY_FIELD) as client:
        attempts = client.export_attempts(**filters.arguments)
        attempts = _check_if_empty(client, attempts, filters)
        lines = _csv_lines(attempts) if format_ == "csv" else map(_json_line, attempts)
        if out is not None:
            output.write_text(out, "".join(lines))
            return
        for line in lines:
            sys.stdout.write(line)
        sys.stdout.flush()


def _json_line(attempt: AttemptLog) -> str:
    return json.dumps(output.to_builtins(attempt)) + "\n"


def _csv_lines(attempts: Iterable[AttemptLog]) -> Iterator[str]:
    """Yield the lines of a CSV file with the columns that `tarry tune` reads."""
    yield ",".join(_CSV_COLUMNS) + "\n"
    for attempt in attempts:
        fields = output.to_builtins(attempt)
        cells = (fields[column] for column in _CSV_COLUMNS)
        # No cell needs quotes: the columns are ids, numbers and names.
        yield ",".join("" if cell is None else str(cell) for cell in cells) + "\n"


def print_explanation(explanation: Explanation) -> None:
    """Print a line for each attempt, the last response excerpt, and a line for the next step."""
    *history, next_step = explanation_lines(explanation.text, explanation.next.text)
    for line in history:
        output.print_text(line)
    for step in reversed(explanation.steps):
        if step.attempt.response_excerpt:
            excerpt = step.attempt.response_excerpt
            ellipsis = " ..." if step.attempt.response_truncated else ""
            output.print_text(f"response to attempt {step.attempt_number}: {excerpt}{ellipsis}")
            break
    output.print_text(next_step)


def explanation_lines(text: str, next_step: str) -> list[str]:
    """Split the text of an explanation into a line per attempt, and a line for the next step."""
    history = text.removesuffix(next_step).rstrip(" .")
    first, *rest = history.split("; attempt ")
    return [first, *(f"attempt {attempt}" for attempt in rest), next_step]


def _print_tasks(
    tasks: Iterator[RetryTask], limit: int, *, as_json: bool, are_dead: bool = False
) -> None:
    """Print up to `limit` tasks or dead letters, and a note on standard error if there are more."""
    listed = list(islice(tasks, limit))
    if next(tasks, None) is not None:
        output.print_limit_note(limit)
    now = effects.unix_time()

    def to_row(task: RetryTask) -> tuple[object, ...]:
        target = f"{task.method} {task.target_url}"
        age = format_duration(max(0.0, now - task.created_at / 1000))
        results = (task.attempt_number, _last_result(task), age)
        if are_dead:
            finished = output.time_since(task.finished_at, now)
            return task.task_id, task.reason, *results, finished, target
        next_attempt = output.time_until(task.next_attempt_at, now)
        return task.task_id, task.status, *results, next_attempt, target

    first, last = ("reason", "finished") if are_dead else ("status", "next")
    headings = ("task", first, "attempts", "last", "age", last, "target")
    output.print_list(listed, headings, to_row, as_json=as_json, cut_column="target")


def _last_result(task: RetryTask) -> str:
    """Return the result of the last attempt: a status such as 503, or an error such as timeout."""
    if task.last_status is not None:
        return str(task.last_status)
    return (task.last_error or "").partition(":")[0]


def _properties(task: RetryTask) -> Iterable[tuple[str, object]]:
    now = effects.unix_time()
    version = "" if task.policy_version is None else f", version {task.policy_version}"
    properties: dict[str, object] = {
        "status": task.status,
        "reason": task.reason,
        "target": f"{task.method} {task.target_url}",
        "lane": task.lane,
        "policy": f"{task.policy_id}{version}",
        "overrides": json.dumps(task.policy) if task.policy else None,
        "idempotency key": task.idempotency_key,
        "body": f"{task.body_size:,} bytes",
        "attempts": task.attempt_number,
        "replays": task.replays or None,
        "created": output.time_since(task.created_at, now),
        "next attempt": output.time_until(task.next_attempt_at, now) or None,
        "finished": output.time_since(task.finished_at, now) or None,
    }
    return ((name, value) for name, value in properties.items() if value is not None)


def _attempt_row(attempt: AttemptLog) -> tuple[object, ...]:
    return (
        attempt.attempt_number,
        output.time_of_day(attempt.started_at),
        output.format_ms(attempt.duration_ms),
        output.attempt_result(attempt),
        output.decision_text(attempt),
    )


@dead_app.command("list", epilog=example_epilog("tarry dead list --lane https:example.com:443"))
@takes_filters(*_DEAD_LETTER_FILTERS)
def list_dead_letters(
    *,
    filters: Filters,
    limit: LimitOption = DEFAULT_LIMIT,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, newest first."""
    with connect(server, api_key, option_by_field=OPTION_BY_FIELD) as client:
        dead_letters = _check_if_empty(client, client.dead_letters(**filters.arguments), filters)
        _print_tasks(dead_letters, limit, as_json=as_json, are_dead=True)


@dead_app.command(epilog=example_epilog("tarry dead replay --lane https:example.com:443 --rate 10"))
@takes_filters(*_DEAD_LETTER_FILTERS)
def replay(
    task_id: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Id of a single task to replay.")
    ] = None,
    *,
    filters: Filters,
    rate: Annotated[
        float | None,
        typer.Option(help="Tasks to replay per second; 0: all at once.", show_default="50"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count the matching dead letters.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until all replayed tasks have finished.")
    ] = False,
    yes: YesOption = False,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replay dead letters: those that match the options, or all of them after a confirmation.

    The service replays them in the background. Tasks keep their ids and idempotency keys. If no
    dead letter matches, no replay is started. With --wait, the exit code is 1 if a task fails
    again.
    """
    has_filters = bool(filters.arguments)
    if task_id is not None:
        if dry_run or wait or rate is not None or has_filters:
            msg = "TASK cannot be combined with filters, --rate, --wait or --dry-run"
            raise ConfigurationError(msg)
        retry(task_id, server, api_key, as_json)
        return
    if rate is not None:
        check_at_least("--rate", rate, 0)
    needs_confirmation = not (has_filters or yes or dry_run)
    if needs_confirmation and not sys.stdin.isatty():
        rule = "or a filter is required when standard input is not a terminal"
        raise ConfigurationError("--yes", rule)
    with connect(server, api_key, option_by_field=OPTION_BY_FIELD) as client:
        from tarry.wire.tasks import DEFAULT_REPLAY_RATE

        match_count = _count_matches(client, filters)
        effective_rate = DEFAULT_REPLAY_RATE if rate is None else rate
        pace = f"{effective_rate:g} per second" if effective_rate else "all at once"
        if match_count and needs_confirmation:
            dead_letters = format_count(match_count, "dead letter")
            _confirm(f"Replay all {dead_letters}, {pace}?", "nothing was replayed")
        # Without matches, make a dry run, which returns the empty result and starts no replay.
        is_dry_run = not match_count or dry_run
        started = client.replay(
            **filters.arguments, all=not has_filters, rate=rate, dry_run=is_dry_run
        )
        job = started.wait().job if wait else started.job
    matched = format_count(job.matched, "dead letter")
    text = f"replay {job.replay_id}: {matched} to replay, {pace}"
    if not job.matched:
        text = _NO_MATCH
    elif is_dry_run:
        text = f"{matched} would be replayed"
    elif wait:
        counts = [f"{count} {status}" for status, count in sorted(job.finished.items())]
        text = f"replay {job.replay_id} {job.status}: {', '.join(counts)}"
    output.print_result(job, text, as_json=as_json)
    if wait and job.finished.keys() - {"SUCCEEDED"}:
        raise typer.Exit(1)


@dead_app.command(epilog=example_epilog("tarry dead purge --reason permanent"))
@takes_filters(*_DEAD_LETTER_FILTERS)
def purge(
    *,
    filters: Filters,
    yes: YesOption = False,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete dead letters permanently: all of them, or those that match the options."""
    if not yes and not sys.stdin.isatty():
        rule = "is required when standard input is not a terminal: purging cannot be undone"
        raise ConfigurationError("--yes", rule)
    with connect(server, api_key, option_by_field=OPTION_BY_FIELD) as client:
        match_count = _count_matches(client, filters)
        if match_count and not yes:
            dead_letters = format_count(match_count, "dead letter")
            _confirm(f"Delete {dead_letters} permanently?", "nothing was deleted")
        purged_count = client.purge(**filters.arguments, all=True) if match_count else 0
    text = f"{format_count(purged_count, 'dead letter')} deleted" if purged_count else _NO_MATCH
    output.print_result({"purged": purged_count, "more": False}, text, as_json=as_json)


def _confirm(question: str, refusal: str) -> None:
    """Ask a question on standard error; if the answer is not yes, print `refusal` and exit."""
    typer.echo(f"{question} [y/N] ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        typer.echo(refusal, err=True)
        raise typer.Exit(1)


def _count_matches(client: Client, filters: Filters) -> int:
    """Return the number of matching dead letters; if 0, raise for an unknown lane or policy."""
    count = client.replay(**filters.arguments, dry_run=True).matched
    if not count:
        _check_names(client, filters)
    return count


def _check_if_empty(client: Client, items: Iterator[T], filters: Filters) -> Iterator[T]:
    """Yield the items; if there are none, raise NotFound for an unknown lane or policy."""
    is_empty = True
    for item in items:
        is_empty = False
        yield item
    if is_empty:
        _check_names(client, filters)


def _check_names(client: Client, filters: Filters) -> None:
    """Raise NotFound for an unknown lane or policy."""
    if filters.lane is not None:
        check_downstream_exists(client, "--lane", filters.lane)
    if filters.policy is not None:
        try:
            client.policy(filters.policy)
        except NotFound as error:
            rule = f"there is no policy {filters.policy!r}; `tarry policy list` lists all"
            raise NotFound(f"--policy: {rule}") from error
