"""`tarry serve`: run the retry service. `tarry config`: print its settings."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tarry.cli.exit_codes import EXIT_SERVICE_ERROR
from tarry.cli.options import DEFAULT_SERVER, JsonOption
from tarry.cli.output import console, print_json, table
from tarry.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from tarry.service.certificates import ServerCertificate
    from tarry.service.settings import LoadedSettings, Settings

StoreOption = Annotated[
    str | None,
    typer.Option(
        help="Store of the tasks: a path, or a URL such as postgresql:// or redis://.",
        metavar="PATH|URL",
    ),
]
HostOption = Annotated[str | None, typer.Option(help="Address to listen on.")]
PortOption = Annotated[int | None, typer.Option(help="Port to listen on; 0 selects a free port.")]
TlsCertOption = Annotated[
    str | None,
    typer.Option("--tls-cert", help="Serve HTTPS with this PEM certificate.", metavar="FILE"),
]
TlsKeyOption = Annotated[
    str | None,
    typer.Option("--tls-key", help="Private key of the certificate, in PEM.", metavar="FILE"),
]
AllowTargetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-target",
        help="Also allow these targets: 10.1.0.0/16, *.corp.example. Can be repeated.",
        metavar="CIDR|HOST",
    ),
]
CompatibilityOption = Annotated[
    list[str] | None,
    typer.Option(
        "--compatibility",
        help="Also serve the API of another vendor. Can be repeated.",
        metavar="qstash|cloud_tasks",
    ),
]
RoleOption = Annotated[
    str | None,
    typer.Option(
        help="api: accept requests only. worker: deliver only. all: both, the default.",
        metavar="all|api|worker",
    ),
]
WorkersOption = Annotated[
    int | None, typer.Option(help="Number of processes on the same address.", metavar="N")
]
StrictDurabilityOption = Annotated[
    bool | None,
    typer.Option(
        "--strict-durability",
        help="Do not start if the server of the store may lose acknowledged tasks.",
    ),
]
DevOption = Annotated[
    bool | None,
    typer.Option("--dev", help="Also allow this machine as a target. For development only."),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Configuration file, in TOML.", metavar="FILE")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Set any setting of `tarry config`. Can be repeated.", metavar="NAME=VALUE"
    ),
]
_NOT_STARTED = "the service did not start; see the log above"


def serve(
    store: StoreOption = None,
    host: HostOption = None,
    port: PortOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    role: RoleOption = None,
    workers: WorkersOption = None,
    allow_targets: AllowTargetOption = None,
    compatibility: CompatibilityOption = None,
    dev: DevOption = None,
    strict_durability: StrictDurabilityOption = None,
    config_file: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Run the retry service: store tasks durably, and deliver each at least once.

    Flags take precedence over TARRY_* variables, and variables over the file. SIGTERM and Ctrl-C
    shut down gracefully: running attempts finish, and other leased tasks are released.
    """
    flags = {
        "store": store,
        "host": host,
        "port": port,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "role": role,
        "workers": workers,
        "allow_target": allow_targets,
        "compatibility": compatibility,
        "dev": dev,
        "strict_durability": strict_durability,
    }
    loaded = load_service_settings(config_file, assignments, flags)
    from tarry.service.file_descriptors import raise_limit

    raise_limit()
    settings = loaded.settings
    _configure_logging(settings)
    certificate = _load_certificate(settings)
    if settings.workers == 1:
        _run_service(loaded, certificate, partial(_print_greeting, loaded))
        return
    from tarry.service.supervisor import Supervisor

    supervisor = Supervisor(
        settings.workers,
        settings.host,
        settings.port,
        process_port=settings.process_port,
        scheme="http" if certificate is None else "https",
    )
    try:
        address = supervisor.open_listeners()
    except OSError as error:
        reason = _explain_bind_error(error, settings.host, settings.port) or str(error)
        typer.echo(f"error: {reason}", err=True)
        raise typer.Exit(EXIT_SERVICE_ERROR) from None
    process = supervisor.run(lambda: _print_greeting(loaded, address))
    if process is not None:  # one of the processes that the supervisor has started
        _run_service(loaded, certificate, lambda _: process.report_ready(), process.listeners)
    elif supervisor.stop_signal == signal.SIGINT:
        raise KeyboardInterrupt
    elif supervisor.stop_signal is None:  # a process has exited before all were ready
        typer.echo(f"error: {_NOT_STARTED}", err=True)
        raise typer.Exit(EXIT_SERVICE_ERROR)


