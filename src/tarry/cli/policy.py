"""`tarry policy`: explain, check, export and import policy files; manage policies of a service.

`export` and `import` write only documents to standard output, so that it can be piped into another
command. A defence is a policy or hedging, with an optional breaker, budget and limiter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tarry.cli import output
from tarry.cli.options import (
    DEFAULT_SERVER,
    ApiKeyOption,
    Command,
    JsonOption,
    ServerOption,
    example_epilog,
)
from tarry.cli.remote import connect
from tarry.client.errors import InvalidRequest, NotFound
from tarry.core.checks import check_one_of
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from tarry.core.policy import Policy, PolicyField
    from tarry.policyfile.defence import Defence
    from tarry.policyfile.translation import Difference
    from tarry.wire.tasks import RetryPolicy

EXPORT_SYSTEMS = ("envoy", "gateway-api", "grpc", "istio")
DEFAULT_GATEWAY_PORT = 80
IMPORT_SYSTEMS = ("grpc", "istio")
_COLUMNS: dict[str, Callable[[RetryPolicy], object]] = {
    "policy": lambda policy: policy.policy_id,
    "version": lambda policy: "built in" if policy.version is None else policy.version,
    "attempts": lambda policy: policy.max_attempts,
    "initial delay": lambda policy: output.format_ms(policy.initial_delay_ms),
    "max delay": lambda policy: output.format_ms(policy.max_delay_ms),
    "jitter": lambda policy: policy.jitter_type.lower(),
    "timeout": lambda policy: output.format_ms(policy.attempt_timeout_ms),
    "total budget": lambda policy: output.format_ms(policy.total_budget_ms),
}
"""Columns of the list of policies: the heading, and the function that returns a cell."""

app: typer.Typer = typer.Typer(
    name="policy",
    help="Explain, check, export and import policies, and manage those of a service.",
    no_args_is_help=True,
)

FileOrPresetArgument = Annotated[
    str,
    typer.Argument(metavar="FILE|PRESET", help="Policy in TOML, YAML or JSON, or a preset."),
]
OutOption = Annotated[
    Path | None, typer.Option(help="Write to this file instead of standard output.")
]
ServiceOption = Annotated[
    str | None,
    typer.Option(help="Service, such as shop.Payments; only for grpc.", show_default="all"),
]
MethodOption = Annotated[
    str | None, typer.Option(help="Method of the service; only for grpc.", show_default="all")
]


class _CommandWithFields(Command):
    """A command whose help ends with a table of the fields that a policy file may have."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from rich.console import Console

        from tarry.core.policy import POLICY_FIELDS

        rows = ((field.name, _describe_field(field)) for field in POLICY_FIELDS)
        Console().print(output.table(("Policy field", "Meaning (allowed values; default)"), rows))
        output.print_text("A field can also have its name and unit in the API: initialDelayMs = 50")


def _describe_field(field: PolicyField) -> str:
    from tarry.core.policy import HIGHEST_STATUS
    from tarry.core.text import format_ranges

    bound = f"{'>=' if field.is_minimum_allowed else '>'} {field.minimum:g}"
    allowed = {
        "count": f"whole number {bound}",
        "choice": ", ".join(field.choices),
        "statuses": f"list of {field.minimum:g} to {HIGHEST_STATUS}, or a class such as 5xx",
        "codes": "list of code names",
        "flag": "true, false",
        "header": "name of a header",
    }.get(field.type, f"{field.type} {bound}")
    default = field.default
    if field.type == "statuses":
        default = format_ranges(default)
    elif field.type == "codes":
        default = ", ".join(sorted(default))
    elif not isinstance(default, str):
        default = "none" if default is None else json.dumps(default)
    return f"{field.help} ({allowed}; {default})"


@app.command("list", epilog=example_epilog("tarry policy list"))
def list_(
    server: ServerOption = DEFAULT_SERVER, api_key: ApiKeyOption = None, as_json: JsonOption = False
) -> None:
    """List the policies of a service; the built-in policies come last."""
    with connect(server, api_key) as client:
        policies = list(client.policies())

    def to_row(policy: RetryPolicy) -> list[object]:
        return [get_cell(policy) for get_cell in _COLUMNS.values()]

    output.print_list(policies, tuple(_COLUMNS), to_row, as_json=as_json)


