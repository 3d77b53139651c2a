"""Checks of the values of settings, beyond their types.

Most checks call the component that uses the setting. A check does not create or change files.
"""

from __future__ import annotations

import os
import ssl
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tarry.core.checks import check_number
from tarry.errors import ConfigurationError
from tarry.service.api.auth import check_tenant
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.proxy import parse_proxy
from tarry.service.delivery.signing import Signer
from tarry.service.delivery.targets import parse_host
from tarry.service.encryption import EncryptedCodec
from tarry.service.payloads import PayloadStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MEMORY, SQLITE = "memory:", "sqlite:"
_HTTP_SCHEMES = frozenset({"http", "https"})
_REQUIRED = frozenset({"host", "store"})
"""Settings that must not be empty."""


def check_setting(name: str, value: Any) -> None:
    """Raise ConfigurationError when a value breaks the rule of its setting."""
    if name not in _CHECKS or (not value and name not in _REQUIRED):
        return
    try:
        _CHECKS[name](value)
    except ConfigurationError as error:
        # The error names the parameter of a component; the operator knows the name of the setting.
        raise error.with_field(name) from None


def sqlite_path(url: str) -> Path:
    """Return the file of a sqlite: URL; `sqlite:///srv/t.db` means `sqlite:/srv/t.db`."""
    rest = url.removeprefix(SQLITE)
    path = "/" + rest.lstrip("/") if rest.startswith("/") else rest
    if not path.strip("/"):
        raise ConfigurationError("store", "must name a file: sqlite:PATH", url)
    return Path(path)


def _check_store(url: str) -> None:
    if url == MEMORY:
        return
    if not url.startswith(SQLITE):
        raise ConfigurationError("store", "must be sqlite:PATH or memory:", url)
    path = sqlite_path(url)
    if path.is_dir():
        rule = f"must be a file, but {path} is a folder: write sqlite:{path}/tarry.db"
        raise ConfigurationError("store", rule)
    _check_folder("store", path.parent)


def _check_bodies(url: str) -> None:
    if "://" in url:
        try:
            PayloadStore(url, max_bytes=1)
        except ConfigurationError as error:
            rule = f"must be a folder, or a bucket like s3://bucket/path ({error})"
            raise ConfigurationError("bodies", rule) from None
    else:
        _check_folder("bodies", Path(url))


def _check_folder(name: str, path: Path) -> None:
    """Raise ConfigurationError unless the folder is writable or can be created."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ConfigurationError(name, f"must be in a folder, but {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        rule = f"must be in a writable folder, but {existing} is not writable"
        raise ConfigurationError(name, rule)


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in _HTTP_SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        without_password = url.rpartition("@")[2]
        rule = "must be a URL like http://host:port"
        raise ConfigurationError("bodies_endpoint", rule, without_password)


def _check_certificates(file: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except (OSError, ValueError):  # an SSLError is an OSError
        raise ConfigurationError("ca_file", "must be a file of PEM certificates", file) from None


def _check_host(host: str) -> None:
    try:
        ip_address(host)
    except ValueError:
        parse_host(host)


def _check_hosts(hosts: Sequence[str]) -> None:
    for host in hosts:
        if "/" in host or not urlsplit(f"//{host}").hostname:
            raise ConfigurationError("allow_host", "must contain host names", host)


_CHECKS: dict[str, Callable[[Any], object]] = {
    "store": _check_store,
    "bodies": _check_bodies,
    "bodies_endpoint": _check_endpoint,
    "host": _check_host,
    "allow_host": _check_hosts,
    "allow_target": Guard,
    "operator": check_tenant,
    "tenant_rate": lambda rate: check_number("tenant_rate", rate),
    "egress_proxy": parse_proxy,
    "ca_file": _check_certificates,
    "signing_secrets": Signer,
    "encryption_keys": EncryptedCodec,
}
"""The check of each setting: a callable that raises ConfigurationError for an invalid value."""
