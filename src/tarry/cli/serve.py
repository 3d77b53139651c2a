"""`tarry serve`: the durable retry service, and `tarry config`: what it would go by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tarry.cli.options import JsonOption  # noqa: TC001 - typer reads annotations
from tarry.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from tarry.service.settings import LoadedSettings

Store = Annotated[
    str | None, typer.Option(help="Where tasks are kept: sqlite:PATH or memory:", metavar="URL")
]
Host = Annotated[str | None, typer.Option(help="The address to listen on.")]
Port = Annotated[int | None, typer.Option(help="The port; 0 takes a free one.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-target",
        help="Let tasks go to this network or host too: 10.1.0.0/16, *.internal. Repeatable.",
        metavar="CIDR|HOST",
    ),
]
Dev = Annotated[
    bool | None, typer.Option("--dev", help="Let tasks go to this machine, to try things out.")
]
Config = Annotated[Path | None, typer.Option(help="A TOML file with settings.", metavar="FILE")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other setting; see `tarry config`.", metavar="NAME=VALUE"),
]
_PAUSED_FOR = 5
"""Seconds that open connections get at the end, beyond what running attempts get."""


def serve(
    store: Store = None,
    host: Host = None,
    port: Port = None,
    allow: Allow = None,
    dev: Dev = None,
    config: Config = None,
    changes: Set = None,
) -> None:
    """Take HTTP requests, keep them, and deliver each at least once.

    Settings come from flags, then TARRY_* variables, then the file. SIGTERM and Ctrl-C end it in
    order: what runs is finished, the rest is handed back.
    """
    import signal

    loaded = settings_of(store, host, port, allow, dev, config, changes)
    from tarry.cli.exit_codes import EXIT_UNREACHABLE
    from tarry.service.app import Service
    from tarry.service.http.server import Server

    _log(loaded.settings.log, loaded.settings.log_level)
    service = Service(loaded.settings, writer_process=True)
    server = Server(service, shutdown_timeout_s=loaded.settings.drain_ms / 1000 + _PAUSED_FOR)
    signal.signal(signal.SIGTERM, _ended)
    is_up = False
    why = "the service did not start: the log above says why"

    def ready(address: str) -> None:
        nonlocal is_up
        is_up = True
        _greet(address, loaded)

    try:
        server.run(ready)
    except SystemExit as end:  # the server's own way to say that it cannot listen
        if not end.code:
            raise
        if isinstance(end.__context__, OSError):
            settings = loaded.settings
            why = _unheard(end.__context__, settings.host, settings.port) or why
    if not is_up:
        typer.echo(f"error: {why}", err=True)
        raise typer.Exit(EXIT_UNREACHABLE)


def config(
    store: Store = None,
    host: Host = None,
    port: Port = None,
    allow: Allow = None,
    dev: Dev = None,
    config: Config = None,
    changes: Set = None,
    as_json: JsonOption = False,
) -> None:
    """Print the settings in force, and where each of them came from."""
    loaded = settings_of(store, host, port, allow, dev, config, changes)
    import msgspec

    from tarry.cli.output import console, print_json, table
    from tarry.service.settings import Settings

    if as_json:
        print_json(
            {
                name: {"value": loaded.redacted(name), "from": loaded.sources[name]}
                for name in Settings.__struct_fields__
            }
        )
        return
    rows = [
        (field.name, loaded.format(field.name), loaded.sources[field.name], _meaning(field.type))
        for field in msgspec.structs.fields(Settings)
    ]
    console().print(table(("setting", "value", "from", "what it is"), rows))


def _unheard(error: OSError, host: str, port: int) -> str | None:
    """Say what helps where the service cannot listen."""
    import errno
    import socket

    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken: choose another with --port"
    if error.errno == errno.EACCES:
        return f"this user may not listen on port {port}: choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{host} is no address of this machine: choose another with --host"
    return None


def _meaning(annotated: Any) -> str:
    """Return a setting's description, which stands in the outermost note on its type."""
    return str(annotated.__metadata__[-1].description)


def _ended(_signal: int, _frame: object) -> None:
    """Leave with 0: it was asked to end."""
    import sys

    sys.exit(0)


def need_service() -> None:
    """Refuse to go on without what the service is built on; the error has the install line."""
    from importlib import import_module

    try:
        import_module("tarry.service.app")
        import_module("tarry.service.http.server")
    except MissingExtra:
        raise
    except ImportError as missing:
        msg = f"the service needs {missing.name}: pip install 'tarry[service]'"
        raise MissingExtra(msg) from missing


def settings_of(
    store: str | None,
    host: str | None,
    port: int | None,
    allow: list[str] | None,
    dev: bool | None,
    config: Path | None,
    changes: list[str] | None,
) -> LoadedSettings:
    """Read what a user has said."""
    need_service()
    from tarry.service.settings import load_settings

    changed: dict[str, str] = {}
    for text in changes or ():
        name, equals, value = text.partition("=")
        if not equals:
            msg = f"--set takes NAME=VALUE, got {text!r}"
            raise ConfigurationError(msg)
        changed[name.strip().replace("-", "_")] = value
    flags = {
        "store": store,
        "host": host,
        "port": port,
        "allow_target": allow or None,
        "dev": dev or None,
    }
    return load_settings(flags, file=config, changes=changed)


def _log(form: str, level: str) -> None:
    import logging
    import sys

    from tarry.service.logs import JsonFormatter

    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its news are told by the greeting


def _greet(address: str, loaded: LoadedSettings) -> None:
    """Say where the service is, where its data lies, and how to try it."""
    import json

    from tarry.service.app import data_location, requires_keys
    from tarry.service.settings import DEFAULT

    settings = loaded.settings
    # Where it listens on every address, this one can be pasted.
    here = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    lines = [
        f"tarry serves {address} (API at {here}/docs)",
        f"data in {data_location(settings)}",
    ]
    if settings.dev:
        lines.append("--dev: tasks may go to this machine; never set it where others can post")
    if requires_keys(settings):
        store = "" if loaded.sources["store"] == DEFAULT else f" --store {settings.store}"
        lines.append(f"every request needs a key: tarry keys create --tenant NAME{store}")
        key = " -H 'Authorization: Bearer KEY'"
    else:
        key = ""
    # Something that answers: the service itself, where it may be a target.
    task: dict[str, Any] = {"targetUrl": f"{here}/healthz", "method": "GET"}
    if not settings.dev:
        task = {"targetUrl": "https://example.com/hook", "body": {"hello": "world"}}
    lines += [
        "",
        f"curl {here}/retry-tasks{key} \\",
        f"  -H 'Content-Type: application/json' -H 'Prefer: wait=5' -d '{json.dumps(task)}'",
        "",
    ]
    typer.echo("\n".join(lines))
