"""`tarry policy list`, `show` and `apply`: the policies that a service has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tarry.cli.options import DEFAULT_SERVER, JsonOption, KeyOption, ServerOption
from tarry.cli.remote import connect
from tarry.client.errors import InvalidRequest, NotFound
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from tarry.client import Client
    from tarry.wire.tasks import RetryPolicy

_HEADINGS = ("policy", "version", "attempts", "first delay", "longest", "jitter", "timeout", "ends")


def list_(
    server: ServerOption = DEFAULT_SERVER, key: KeyOption = None, as_json: JsonOption = False
) -> None:
    """List the policies of a service, those that come with it at the end."""
    from tarry.cli.output import console, print_json, table

    with connect(server, key) as client:
        found = list(client.policies())
    if as_json:
        print_json(found)
    else:
        console().print(table(_HEADINGS, map(_row, found)))


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a policy.")],
    version: Annotated[
        int | None, typer.Option(min=1, help="Which version.", show_default="the newest")
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a policy of a service as a file that `tarry policy apply` takes."""
    from tarry.cli.output import print_json, to_builtins
    from tarry.core.policy import Policy
    from tarry.policyfile import toml
    from tarry.wire.policies import JSON_FIELDS, policy_from_json

    with connect(server, key) as client:
        found = _found(client, name, version)
    if as_json:
        print_json(found)
        return
    fields = {field: value for field, value in to_builtins(found).items() if field in JSON_FIELDS}
    typer.echo(toml.dumps(policy_from_json(fields, Policy()).to_dict()), nl=False)


def _found(client: Client, name: str, version: int | None) -> RetryPolicy:
    """Look at a policy; where only the version is not there, say which is."""
    try:
        return client.policy(name, version)
    except NotFound as error:
        if version is None:
            raise
        newest = client.policy(name).version
        there = "it is built in, and has none" if newest is None else f"the newest is {newest}"
        msg = f"{name} has no version {version}: {there}"
        raise NotFound(msg) from error


def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A policy in TOML, YAML or JSON.")],
    name: Annotated[
        str | None, typer.Option(help="The policy's name.", show_default="the file's name")
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Register a policy at a service, or replace it by a new version.

    Tasks that pinned no version go by the new one from their next attempt on.
    """
    from tarry.cli.output import print_json, print_text
    from tarry.simulator.files import read_defence
    from tarry.simulator.files.documents import read_document
    from tarry.wire.policies import policy_to_json, service_policy_from_file

    defence = read_defence(file)
    if defence.hedging is not None:
        msg = f"{file}: the service retries and does not hedge: leave [hedging] out"
        raise ConfigurationError(msg)
    fields = dict(read_document(file).data)
    for part in ("breaker", "budget", "limiter"):
        if fields.pop(part, None) is not None:
            typer.echo(f"{file}: [{part}] is left out: the service has its own", err=True)
    if fields.pop("retry_marked", False):
        typer.echo(f"{file}: retry_marked is left out: no mark arrives at the service", err=True)
    policy = policy_to_json(service_policy_from_file(fields))
    with connect(server, key) as client:
        try:
            kept = client.put_policy(name or file.stem, policy)
        except InvalidRequest as error:
            msg = f"{_place(file, error.field or '')}: {error.detail or error}"
            raise ConfigurationError(msg) from error
    if as_json:
        print_json(kept)
    else:
        print_text(f"{kept.policy_id}: version {kept.version} is in force")


def _place(file: Path, field: str) -> str:
    """Say where in a file, whose names are the library's, a field of the API comes from."""
    from tarry.wire.policies import JSON_FIELDS

    wire = field.partition("[")[0]
    if wire == "policyId":
        return "--name"
    if wire == "scheduleMs":
        return f"{file}: backoff.schedule"
    return f"{file}: {JSON_FIELDS[wire].name}" if wire in JSON_FIELDS else str(file)


def _row(policy: RetryPolicy) -> tuple[object, ...]:
    from tarry.core.durations import format_duration

    def shown(ms: float | None) -> str:
        return "" if ms is None else format_duration(ms / 1000)

    budget = policy.total_budget_ms
    return (
        policy.policy_id,
        "built in" if policy.version is None else policy.version,
        policy.max_attempts,
        shown(policy.initial_delay_ms),
        shown(policy.max_delay_ms),
        policy.jitter_type.lower(),
        shown(policy.attempt_timeout_ms),
        "" if budget is None else f"after {shown(budget)}",
    )