def _load_certificate(settings: Settings) -> ServerCertificate | None:
    """Return the certificate of the service; None if it serves HTTP without TLS."""
    if not settings.tls_cert:
        return None
    from tarry.service.certificates import ServerCertificate

    return ServerCertificate(settings.tls_cert, settings.tls_key)


def _run_service(
    loaded: LoadedSettings,
    certificate: ServerCertificate | None,
    on_ready: Callable[[str], None],
    sockets: list[socket] | None = None,
) -> None:
    """Run the service in this process until a signal stops it.

    `on_ready` is called with its URL. The service listens on `sockets` or, if they are None, on
    the address in the settings.
    """
    from tarry.service.app import Service
    from tarry.service.http.server import HttpServer

    settings = loaded.settings
    service = Service(settings, writer_process=True)
    # Called before the server installs its own handler, which shuts down gracefully, and when
    # uvicorn raises the signal again after the shutdown. A stop is no failure: the exit code is 0.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))
    is_ready = False
    reason = _NOT_STARTED

    def set_ready(address: str) -> None:
        nonlocal is_ready
        is_ready = True
        on_ready(address)

    try:
        server = HttpServer(
            service, set_ready, timeout_exit_code=EXIT_SERVICE_ERROR, certificate=certificate
        )
        server.run(sockets)
    except SystemExit as exit_:  # raised by uvicorn when it cannot bind the port
        if not exit_.code:
            raise
        if isinstance(exit_.__context__, OSError):
            error = exit_.__context__
            reason = _explain_bind_error(error, settings.host, settings.port) or str(error)
    if not is_ready:
        typer.echo(f"error: {reason}", err=True)
        raise typer.Exit(EXIT_SERVICE_ERROR)