@app.command(epilog=example_epilog("tarry policy show webhook > webhook.toml"))
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the policy.")],
    version: Annotated[
        int | None, typer.Option(min=1, help="Version.", show_default="newest")
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a policy of a service as TOML, in the format that `tarry policy apply` reads."""
    from tarry.core.outcome import RETRYABLE_STATUSES
    from tarry.policyfile import toml

    with connect(server, api_key) as client:
        try:
            policy = client.policy(name, version)
        except NotFound as error:
            if version is None:
                raise
            newest = client.policy(name).version
            hint = f"the newest is {newest}" if newest else "a built-in policy has no versions"
            raise NotFound(f"{name} has no version {version}: {hint}") from error
    if as_json:
        output.print_json(policy)
        return
    file_fields = to_core_policy(policy).to_dict()
    statuses = frozenset(file_fields["retryable_statuses"])
    if statuses == RETRYABLE_STATUSES:  # a hundred numbers
        del file_fields["retryable_statuses"]
    else:
        file_fields["retryable_statuses"] = _group_statuses(statuses)
    if "total_budget" not in file_fields:
        # TOML has no null, and a file without a preset gets the total budget of the default.
        file_fields = {"preset": "quick", **file_fields}
    typer.echo(toml.dumps(file_fields), nl=False)


def _group_statuses(statuses: Collection[int]) -> list[int | str]:
    """Return statuses as in a policy file: complete classes by name, such as "5xx"."""
    from tarry.core.policy import STATUS_CLASSES

    rest = set(statuses)
    classes = [name for name, members in STATUS_CLASSES.items() if rest.issuperset(members)]
    rest.difference_update(*(STATUS_CLASSES[name] for name in classes))
    return [*sorted(rest), *classes]


def to_core_policy(stored_policy: RetryPolicy) -> Policy:
    """Return a policy of a service as a `Policy`."""
    from tarry.core.policy import Policy
    from tarry.wire.policies import JSON_FIELDS, policy_from_json

    document = output.to_builtins(stored_policy)
    fields = {field: value for field, value in document.items() if field in JSON_FIELDS}
    return policy_from_json(fields, Policy())


@app.command(cls=_CommandWithFields, epilog=example_epilog("tarry policy apply webhook.toml"))
def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Policy in TOML, YAML or JSON.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the policy.", show_default="the file's name")
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store the policy of a file in a service, as a new policy or a new version.

    Tasks that are not pinned to a version use the new version from their next attempt on.
    """
    from tarry.simulator.files import read_policy_document
    from tarry.simulator.schema import build_defence
    from tarry.wire.policies import policy_to_json, service_policy_from_file

    document = read_policy_document(file)
    if build_defence(document.root).hedging is not None:
        raise ConfigurationError(f"{file}: the service does not support hedging: remove [hedging]")
    fields = dict(document.data)
    for part in ("breaker", "budget", "limiter"):
        if fields.pop(part, None) is not None:
            typer.echo(f"{file}: [{part}] is ignored: the service has its own {part}", err=True)
    if fields.pop("ignore_retried_below", False):
        effect = "has no effect, because the service does not see the retries of other layers"
        typer.echo(f"{file}: ignore_retried_below {effect}", err=True)
    policy = policy_to_json(service_policy_from_file(fields))
    with connect(server, api_key) as client:
        try:
            stored = client.put_policy(name or file.stem, policy)
        except InvalidRequest as error:
            msg = f"{_field_location(file, error.field or '')}: {error.detail or error}"
            raise ConfigurationError(msg) from error
    text = f"{stored.policy_id}: version {stored.version} stored"
    output.print_result(stored, text, as_json=as_json)


def _field_location(file: Path, field: str) -> str:
    """Return where the value of an API field was set: an option, or a field of the file."""
    from tarry.wire.policies import JSON_FIELDS

    json_name = field.partition("[")[0]  # the field may be an item, such as scheduleMs[2]
    if json_name == "policyId":
        return "--name"
    if json_name == "scheduleMs":
        return f"{file}: backoff.schedule"
    return f"{file}: {JSON_FIELDS[json_name].name}" if json_name in JSON_FIELDS else str(file)


@app.command(epilog=example_epilog("tarry policy export policy.toml --to istio --host payments"))
def export(
    file_or_preset: FileOrPresetArgument,
    to: Annotated[str, typer.Option(help=f"Target system: {', '.join(EXPORT_SYSTEMS)}.")],
    host: Annotated[
        str | None, typer.Option(help="Host of the called service; not for grpc.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the exported resources.", show_default="from the host"),
    ] = None,
    service: ServiceOption = None,
    method: MethodOption = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="Port of the host; only for gateway-api.", show_default=str(DEFAULT_GATEWAY_PORT)
        ),
    ] = None,
    out: OutOption = None,
) -> None:
    """Export a policy as the configuration of a service mesh, a proxy, a gateway or gRPC.

    Settings that the target system lacks or treats differently are listed in comments at the top
    of YAML. They are also printed to standard error, unless the YAML is printed to a terminal.
    """
    from tarry.policyfile.envoy import to_envoy
    from tarry.policyfile.gateway import to_gateway_api
    from tarry.policyfile.grpc import to_grpc
    from tarry.policyfile.istio import to_istio
    from tarry.simulator.documents import import_yaml

    check_one_of("--to", to, EXPORT_SYSTEMS)
    output.check_output_path(out)
    if to == "grpc":
        reason = "use --service and --method to name the called service"
        _reject_options(f"--to {to}", reason, host=host, name=name, port=port)
        exported = to_grpc(read_defence_or_preset(file_or_preset), service=service, method=method)
        text = json.dumps(exported.documents[0], indent=2) + "\n"
        _write_document(text, exported.differences, out, target_system=to)
        return
    reason = "use --host to name the called service"
    _reject_options(f"--to {to}", reason, service=service, method=method)
    if to != "gateway-api":
        _reject_options(f"--to {to}", "only gateway-api has a port", port=port)
    if host is None:
        rule = f"is required for --to {to}: the host of the called service"
        raise ConfigurationError("--host", rule)
    defence = read_defence_or_preset(file_or_preset)
    if to == "gateway-api":
        port = DEFAULT_GATEWAY_PORT if port is None else port
        exported = to_gateway_api(defence, host=host, port=port, name=name)
    else:
        exported = (to_envoy if to == "envoy" else to_istio)(defence, host=host, name=name)
    text = import_yaml().safe_dump_all(
        exported.documents, sort_keys=False, allow_unicode=True, width=1000
    )
    title = f"Written by `tarry policy export --to {to}`."
    _write_document(text, exported.differences, out, target_system=to, title_comment=title)


