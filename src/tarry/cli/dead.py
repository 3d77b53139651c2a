"""`tarry dead`: tasks that ended without success and wait for a person."""

from __future__ import annotations

from typing import Annotated

import typer

from tarry.cli.remote import (
    DEFAULT_SERVER,
    LISTED,
    ForReason,
    Json,
    Key,
    Limit,
    OfLane,
    OfPolicy,
    Server,
    connected,
    example,
)
from tarry.errors import ConfigurationError

app: typer.Typer = typer.Typer(
    name="dead",
    help="Look at dead letters, bring them back, or remove them.",
    no_args_is_help=True,
)


@app.command("list", epilog=example("tarry dead list --lane https:example.com:443"))
def list_(
    policy: OfPolicy = None,
    lane: OfLane = None,
    reason: ForReason = None,
    limit: Limit = LISTED,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """List dead letters, newest first."""
    from itertools import islice

    from tarry.cli.tasks import show_tasks

    with connected(server, key) as client:
        found = client.dead_letters(policy=policy, lane=lane, reason=reason)
        show_tasks(list(islice(found, limit + 1)), limit, as_json=as_json, dead=True)


@app.command(epilog=example("tarry dead replay --lane https:example.com:443 --rate 10"))
def replay(
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Only this one, by its id.")
    ] = None,
    policy: OfPolicy = None,
    lane: OfLane = None,
    reason: ForReason = None,
    rate: Annotated[
        float | None, typer.Option(help="So many a second.", show_default="at once")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count them, and change nothing.")
    ] = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Bring dead letters back, all of them unless you say which.

    The service does it by itself from here on; task ids and idempotency keys stay.
    """
    from tarry.cli.shown import counted, print_json, say
    from tarry.core.checks import positive

    if task is not None:
        given = (policy, lane, reason, rate, dry_run or None)
        if any(one is not None for one in given):
            msg = "TASK goes without options that choose several: leave one of them out"
            raise ConfigurationError(msg)
        from tarry.cli.tasks import retry

        retry(task, server, key, as_json)
        return
    if rate is not None:
        positive("--rate", rate)
    with connected(server, key) as client:
        job = client.replay(policy=policy, lane=lane, reason=reason, rate=rate, dry_run=dry_run).job
    if as_json:
        print_json(job)
    elif dry_run:
        say(f"{counted(job.matched, 'dead letter')} would come back")
    else:
        pace = "" if rate is None else f", {rate:g} a second"
        say(f"replay {job.replay_id}: {counted(job.matched, 'dead letter')} to bring back{pace}")


@app.command(epilog=example("tarry dead purge --reason permanent"))
def purge(
    policy: OfPolicy = None,
    lane: OfLane = None,
    reason: ForReason = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    server: Server = DEFAULT_SERVER,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Remove dead letters for good, all of them unless you say which."""
    import sys

    from tarry.cli.shown import counted, print_json, say

    with connected(server, key) as client:
        if not yes:
            if not sys.stdin.isatty():
                msg = "--yes must be given where nobody can be asked: what is removed is gone"
                raise ConfigurationError(msg)
            matched = client.replay(policy=policy, lane=lane, reason=reason, dry_run=True).matched
            asked = f"Remove {counted(matched, 'dead letter')} for good? [y/N] "
            typer.echo(asked, nl=False, err=True)
            if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
                typer.echo("nothing was removed", err=True)
                raise typer.Exit(1)
        purged = client.purge(policy=policy, lane=lane, reason=reason)
    if as_json:
        print_json({"purged": purged})
    else:
        say(f"{counted(purged, 'dead letter')} removed")