def config(
    store: StoreOption = None,
    host: HostOption = None,
    port: PortOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    role: RoleOption = None,
    workers: WorkersOption = None,
    allow_targets: AllowTargetOption = None,
    compatibility: CompatibilityOption = None,
    dev: DevOption = None,
    strict_durability: StrictDurabilityOption = None,
    config_file: ConfigOption = None,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the effective settings, and the source of each."""
    flags = {
        "store": store,
        "host": host,
        "port": port,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "role": role,
        "workers": workers,
        "allow_target": allow_targets,
        "compatibility": compatibility,
        "dev": dev,
        "strict_durability": strict_durability,
    }
    loaded = load_service_settings(config_file, assignments, flags)
    import msgspec

    from tarry.service.settings import Settings

    if as_json:
        names, sources = Settings.__struct_fields__, loaded.sources
        print_json(
            {name: {"value": loaded.redacted_value(name), "from": sources[name]} for name in names}
        )
        return
    rows: list[tuple[str, ...]] = []
    for field in msgspec.structs.fields(Settings):
        description = field.type.__metadata__[-1].description  # the last item is a msgspec.Meta
        name = field.name
        rows.append((name, loaded.format(name), loaded.sources[name], description))
    console().print(table(("setting", "value", "from", "description"), rows))


def _explain_bind_error(error: OSError, host: str, port: int) -> str | None:
    """Return the cause of a failure to bind the port and what to do; None for an unknown error."""
    import errno
    import socket

    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is already in use: choose another with --port"
    if error.errno == errno.EACCES:
        return f"this user may not listen on port {port}: choose a port above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{host} is not an address of this machine: choose another with --host"
    return None


def require_service_packages() -> None:
    """Raise `MissingExtra` unless the packages of the service are installed."""
    from importlib import import_module

    try:
        import_module("tarry.service.app")
        import_module("tarry.service.http.server")
    except MissingExtra:
        raise
    except ImportError as missing:
        msg = f"the service needs {missing.name}: pip install 'tarry[service]'"
        raise MissingExtra(msg) from missing


def load_service_settings(
    config_file: Path | None, assignments: list[str] | None, flags: dict[str, Any]
) -> LoadedSettings:
    """Return the settings of the service; raise `MissingExtra` if a package of it is missing."""
    require_service_packages()
    return read_service_settings(config_file, assignments, flags)


def read_service_settings(
    config_file: Path | None, assignments: list[str] | None, flags: dict[str, Any]
) -> LoadedSettings:
    """Return the settings from flags and `--set` assignments, environment variables and a file."""
    from tarry.service.settings import load_settings

    set_values: dict[str, str] = {}
    for assignment in assignments or ():
        name, equals, value = assignment.partition("=")
        if not equals:
            name = _shorten_name(assignment)
            raise ConfigurationError("--set", "must have the format NAME=VALUE", name)
        set_values[_shorten_name(name.strip()).replace("-", "_")] = value
    # A flag that is not given may be False or an empty list here. `load_settings` expects None.
    flags |= {name: flags.get(name) or None for name in ("allow_target", "dev")}
    return load_settings(flags, file=config_file, set_values=set_values)


def _shorten_name(name: str) -> str:
    """Return the name of a setting for an error; without the rest of a URL without a name."""
    shortened = re.split("[:/]", name, maxsplit=1)[0]
    return name if shortened == name else f"{shortened}..."


def _configure_logging(settings: Settings) -> None:
    from tarry.service.http.server import JsonFormatter, TextFormatter

    handler = logging.StreamHandler(sys.stderr)
    # Several processes write to one log, so each line has the id of its process.
    process_id = "[%(process)d] " if settings.workers > 1 else ""
    text_formatter = TextFormatter(f"%(asctime)s %(levelname)s {process_id}%(message)s")
    handler.setFormatter(JsonFormatter() if settings.log == "json" else text_formatter)
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # hides its start message
    logging.getLogger("uvicorn.error").addFilter(_is_no_bind_error)


def _is_no_bind_error(record: logging.LogRecord) -> bool:
    """Return False for the record of a bind error, which the command reports with what to do."""
    return not isinstance(record.msg, OSError)  # uvicorn logs the exception itself


def _print_greeting(loaded: LoadedSettings, address: str) -> None:
    """Print the address, the location of the data, and a curl command to try the service."""
    from tarry.service.api.auth import is_loopback
    from tarry.service.app import are_api_keys_required, data_location
    from tarry.service.settings import DEFAULT_SOURCE
    from tarry.service.store_url import redact_store_url

    settings = loaded.settings
    # Clients cannot connect to a wildcard address, so the loopback address is shown instead.
    local_url = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    dashboard = "" if settings.role == "worker" else f"dashboard: {local_url}/, "
    lines = [f"tarry serves {address} ({dashboard}API documentation: {local_url}/docs)"]
    lines.append(f"data in {data_location(settings)}")
    if settings.dev:
        warning = "do not use --dev where others can add tasks"
        lines.append(f"--dev: this machine is allowed as a target; {warning}")
    elif not settings.allow_target:
        example = "--allow-target HOST or --allow-target 10.0.0.0/8 (setting allow_target)"
        lines.append(f"targets: public addresses only; to allow hosts of your network: {example}")
    if settings.role == "api":
        lines.append("role api: processes with the role worker or all deliver the tasks")
    auth_option = ""
    if are_api_keys_required(settings):
        is_default_store = loaded.sources["store"] == DEFAULT_SOURCE
        store_option = "" if is_default_store else f" --store {redact_store_url(settings.store)}"
        lines.append(f"requests need an API key: tarry keys create --tenant NAME{store_option}")
        auth_option = " -H 'Authorization: Bearer KEY'"
        if not settings.tls_cert and not is_loopback(settings.host):
            advice = "use --tls-cert and --tls-key, or a proxy with TLS in front"
            lines.append(f"API keys and tasks are sent without encryption: {advice}")
        if settings.signing_secrets and not settings.share_signing_secrets:
            lines.append(
                "signing_secrets: only for the tenant default; others: tarry secrets create"
            )
    if settings.role == "worker":
        lines += ["role worker: send requests to a process with the role api or all", ""]
        typer.echo("\n".join(lines))
        return
    if local_url != DEFAULT_SERVER:
        lines.append(f"for the tarry command in another terminal: export TARRY_SERVER={local_url}")
    # With --dev, the target in the example is the service itself, so that the call succeeds.
    task: dict[str, Any] = {"targetUrl": f"{local_url}/healthz", "method": "GET"}
    if not settings.dev:
        task = {"targetUrl": "https://example.com/hook", "body": {"hello": "world"}}
    lines += [
        "",
        f"curl {local_url}/retry-tasks{auth_option} \\",
        f"  -H 'Content-Type: application/json' -H 'Prefer: wait=5' -d '{json.dumps(task)}'",
        "",
    ]
    typer.echo("\n".join(lines))
