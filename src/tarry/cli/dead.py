"""`tarry dead`: list, replay and purge dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

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
    example_epilog,
)
from tarry.cli.remote import connect
from tarry.client.errors import NotFound
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from tarry.client import Client
    from tarry.client.options import DeadLetterFilter

_NO_MATCH = "no dead letters match"

app: typer.Typer = typer.Typer(
    name="dead",
    help="List, replay or purge dead letters: tasks that failed for good.",
    no_args_is_help=True,
)


@app.command("list", epilog=example_epilog("tarry dead list --lane https:example.com:443"))
def list_(
    policy: PolicyFilter = None,
    lane: LaneFilter = None,
    reason: ReasonFilter = None,
    limit: LimitOption = DEFAULT_LIMIT,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, newest first."""
    from itertools import islice

    from tarry.cli.tasks import show_tasks

    with connect(server, api_key) as client:
        dead_letters = client.dead_letters(policy=policy, lane=lane, reason=reason)
        show_tasks(list(islice(dead_letters, limit + 1)), limit, as_json=as_json, dead=True)


@app.command(epilog=example_epilog("tarry dead replay --lane https:example.com:443 --rate 10"))
def replay(
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Id of a single task to replay.")
    ] = None,
    policy: PolicyFilter = None,
    lane: LaneFilter = None,
    reason: ReasonFilter = None,
    rate: Annotated[
        float | None, typer.Option(help="Tasks to replay per second.", show_default="all at once")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count the matching dead letters.")
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replay dead letters: all of them, or those that match the options.

    The service does the replay in the background. Tasks keep their ids and idempotency keys.
    Nothing is started when no dead letter matches.
    """
    from tarry.cli.output import pluralize, print_json, print_text
    from tarry.core.checks import check_positive

    if task is not None:
        if dry_run or any(value is not None for value in (policy, lane, reason, rate)):
            msg = "TASK cannot be combined with --policy, --lane, --reason, --rate or --dry-run"
            raise ConfigurationError(msg)
        from tarry.cli.tasks import retry

        retry(task, server, api_key, as_json)
        return
    if rate is not None:
        check_positive("--rate", rate)
    filters: DeadLetterFilter = {"policy": policy, "lane": lane, "reason": reason}
    with connect(server, api_key) as client:
        # Without matches, a dry run returns the empty result without starting a replay.
        is_dry_run = not _count_matches(client, filters) or dry_run
        job = client.replay(**filters, rate=rate, dry_run=is_dry_run).job
    if as_json:
        print_json(job)
    elif not job.matched:
        print_text(_NO_MATCH)
    elif is_dry_run:
        print_text(f"{pluralize(job.matched, 'dead letter')} would be replayed")
    else:
        pace = "" if rate is None else f", {rate:g} per second"
        print_text(
            f"replay {job.replay_id}: {pluralize(job.matched, 'dead letter')} to replay{pace}"
        )


@app.command(epilog=example_epilog("tarry dead purge --reason permanent"))
def purge(
    policy: PolicyFilter = None,
    lane: LaneFilter = None,
    reason: ReasonFilter = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete dead letters permanently: all of them, or those that match the options."""
    import sys

    from tarry.cli.output import pluralize, print_json, print_text

    if not yes and not sys.stdin.isatty():
        rule = "is required when standard input is not a terminal: purging cannot be undone"
        raise ConfigurationError("--yes", rule)
    filters: DeadLetterFilter = {"policy": policy, "lane": lane, "reason": reason}
    with connect(server, api_key) as client:
        matched = _count_matches(client, filters)
        if matched and not yes:
            question = f"Delete {pluralize(matched, 'dead letter')} permanently? [y/N] "
            typer.echo(question, nl=False, err=True)
            if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
                typer.echo("nothing was deleted", err=True)
                raise typer.Exit(1)
        purged = client.purge(**filters) if matched else 0
    if as_json:
        print_json({"purged": purged})
    else:
        print_text(f"{pluralize(purged, 'dead letter')} deleted" if purged else _NO_MATCH)


def _count_matches(client: Client, filters: DeadLetterFilter) -> int:
    """Return the number of matching dead letters.

    If none match, raise `NotFound` when the lane or the policy of the filter does not exist,
    because its name is probably misspelt.
    """
    count = client.replay(**filters, dry_run=True).matched
    if not count:
        _check_filter_names(client, filters.get("lane"), filters.get("policy"))
    return count


def _check_filter_names(client: Client, lane: str | None, policy: str | None) -> None:
    if lane is not None and all(known.lane != lane for known in client.downstreams()):
        msg = (
            f"--lane: there is no downstream {lane!r}. The format is http:host:port or "
            "https:host:port; `tarry downstreams` lists all"
        )
        raise NotFound(msg)
    if policy is not None:
        try:
            client.policy(policy)
        except NotFound as error:
            msg = f"--policy: there is no policy {policy!r}; `tarry policy list` lists all"
            raise NotFound(msg) from error
