"""`tarry dead`: tasks that ended without success and wait for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tarry.cli.options import (
    DEFAULT_LIMIT,
    DEFAULT_SERVER,
    JsonOption,
    KeyOption,
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

_NONE = "no dead letters match"

app: typer.Typer = typer.Typer(
    name="dead",
    help="Look at dead letters, bring them back, or remove them.",
    no_args_is_help=True,
)


@app.command("list", epilog=example_epilog("tarry dead list --lane https:example.com:443"))
def list_(
    policy: PolicyFilter = None,
    lane: LaneFilter = None,
    reason: ReasonFilter = None,
    limit: LimitOption = DEFAULT_LIMIT,
    server: ServerOption = DEFAULT_SERVER,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, newest first."""
    from itertools import islice

    from tarry.cli.tasks import show_tasks

    with connect(server, key) as client:
        found = client.dead_letters(policy=policy, lane=lane, reason=reason)
        show_tasks(list(islice(found, limit + 1)), limit, as_json=as_json, dead=True)


@app.command(epilog=example_epilog("tarry dead replay --lane https:example.com:443 --rate 10"))
def replay(
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Only this one, by its id.")
    ] = None,
    policy: PolicyFilter = None,
    lane: LaneFilter = None,
    reason: ReasonFilter = None,
    rate: Annotated[
        float | None, typer.Option(help="So many a second.", show_default="at once")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count them, and change nothing.")
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring dead letters back, all of them unless you say which.

    The service does it by itself from here on; task ids and idempotency keys stay. Where none
    match, no replay is made.
    """
    from tarry.cli.output import pluralize, print_json, print_text
    from tarry.core.checks import check_positive

    if task is not None:
        given = (policy, lane, reason, rate, dry_run or None)
        if any(one is not None for one in given):
            msg = "TASK goes without options that choose several: leave one of them out"
            raise ConfigurationError(msg)
        from tarry.cli.tasks import retry

        retry(task, server, key, as_json)
        return
    if rate is not None:
        check_positive("--rate", rate)
    which: DeadLetterFilter = {"policy": policy, "lane": lane, "reason": reason}
    with connect(server, key) as client:
        is_dry = not _matched(client, which) or dry_run
        job = client.replay(**which, rate=rate, dry_run=is_dry).job
    if as_json:
        print_json(job)
    elif not job.matched:
        print_text(_NONE)
    elif is_dry:
        print_text(f"{pluralize(job.matched, 'dead letter')} would come back")
    else:
        pace = "" if rate is None else f", {rate:g} a second"
        print_text(
            f"replay {job.replay_id}: {pluralize(job.matched, 'dead letter')} to bring back{pace}"
        )


@app.command(epilog=example_epilog("tarry dead purge --reason permanent"))
def purge(
    policy: PolicyFilter = None,
    lane: LaneFilter = None,
    reason: ReasonFilter = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove dead letters for good, all of them unless you say which."""
    import sys

    from tarry.cli.output import pluralize, print_json, print_text

    if not yes and not sys.stdin.isatty():
        rule = "must be given where nobody can be asked: what is removed is gone"
        raise ConfigurationError("--yes", rule)
    which: DeadLetterFilter = {"policy": policy, "lane": lane, "reason": reason}
    with connect(server, key) as client:
        matched = _matched(client, which)
        if matched and not yes:
            asked = f"Remove {pluralize(matched, 'dead letter')} for good? [y/N] "
            typer.echo(asked, nl=False, err=True)
            if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
                typer.echo("nothing was removed", err=True)
                raise typer.Exit(1)
        purged = client.purge(**which) if matched else 0
    if as_json:
        print_json({"purged": purged})
    else:
        print_text(f"{pluralize(purged, 'dead letter')} removed" if purged else _NONE)


def _matched(client: Client, which: DeadLetterFilter) -> int:
    """Count such dead letters; where there are none, the downstream and policy must exist."""
    matched = client.replay(**which, dry_run=True).matched
    if not matched:
        _check_named(client, which.get("lane"), which.get("policy"))
    return matched


def _check_named(client: Client, lane: str | None, policy: str | None) -> None:
    """Refuse a downstream or a policy that is not there."""
    if lane is not None and all(one.lane != lane for one in client.downstreams()):
        msg = (
            f"--lane: there is no downstream {lane!r}: one is written http:host:port or "
            "https:host:port, and `tarry downstreams` lists them"
        )
        raise NotFound(msg)
    if policy is not None:
        try:
            client.policy(policy)
        except NotFound as error:
            msg = f"--policy: there is no policy {policy!r}: `tarry policy list` has their names"
            raise NotFound(msg) from error
