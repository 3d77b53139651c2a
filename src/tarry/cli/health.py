"""`tarry health`: check that the service on this machine responds."""

from __future__ import annotations

import ssl
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING

import typer

from tarry.cli.serve import (
    ConfigOption,
    HostOption,
    PortOption,
    SetOption,
    TlsCertOption,
    TlsKeyOption,
    read_service_settings,
)
from tarry.client.errors import ServiceUnreachable

if TYPE_CHECKING:
    from tarry.service.settings import Settings

_TIMEOUT_S = 4.0  # less than the timeout of the health check in deploy/Containerfile
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing listens
"""Clients cannot connect to a wildcard address."""


def health(
    host: HostOption = None,
    port: PortOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    config_file: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Check that the service on this machine responds, for the health check of a container.

    Reads the same flags, TARRY_* variables and file as `tarry serve`. The certificate of the
    service is not verified, because it is rarely issued for the address of this machine.
    """
    flags = {"host": host, "port": port, "tls_cert": tls_cert, "tls_key": tls_key}
    # `load_service_settings` would import the whole service: 1 s of processor time for each check.
    settings = read_service_settings(config_file, assignments, flags).settings
    url_host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"{'https' if settings.tls_cert else 'http'}://{url_host}:{settings.port}/healthz"
    connection = _connection(settings)
    try:
        connection.request("GET", "/healthz")
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        raise ServiceUnreachable(f"no service answers at {url}: {error}") from error
    finally:
        connection.close()
    if status != HTTPStatus.OK:
        raise ServiceUnreachable(f"the service answers {status} at {url}")
    typer.echo("ok")


def _connection(settings: Settings) -> HTTPConnection:
    host = _LOOPBACK.get(settings.host, settings.host)
    if not settings.tls_cert:
        return HTTPConnection(host, settings.port, timeout=_TIMEOUT_S)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return HTTPSConnection(host, settings.port, timeout=_TIMEOUT_S, context=context)
