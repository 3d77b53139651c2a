"""What the value of a setting must be beyond its type: the rules of the part that will go by it.

A check makes and changes nothing on the disk.
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
_WEB = frozenset({"http", "https"})
_NEEDED = frozenset({"host", "store"})
"""What may not be empty."""


def check_setting(name: str, value: Any) -> None:
    """Raise ConfigurationError when a value breaks the rule of its setting."""
    if name not in _RULES or (not value and name not in _NEEDED):
        return
    try:
        _RULES[name](value)
    except ConfigurationError as error:
        # The error names a parameter of the class that was tried; the user knows the setting.
        raise error.with_field(name) from None


def sqlite_path(url: str) -> Path:
    """Return the file of a sqlite: URL; `sqlite:///srv/t.db` and `sqlite:/srv/t.db` are one."""
    rest = url.removeprefix(SQLITE)
    path = "/" + rest.lstrip("/") if rest.startswith("/") else rest
    if not path.strip("/"):
        raise ConfigurationError("store", "must name a file: sqlite:PATH", url)
    return Path(path)


def _store(url: str) -> None:
    if url == MEMORY:
        return
    if not url.startswith(SQLITE):
        raise ConfigurationError("store", "must be sqlite:PATH or memory:", url)
    path = sqlite_path(url)
    if path.is_dir():
        rule = f"must be a file, and {path} is a folder: write sqlite:{path}/tarry.db"
        raise ConfigurationError("store", rule)
    _folder("store", path.parent)


def _bodies(url: str) -> None:
    if "://" in url:
        try:
            PayloadStore(url, max_bytes=1)
        except ConfigurationError as error:
            rule = f"must be a folder, or a bucket as s3://bucket/path: {error}"
            raise ConfigurationError("bodies", rule) from None
    else:
        _folder("bodies", Path(url))


def _folder(name: str, path: Path) -> None:
    """Refuse what is no folder that files can be put into, and can be made none."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir():
        raise ConfigurationError(name, f"must lie in a folder, and {there} is none")
    if not os.access(there, os.W_OK | os.X_OK):
        rule = f"must lie in a folder that can be written to, and {there} cannot"
        raise ConfigurationError(name, rule)


def _endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in _WEB and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        without_password = url.rpartition("@")[2]
        rule = "must be a URL as http://host:port"
        raise ConfigurationError("bodies_endpoint", rule, without_password)


def _certificates(file: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except (OSError, ValueError):  # an SSLError is an OSError
        raise ConfigurationError("ca_file", "must be a file of PEM certificates", file) from None


def _host(host: str) -> None:
    try:
        ip_address(host)
    except ValueError:
        parse_host(host)


def _hosts(hosts: Sequence[str]) -> None:
    for host in hosts:
        if "/" in host or not urlsplit(f"//{host}").hostname:
            raise ConfigurationError("allow_host", "must hold host names", host)


_RULES: dict[str, Callable[[Any], object]] = {
    "store": _store,
    "bodies": _bodies,
    "bodies_endpoint": _endpoint,
    "host": _host,
    "allow_host": _hosts,
    "allow_target": Guard,
    "operator": check_tenant,
    "tenant_rate": lambda rate: check_number("tenant_rate", rate),
    "egress_proxy": parse_proxy,
    "ca_file": _certificates,
    "signing_secrets": Signer,
    "encryption_keys": EncryptedCodec,
}
"""The rule of each setting: a callable that raises ConfigurationError for a bad value."""
