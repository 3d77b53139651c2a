"""`tarry policy`: explain, check, export and import policy files.

`policy_remote` has the subcommands that talk to a service. Only documents are written to standard
output, so that they can be piped into another command.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tarry.cli import policy_remote
from tarry.cli.options import example_epilog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.policyfile.translation import Loss

EXPORT_SYSTEMS = ("envoy", "gateway-api", "grpc", "istio")
DEFAULT_PORT = 80
IMPORT_SYSTEMS = ("grpc", "istio")
POLICY_SUFFIXES = (".json", ".toml")

app: typer.Typer = typer.Typer(
    name="policy",
    help="Explain, check, export and import policies, and manage those of a service.",
    no_args_is_help=True,
)
app.command("list", epilog=example_epilog("tarry policy list"))(policy_remote.list_)
app.command(epilog=example_epilog("tarry policy show webhook > webhook.toml"))(policy_remote.show)
app.command(epilog=example_epilog("tarry policy apply webhook.toml"))(policy_remote.apply)

FileArgument = Annotated[
    str,
    typer.Argument(metavar="FILE", help="Policy in TOML, YAML or JSON, or the name of a preset."),
]
OutOption = Annotated[
    Path | None, typer.Option(help="Write to this file instead of standard output.")
]
ServiceOption = Annotated[
    str | None, typer.Option(help="grpc: service name, such as shop.Payments.", show_default="all")
]
MethodOption = Annotated[str | None, typer.Option(help="grpc: method name.", show_default="all")]


@app.command(epilog=example_epilog("tarry policy export policy.toml --to istio --host payments"))
def export(
    file: FileArgument,
    to: Annotated[str, typer.Option(help=f"Target system: {', '.join(EXPORT_SYSTEMS)}.")],
    host: Annotated[
        str | None, typer.Option(help="Host of the called service; not for grpc.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the resources.", show_default="from the host")
    ] = None,
    service: ServiceOption = None,
    method: MethodOption = None,
    port: Annotated[
        int | None,
        typer.Option(help="gateway-api: port of the service.", show_default=str(DEFAULT_PORT)),
    ] = None,
    out: OutOption = None,
) -> None:
    """Export a policy as the configuration of a service mesh, a proxy, a gateway or gRPC.

    Settings that the target system lacks, or treats differently, are listed in comments at the
    top, and on standard error when the output is piped.
    """
    from tarry.cli.files import read_policy
    from tarry.core.checks import check_one_of
    from tarry.policyfile.envoy import to_envoy
    from tarry.policyfile.gateway import to_gateway_api
    from tarry.policyfile.grpc import to_grpc
    from tarry.policyfile.istio import to_istio

    check_one_of("--to", to, EXPORT_SYSTEMS)
    _check_output(out)
    if to == "grpc":
        reason = "use --service and --method to name the called service"
        _reject_options(f"--to {to}", reason, host=host, name=name, port=port)
        exported = to_grpc(read_policy(file), service=service, method=method)
        _write(_to_json(exported.documents[0]), out)
        _report_losses(exported.losses, f"{to} differs")
        return
    reason = "use --host to name the called service"
    _reject_options(f"--to {to}", reason, service=service, method=method)
    if to != "gateway-api":
        _reject_options(f"--to {to}", "only gateway-api has a port", port=port)
    if host is None:
        from tarry.errors import ConfigurationError

        rule = f"is required for --to {to}: the host of the called service"
        raise ConfigurationError("--host", rule)
    defence = read_policy(file)
    if to == "gateway-api":
        port = DEFAULT_PORT if port is None else port
        exported = to_gateway_api(defence, host=host, port=port, name=name)
    else:
        exported = (to_envoy if to == "envoy" else to_istio)(defence, host=host, name=name)
    from tarry.cli.files import yaml_text

    _write_with_losses(yaml_text(exported.documents), exported.losses, ("export", "to", to), out)


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

    Settings that tarry lacks, or treats differently, are listed in comments at the top, and on
    standard error when the output is piped.
    """
    from tarry.cli.files import read_documents
    from tarry.core.checks import check_one_of
    from tarry.errors import ConfigurationError
    from tarry.policyfile import toml
    from tarry.policyfile.grpc import from_grpc
    from tarry.policyfile.istio import from_istio

    check_one_of("--from", source, IMPORT_SYSTEMS)
    _check_output(out, POLICY_SUFFIXES)
    if source == "istio":
        reason = "the first route of the file is imported"
        _reject_options(f"--from {source}", reason, service=service, method=method)
    documents = read_documents(file)
    if source == "grpc" and len(documents) > 1:
        msg = f"{file}: a service config must be one document, got {len(documents)}"
        raise ConfigurationError(msg)
    try:
        if source == "istio":
            imported = from_istio(documents)
        else:
            imported = from_grpc(documents[0], service=service, method=method)
    except ConfigurationError as error:
        msg = f"{file}: {error}"
        raise ConfigurationError(msg) from None
    fields = imported.to_dict()
    if out is not None and out.suffix.lower() == ".json":
        _write(_to_json(fields), out)
        _report_losses(imported.losses, "tarry differs")
    else:
        _write_with_losses(toml.dumps(fields), imported.losses, ("import", "from", source), out)