@app.command("import", epilog=example_epilog("tarry policy import config.json --from grpc"))
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Document in JSON or YAML.")],
    source: Annotated[
        str, typer.Option("--from", help=f"Source system: {', '.join(IMPORT_SYSTEMS)}.")
    ],
    service: ServiceOption = None,
    method: MethodOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write to NAME.toml or NAME.json instead of standard output."),
    ] = None,
) -> None:
    """Create a policy file from a gRPC service config, or from Istio resources.

    Settings that tarry lacks or treats differently are listed in comments at the top of TOML. They
    are also printed to standard error, unless the TOML is printed to a terminal.
    """
    from tarry.policyfile.grpc import from_grpc
    from tarry.policyfile.istio import from_istio

    check_one_of("--from", source, IMPORT_SYSTEMS)
    output.check_output_path(out, output.POLICY_SUFFIXES)
    if source == "istio":
        reason = "the first route of the file is always imported"
        _reject_options(f"--from {source}", reason, service=service, method=method)
    documents = _read_documents(file)
    if source == "grpc" and len(documents) > 1:
        msg = f"{file}: a service config must be one document, got {len(documents)}"
        raise ConfigurationError(msg)
    try:
        if source == "istio":
            imported = from_istio(documents)
        else:
            imported = from_grpc(documents[0], service=service, method=method)
    except ConfigurationError as error:
        raise ConfigurationError(f"{file}: {error}") from None
    is_json = out is not None and out.suffix.lower() == ".json"
    text = policy_text(imported.to_dict(), as_json=is_json)
    title = None if is_json else f"Written by `tarry policy import --from {source}`."
    _write_document(text, imported.differences, out, target_system="tarry", title_comment=title)


