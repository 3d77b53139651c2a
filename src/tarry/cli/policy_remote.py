"""`tarry policy list`, `show` and `apply`: the policies of a service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tarry.cli.options import DEFAULT_SERVER, ApiKeyOption, JsonOption, ServerOption
from tarry.cli.remote import connect
from tarry.client.errors import InvalidRequest, NotFound
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from tarry.client import Client
    from tarry.wire.tasks import RetryPolicy

_HEADINGS = (
    "policy",
    "version",
    "attempts",
    "initial delay",
    "max delay",
    "jitter",
    "timeout",
    "total budget",
)


def list_(
    server: ServerOption = DEFAULT_SERVER, api_key: ApiKeyOption = None, as_json: JsonOption = False
) -> None:
    """List the policies of a service; the built-in policies come last."""
    from tarry.cli.output import console, print_json, table

    with connect(server, api_key) as client:
        policies = list(client.policies())
    if as_json:
        print_json(policies)
    else:
        console().print(table(_HEADINGS, map(_row, policies)))


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the policy.")],
    version: Annotated[
        int | None, typer.Option(min=1, help="Version.", show_default="newest")
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a policy of a service as TOML, as `tarry policy apply` accepts it."""
    from tarry.cli.output import print_json, to_builtins
    from tarry.core.policy import Policy
    from tarry.policyfile import toml
    from tarry.wire.policies import JSON_FIELDS, policy_from_json

    with connect(server, api_key) as client:
        policy = _get_policy(client, name, version)
    if as_json:
        print_json(policy)
        return
    fields = {field: value for field, value in to_builtins(policy).items() if field in JSON_FIELDS}
    typer.echo(toml.dumps(policy_from_json(fields, Policy()).to_dict()), nl=False)


def _get_policy(client: Client, name: str, version: int | None) -> RetryPolicy:
    """Return a policy. If it lacks the version, the error names its newest version."""
    try:
        return client.policy(name, version)
    except NotFound as error:
        if version is None:
            raise
        newest = client.policy(name).version
        hint = "a built-in policy has no versions" if newest is None else f"the newest is {newest}"
        msg = f"{name} has no version {version}: {hint}"
        raise NotFound(msg) from error


def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Policy in TOML, YAML or JSON.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the policy.", show_default="the file's name")
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a policy of a service, or a new version of it.

    Tasks that are not pinned to a version use the new one from their next attempt on.
    """
    from tarry.cli.output import print_json, print_text
    from tarry.simulator.documents import read_document
    from tarry.simulator.files import read_defence
    from tarry.wire.policies import policy_to_json, service_policy_from_file

    defence = read_defence(file)
    if defence.hedging is not None:
        msg = f"{file}: the service does not support hedging: remove [hedging]"
        raise ConfigurationError(msg)
    fields = dict(read_document(file).data)
    for section in ("breaker", "budget", "limiter"):
        if fields.pop(section, None) is not None:
            typer.echo(f"{file}: [{section}] is ignored: the service has its own", err=True)
    if fields.pop("retry_marked", False):
        typer.echo(f"{file}: retry_marked is ignored: it has no effect in the service", err=True)
    policy = policy_to_json(service_policy_from_file(fields))
    with connect(server, api_key) as client:
        try:
            stored = client.put_policy(name or file.stem, policy)
        except InvalidRequest as error:
            msg = f"{_field_location(file, error.field or '')}: {error.detail or error}"
            raise ConfigurationError(msg) from error
    if as_json:
        print_json(stored)
    else:
        print_text(f"{stored.policy_id}: version {stored.version} stored")


def _field_location(file: Path, field: str) -> str:
    """Return where the value of an API field was set: an option, or a field of the file."""
    from tarry.wire.policies import JSON_FIELDS

    json_name = field.partition("[")[0]
    if json_name == "policyId":
        return "--name"
    if json_name == "scheduleMs":
        return f"{file}: backoff.schedule"
    return f"{file}: {JSON_FIELDS[json_name].name}" if json_name in JSON_FIELDS else str(file)


def _row(policy: RetryPolicy) -> tuple[object, ...]:
    from tarry.core.text import format_duration

    def format_ms(ms: float | None) -> str:
        return "" if ms is None else format_duration(ms / 1000)

    return (
        policy.policy_id,
        "built in" if policy.version is None else policy.version,
        policy.max_attempts,
        format_ms(policy.initial_delay_ms),
        format_ms(policy.max_delay_ms),
        policy.jitter_type.lower(),
        format_ms(policy.attempt_timeout_ms),
        format_ms(policy.total_budget_ms),
    )