@app.command(epilog=example_epilog("tarry policy explain webhook"))
def explain(file: FileArgument) -> None:
    """Describe what a policy does: its delays, and the worst-case time and load."""
    from tarry.cli.files import read_policy
    from tarry.policyfile.explain import explain as explain_policy

    typer.echo(explain_policy(read_policy(file)))


@app.command(epilog=example_epilog("tarry policy check policy.toml"))
def check(file: FileArgument) -> None:
    """Check a policy file; the first error is reported with its line.

    Settings that are valid but probably wrong are reported as warnings on standard error.
    """
    from tarry.cli.files import read_policy
    from tarry.policyfile.defence import Defence
    from tarry.policyfile.explain import find_warnings

    defence = read_policy(file)
    for warning in find_warnings(defence):
        typer.echo(f"{file}: warning: {warning}", err=True)
    attempts = (defence.hedging or defence.policy).max_attempts
    attempts_text = "1 attempt" if attempts == 1 else f"up to {attempts} attempts"
    hedged = [] if defence.hedging is None else ["hedged"]
    guards = [
        name for name in ("breaker", "budget", "limiter") if getattr(defence, name) is not None
    ]
    defaults = " (all fields have their defaults)" if defence == Defence() else ""
    typer.echo(f"{file}: ok: {', '.join([attempts_text, *hedged, *guards])}{defaults}")


def _reject_options(used_with: str, reason: str, **options: object) -> None:
    """Raise `ConfigurationError` for each given option, because it would be ignored."""
    from tarry.errors import ConfigurationError

    for name, value in options.items():
        if value is not None:
            raise ConfigurationError(f"--{name}", f"cannot be used with {used_with}: {reason}")


def _to_json(document: object) -> str:
    import json

    return json.dumps(document, indent=2) + "\n"


def _write_with_losses(
    text: str, losses: Sequence[Loss], command: tuple[str, str, str], out: Path | None
) -> None:
    """Write a document that begins with its losses as comments.

    A loss is a setting that the other system lacks or treats differently. Losses are also printed
    to standard error, unless the document itself is printed on a terminal. `command` has the
    verb, the option's name and its value: ("export", "to", "istio").
    """
    from tarry.cli.output import printable

    verb, option, system = command
    lines = [
        f"Written by `tarry policy {verb} --{option} {system}`.",
        *(f"Differs: {printable(str(loss))}" for loss in losses),
    ]
    _write("".join(f"# {line}\n" for line in lines) + text, out)
    if out is not None or not sys.stdout.isatty():
        _report_losses(losses, f"{system if verb == 'export' else 'tarry'} differs")


def _report_losses(losses: Sequence[Loss], prefix: str) -> None:
    from tarry.cli.output import printable

    for loss in losses:
        typer.echo(f"{prefix}: {printable(str(loss))}", err=True)


def _check_output(out: Path | None, suffixes: tuple[str, ...] = ()) -> None:
    from tarry.cli.files import check_output_path

    if out is not None:
        check_output_path(out, suffixes)


def _write(text: str, out: Path | None) -> None:
    from tarry.cli.files import write_text

    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)