@app.command(epilog=example_epilog("tarry policy explain webhook"))
def explain(file_or_preset: FileOrPresetArgument) -> None:
    """Describe what a policy does: its delays, and the worst-case time and load."""
    from tarry.policyfile.explain import explain as explain_policy

    typer.echo(explain_policy(read_defence_or_preset(file_or_preset)))


@app.command(cls=_CommandWithFields, epilog=example_epilog("tarry policy check policy.toml"))
def check(file_or_preset: FileOrPresetArgument) -> None:
    """Check a policy file; the first error is reported with its line.

    Settings that are valid but probably wrong are reported as warnings on standard error.
    """
    from tarry.policyfile.defence import Defence
    from tarry.policyfile.explain import find_warnings

    defence = read_defence_or_preset(file_or_preset)
    for warning in find_warnings(defence):
        typer.echo(f"{file_or_preset}: warning: {warning}", err=True)
    max_attempts = (defence.hedging or defence.policy).max_attempts
    features = ["1 attempt" if max_attempts == 1 else f"up to {max_attempts} attempts"]
    if defence.hedging is not None:
        features.append("hedged")
    names = ("breaker", "budget", "limiter")
    features += [name for name in names if getattr(defence, name) is not None]
    defaults = " (all fields have their defaults)" if defence == Defence() else ""
    typer.echo(f"{file_or_preset}: ok: {', '.join(features)}{defaults}")


def _reject_options(used_with: str, reason: str, **options: object) -> None:
    """Raise `ConfigurationError` if an option is given that has no effect with `used_with`."""
    for name, value in options.items():
        if value is not None:
            raise ConfigurationError(f"--{name}", f"cannot be used with {used_with}: {reason}")


def _write_document(
    text: str,
    differences: Sequence[Difference],
    out: Path | None,
    *,
    target_system: str,
    title_comment: str | None = None,
) -> None:
    """Write a document, and print the settings that the target system lacks or treats differently.

    The document begins with `title_comment` and the differences, or has no comments if that is None
    (for JSON). If a terminal shows these comments, the differences are not printed again.
    """
    difference_texts = [output.to_printable_line(str(difference)) for difference in differences]
    if title_comment is not None:
        lines = [title_comment]
        lines += [f"Different in {target_system}: {difference}" for difference in difference_texts]
        text = "".join(f"# {line}\n" for line in lines) + text
    if out is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(out, text)
    if title_comment is None or out is not None or not sys.stdout.isatty():
        for difference in difference_texts:
            typer.echo(f"different in {target_system}: {difference}", err=True)


def policy_text(fields: dict[str, Any], *, as_json: bool) -> str:
    """Return the text of a policy file, in JSON or TOML."""
    from tarry.policyfile.toml import dumps

    return json.dumps(fields, indent=2) + "\n" if as_json else dumps(fields)


def _read_documents(path: Path) -> list[Any]:
    """Return the documents of a JSON or YAML file; a YAML file may contain several."""
    from tarry.simulator.documents import parse_file

    documents = [parsed.data for parsed in parse_file(path) if parsed.data is not None]
    if not documents:
        raise ConfigurationError(f"{path}: the file is empty")
    return documents


def read_defence_or_preset(file_or_preset: str) -> Defence:
    """Return the defence in a policy file or, for a preset, a defence with only a policy."""
    from tarry.core.policy import PRESETS
    from tarry.policyfile.defence import Defence
    from tarry.simulator.files import read_defence

    path = Path(file_or_preset)
    if not path.suffix and not path.exists():
        if file_or_preset in PRESETS:
            return Defence(PRESETS[file_or_preset])
        presets = ", ".join(PRESETS)
        msg = f"{file_or_preset!r} is neither a file nor a preset; the presets are {presets}"
        raise ConfigurationError(msg)
    return read_defence(path)
