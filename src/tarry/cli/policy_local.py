"""`tarry policy`: look at a policy, check it, and carry it to a service or other systems and back.

Only the document goes to standard output, so that it can be piped into another command.
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

    from tarry.policyfile.losses import Loss

TARGETS = ("envoy", "gateway-api", "grpc", "istio")
DEFAULT_PORT = 80
SOURCES = ("grpc", "istio")
FORMATS = (".json", ".toml")

app: typer.Typer = typer.Typer(
    name="policy",
    help="Explain a policy, check it, and carry it to the service or to other systems and back.",
    no_args_is_help=True,
)
app.command("list", epilog=example_epilog("tarry policy list"))(policy_remote.list_)
app.command(epilog=example_epilog("tarry policy show webhook > webhook.toml"))(policy_remote.show)
app.command(epilog=example_epilog("tarry policy apply webhook.toml"))(policy_remote.apply)

File = Annotated[
    str, typer.Argument(metavar="FILE", help="A policy in TOML, YAML or JSON, or a preset's name.")
]
Out = Annotated[Path | None, typer.Option(help="Write to this file instead of standard output.")]
Service = Annotated[
    str | None, typer.Option(help="grpc: the service, such as shop.Payments.", show_default="all")
]
Method = Annotated[str | None, typer.Option(help="grpc: the method.", show_default="all")]


@app.command(epilog=example_epilog("tarry policy export policy.toml --to istio --host payments"))
def export(
    file: File,
    to: Annotated[str, typer.Option(help=f"The system: {', '.join(TARGETS)}.")],
    host: Annotated[
        str | None, typer.Option(help="The service that is called; not for grpc.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The name of the resources.", show_default="from the host")
    ] = None,
    service: Service = None,
    method: Method = None,
    port: Annotated[
        int | None,
        typer.Option(help="gateway-api: the port of the service.", show_default=str(DEFAULT_PORT)),
    ] = None,
    out: Out = None,
) -> None:
    """Write a policy as the configuration of a mesh, a proxy, a gateway or a gRPC channel.

    What it cannot say is in comments at the top, and on standard error if piped.
    """
    from tarry.cli.files import read_policy
    from tarry.core.checks import check_one_of
    from tarry.policyfile.export import to_envoy, to_gateway_api, to_grpc, to_istio

    check_one_of("--to", to, TARGETS)
    _check(out)
    if to == "grpc":
        reason = "a service config names the service that is called by --service and --method"
        _unused(f"--to {to}", reason, host=host, name=name, port=port)
        made = to_grpc(read_policy(file), service=service, method=method)
        _put(_json(made.documents[0]), out)
        _tell(made.losses, f"{to} cannot say")
        return
    reason = "it names the service that is called by --host"
    _unused(f"--to {to}", reason, service=service, method=method)
    if to != "gateway-api":
        _unused(f"--to {to}", "only an HTTPRoute of gateway-api has a port", port=port)
    if host is None:
        from tarry.errors import ConfigurationError

        rule = f"must name the service that is called to export to {to}"
        raise ConfigurationError("--host", rule)
    defence = read_policy(file)
    if to == "gateway-api":
        port = DEFAULT_PORT if port is None else port
        made = to_gateway_api(defence, host=host, port=port, name=name)
    else:
        made = (to_envoy if to == "envoy" else to_istio)(defence, host=host, name=name)
    from tarry.cli.files import yaml_text

    _put_commented(yaml_text(made.documents), made.losses, ("export", "to", to), out)


@app.command("import", epilog=example_epilog("tarry policy import config.json --from grpc"))
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A document in JSON or YAML.")],
    source: Annotated[str, typer.Option("--from", help=f"The system: {', '.join(SOURCES)}.")],
    service: Service = None,
    method: Method = None,
    out: Annotated[
        Path | None, typer.Option(help="Write NAME.toml or NAME.json instead of printing TOML.")
    ] = None,
) -> None:
    """Make a policy file from a gRPC service config, or from resources of Istio.

    What tarry cannot say is in comments at the top, and on standard error if piped.
    """
    from tarry.cli.files import read_documents
    from tarry.core.checks import check_one_of
    from tarry.errors import ConfigurationError
    from tarry.policyfile import toml
    from tarry.policyfile.imports import from_grpc, from_istio

    check_one_of("--from", source, SOURCES)
    _check(out, FORMATS)
    if source == "istio":
        reason = "the first route is read: put the others into files of their own"
        _unused(f"--from {source}", reason, service=service, method=method)
    documents = read_documents(file)
    if source == "grpc" and len(documents) > 1:
        msg = f"{file}: a service config is one document, got {len(documents)}"
        raise ConfigurationError(msg)
    try:
        if source == "istio":
            made = from_istio(documents)
        else:
            made = from_grpc(documents[0], service=service, method=method)
    except ConfigurationError as error:
        msg = f"{file}: {error}"
        raise ConfigurationError(msg) from None
    printable = made.to_dict()
    if out is not None and out.suffix.lower() == ".json":
        _put(_json(printable), out)
        _tell(made.losses, "tarry cannot say")
    else:
        _put_commented(toml.dumps(printable), made.losses, ("import", "from", source), out)


@app.command(epilog=example_epilog("tarry policy explain webhook"))
def explain(file: File) -> None:
    """Say in words what a policy does: its delays, its worst case time and its worst case load."""
    from tarry.cli.files import read_policy
    from tarry.policyfile.explain import explain as in_words

    typer.echo(in_words(read_policy(file)))


@app.command(epilog=example_epilog("tarry policy check policy.toml"))
def check(file: File) -> None:
    """Say whether a policy file is right; the first mistake is named with its line.

    What is allowed and looks wrong is told on standard error.
    """
    from tarry.cli.files import read_policy
    from tarry.policyfile.check import doubts
    from tarry.policyfile.defence import Defence

    defence = read_policy(file)
    for doubt in doubts(defence):
        typer.echo(f"{file}: warning: {doubt}", err=True)
    attempts = (defence.hedging or defence.policy).max_attempts
    most = "1 attempt" if attempts == 1 else f"up to {attempts} attempts"
    hedged = [] if defence.hedging is None else ["hedged"]
    beside = [
        name for name in ("breaker", "budget", "limiter") if getattr(defence, name) is not None
    ]
    defaults = " (every field is a default)" if defence == Defence() else ""
    typer.echo(f"{file}: ok: {', '.join([most, *hedged, *beside])}{defaults}")


def _unused(by: str, reason: str, **given: object) -> None:
    """Refuse options that would be ignored."""
    from tarry.errors import ConfigurationError

    for name, value in given.items():
        if value is not None:
            msg = f"--{name} is not for {by}: {reason}"
            raise ConfigurationError(msg)


def _json(printable: object) -> str:
    import json

    return json.dumps(printable, indent=2) + "\n"


def _put_commented(
    text: str, losses: Sequence[Loss], command: tuple[str, str, str], out: Path | None
) -> None:
    """Write a document with its losses as comments, and list them for those who see neither."""
    from tarry.cli.output import printable

    verb, preposition, system = command
    lines = [
        f"Written by `tarry policy {verb} --{preposition} {system}`.",
        *(f"Not said here: {printable(str(loss))}" for loss in losses),
    ]
    _put("".join(f"# {line}\n" for line in lines) + text, out)
    if out is not None or not sys.stdout.isatty():
        _tell(losses, f"{system if verb == 'export' else 'tarry'} cannot say")


def _tell(losses: Sequence[Loss], what: str) -> None:
    from tarry.cli.output import printable

    for loss in losses:
        typer.echo(f"{what}: {printable(str(loss))}", err=True)


def _check(out: Path | None, formats: tuple[str, ...] = ()) -> None:
    from tarry.cli.files import check_output_path

    if out is not None:
        check_output_path(out, formats)


def _put(text: str, out: Path | None) -> None:
    from tarry.cli.files import write_text

    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)
