"""`tarry policy`: look at a policy, check it, and carry it to other systems and back.

Only the document goes to standard output, so that it can be piped into another command.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tarry.wire.defence import Defence
    from tarry.wire.losses import Exported, Loss

TARGETS = ("envoy", "gateway-api", "grpc", "istio")
SOURCES = ("grpc", "istio")
FORMATS = (".json", ".toml")

app: typer.Typer = typer.Typer(
    name="policy",
    help="Explain a policy, check it, and carry it to other systems and back.",
    no_args_is_help=True,
)

File = Annotated[
    str, typer.Argument(metavar="FILE", help="A policy in TOML, YAML or JSON, or a preset's name.")
]
Out = Annotated[Path | None, typer.Option(help="Write to this file instead of standard output.")]
Service = Annotated[
    str | None, typer.Option(help="grpc: the service, such as shop.Payments.", show_default="all")
]
Method = Annotated[str | None, typer.Option(help="grpc: the method.", show_default="all")]


@app.command()
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
    port: Annotated[int, typer.Option(help="gateway-api: the port of the service.")] = 80,
    out: Out = None,
) -> None:
    """Write a policy as the configuration of a mesh, a proxy, a gateway or a gRPC channel.

    What the target cannot say is listed on standard error and in comments at the top.
    """
    from tarry.core.checks import one_of

    one_of("--to", to, TARGETS)
    made = _exported(
        _read(file), to, host=host, name=name, service=service, method=method, port=port
    )
    if to == "grpc":
        import json

        text = json.dumps(made.documents[0], indent=2) + "\n"
    else:
        from tarry.cli.documents import yaml_text

        title = f"Written by `tarry policy export --to {to}`."
        text = _comments(title, made.losses) + yaml_text(made.documents)
    _tell(made.losses, f"{to} cannot say")
    _put(text, out)


@app.command("import")
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

    What tarry cannot say is listed on standard error, and in comments if the file is TOML.
    """
    from tarry.cli.documents import read_documents
    from tarry.core.checks import one_of
    from tarry.errors import ConfigurationError
    from tarry.wire import toml
    from tarry.wire.imports import from_grpc, from_istio

    one_of("--from", source, SOURCES)
    if out is not None and out.suffix.lower() not in FORMATS:
        msg = f"--out: the name must end in {' or '.join(FORMATS)}, got {str(out)!r}"
        raise ConfigurationError(msg)
    documents = read_documents(file)
    try:
        if source == "istio":
            made = from_istio(documents)
        else:
            made = from_grpc(documents[0], service=service, method=method)
    except ConfigurationError as error:
        msg = f"{file}: {error}"
        raise ConfigurationError(msg) from None
    plain = made.defence.to_dict()
    if out is not None and out.suffix.lower() == ".json":
        import json

        text = json.dumps(plain, indent=2) + "\n"
    else:
        title = f"Written by `tarry policy import --from {source}`."
        text = _comments(title, made.losses) + toml.dumps(plain)
    _tell(made.losses, "tarry cannot say")
    _put(text, out)


@app.command()
def explain(file: File) -> None:
    """Say in words what a policy does: its delays, its worst case time and its worst case load."""
    from tarry.wire.losses import shown

    defence = _read(file)
    if defence.hedging is None:
        typer.echo(defence.policy.explain())
    for table, arguments in defence.to_dict().items():
        if table in {"hedging", "breaker", "budget", "limiter"}:
            said = ", ".join(f"{name} {shown(value)}" for name, value in arguments.items())
            typer.echo(f"{table}: {said or 'with its defaults'}")


@app.command()
def check(file: File) -> None:
    """Say whether a policy file is right; the first mistake is named with its line."""
    defence = _read(file)
    attempts = (defence.hedging or defence.policy).max_attempts
    kind = "retries" if defence.hedging is None else "hedging"
    beside = [
        name for name in ("breaker", "budget", "limiter") if getattr(defence, name) is not None
    ]
    plural = "" if attempts == 1 else "s"
    typer.echo(f"{file}: ok: {', '.join([f'{attempts} attempt{plural} by {kind}', *beside])}")


def _read(file: str) -> Defence:
    """Read a file, or take the preset of that name where there is no such file."""
    from tarry.core.policy import PRESETS
    from tarry.simulator.files import read_defence
    from tarry.wire.defence import Defence

    path = Path(file)
    if file in PRESETS and not path.exists():
        return Defence(PRESETS[file])
    return read_defence(path)


def _exported(defence: Defence, to: str, *, host: str | None, **given: Any) -> Exported:
    from tarry.errors import ConfigurationError
    from tarry.wire.export import to_envoy, to_gateway_api, to_grpc, to_istio

    if to == "grpc":
        return to_grpc(defence, service=given["service"], method=given["method"])
    if host is None:
        msg = f"--host must name the service that is called to export to {to}"
        raise ConfigurationError(msg)
    if to == "gateway-api":
        return to_gateway_api(defence, host=host, port=given["port"], name=given["name"])
    make = to_envoy if to == "envoy" else to_istio
    return make(defence, host=host, name=given["name"])


def _comments(title: str, losses: Iterable[Loss]) -> str:
    from tarry.cli.words import plain

    lines = [title, *(f"Not said here: {plain(str(loss))}" for loss in losses)]
    return "".join(f"# {line}\n" for line in lines)


def _tell(losses: Iterable[Loss], what: str) -> None:
    from tarry.cli.words import plain

    for loss in losses:
        typer.echo(f"{what}: {plain(str(loss))}", err=True)


def _put(text: str, out: Path | None) -> None:
    from tarry.errors import ConfigurationError

    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        msg = f"--out: {out} cannot be written: {error.strerror}"
        raise ConfigurationError(msg) from None
