"""The URL of a store: its server or the nodes of its Cluster, and its parameters."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode, urlsplit

from tarry.errors import ConfigurationError
from tarry.service.stores.redis.cluster import NodeAddress

DEFAULT_PREFIX = "tarry"
MAX_PARTITIONS = 1024
_DEFAULT_PORT = 6379
_CLUSTER_SUFFIX, _UNIX_SUFFIX = "+cluster", "+unix"
_SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
SCHEMES = frozenset(
    [f"{scheme}{suffix}" for scheme in _SCHEMES for suffix in ("", _CLUSTER_SUFFIX)]
    + [f"{scheme}{_UNIX_SUFFIX}" for scheme in ("redis", "valkey")]
)
"""The schemes of the URLs of Redis stores."""
_DRIVER_PARAMETERS = frozenset(
    {"db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}
)
_NETLOC = re.compile(r"(?<=://)[^/?#]*")


class StoreAddress:
    """The parts of a store URL: the URL for the driver, and the parameters of the store."""

    def __init__(self, url: str) -> None:
        # The hosts of a Cluster are parsed one by one: since Python 3.11.12, 3.12.9 and 3.13.2,
        # `urlsplit` accepts an IPv6 address only as the first host, and before a port.
        address = _NETLOC.search(url)
        netloc = "" if address is None else address[0]
        credentials, separator, hosts = netloc.rpartition("@")
        first_netloc = f"{credentials}{separator}{hosts.partition(',')[0]}"
        try:
            parts = urlsplit(url.replace(f"://{netloc}", f"://{first_netloc}", 1))
        except ValueError as error:
            raise ConfigurationError("store", "must be a Redis URL") from error
        scheme = parts.scheme.lower()
        if scheme not in SCHEMES:
            raise ConfigurationError("store", "must be a Redis URL", scheme)
        is_socket = scheme.endswith(_UNIX_SUFFIX)
        self.seeds: list[NodeAddress] = _parse_hosts(hosts)
        """The nodes of a Cluster that are queried first; a single server has one."""
        has_hosts = all(seed.host for seed in self.seeds)
        if not (parts.path.strip("/") if is_socket else has_hosts):
            rule = f"must be {scheme}://{'/PATH' if is_socket else 'HOST'}"
            raise ConfigurationError("store", rule)
        self.is_cluster: bool = scheme.endswith(_CLUSTER_SUFFIX)
        if len(self.seeds) > 1 and not self.is_cluster:
            rule = "must have one host: only the URL of a Cluster (redis+cluster://) has several"
            raise ConfigurationError("store", rule)
        if not is_socket:
            _check_database(parts.path.strip("/"), is_cluster=self.is_cluster)
        self.prefix: str = DEFAULT_PREFIX
        self.partition_count: int | None = None
        driver_parameters: list[tuple[str, str]] = []
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name == "prefix":
                self.prefix = _check_prefix(value)
            elif name == "partitions":
                self.partition_count = _parse_partition_count(value)
            elif name in _DRIVER_PARAMETERS:
                if name == "db":
                    _check_database(value, is_cluster=self.is_cluster)
                driver_parameters.append((name, value))
            else:
                allowed = ", ".join(sorted({"prefix", "partitions", *_DRIVER_PARAMETERS}))
                rule = f"parameters of the URL can be {allowed}"
                if "@" in parts.query:  # the text before the @ may be a part of the password
                    raise ConfigurationError("store", rule)
                raise ConfigurationError("store", rule, name)
        driver_scheme = "unix" if is_socket else _SCHEMES[scheme.removesuffix(_CLUSTER_SUFFIX)]
        self.verifies_host: bool = (
            driver_scheme == "rediss" and ("ssl_cert_reqs", "none") not in driver_parameters
        )
        """Whether the certificate of the server must be for its host, by default."""
        query = urlencode(driver_parameters)
        self.driver_url: str = f"{driver_scheme}://{parts.netloc}{parts.path}?{query}"
        """The URL for redis-py, which supports neither Valkey nor the parameters of the store. Of
        the hosts of a Cluster it has only the first, which `replace_host` replaces."""


def _parse_hosts(hosts: str) -> list[NodeAddress]:
    """Parse `HOST:PORT,HOST:PORT`."""
    addresses: list[NodeAddress] = []
    for text in hosts.split(","):
        try:
            parts = urlsplit(f"//{text}")
            addresses.append(NodeAddress(parts.hostname or "", parts.port or _DEFAULT_PORT))
        except ValueError:
            # The text is not shown, because it may be a part of the password.
            rule = "must have a number as the port. Percent-encode special characters of the"
            raise ConfigurationError("store", f"{rule} password, such as %2F for /") from None
    return addresses


def _check_database(text: str, *, is_cluster: bool) -> None:
    if is_cluster and text not in {"", "0"}:
        raise ConfigurationError("store", "must have no database: a Cluster has only database 0")
    if not re.fullmatch(r"[0-9]*", text, re.ASCII):  # redis-py would use database 0
        raise ConfigurationError("store", "must have a number as the database: redis://HOST/0")


def _check_prefix(prefix: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,64}", prefix):
        rule = "the prefix must consist of 1 to 64 letters, digits and . _ - :"
        raise ConfigurationError("store", rule, prefix)
    return prefix


def _parse_partition_count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text, re.ASCII) or not 1 <= int(text) <= MAX_PARTITIONS:
        rule = f"the number of partitions must be between 1 and {MAX_PARTITIONS}"
        raise ConfigurationError("store", rule, text)
    return int(text)


def replace_host(url: str, address: NodeAddress) -> str:
    """Return a URL with another host, and with the same credentials."""
    parts = urlsplit(url)
    credentials, separator, _ = parts.netloc.rpartition("@")
    host = f"[{address.host}]" if ":" in address.host else address.host
    return parts._replace(netloc=f"{credentials}{separator}{host}:{address.port}").geturl()
