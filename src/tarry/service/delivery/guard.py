"""The guard against server-side request forgery (SSRF) blocks addresses of internal networks.

By default only public internet addresses are allowed; the operator can allow other addresses. The
guard checks twice. When a task is added, `check_host` rejects a URL whose host is known to be
blocked. When a connection is opened, `block_reason` checks each address right before it is used, so
that a name that changes its address (DNS rebinding) does not get around the check.

The error of a blocked host name does not have its addresses, because a tenant could explore the
internal network with them. They are logged for the operator.

An entry with a name allows private addresses only: the owner of the DNS zone could otherwise
reach loopback, link-local and metadata addresses. Those need an entry with the network.

IPv6 addresses that contain an IPv4 address (mapped, NAT64, 6to4, Teredo, ISATAP) are blocked. If
the operator allows such an IPv6 network, the contained IPv4 address is still checked.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, TypeAlias

from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.runtime.effects import effects
from tarry.service.delivery.targets import parse_host

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tarry.service.delivery.targets import Target

_logger = logging.getLogger("tarry.service")
_Address: TypeAlias = IPv4Address | IPv6Address
_Network: TypeAlias = IPv4Network | IPv6Network


def _parse_table(table: str) -> list[tuple[int, int, int, str]]:
    """Return the IP version, the first and the last address, and the description of each row."""
    rows: list[tuple[int, int, int, str]] = []
    for row in table.strip().splitlines():
        text, description = row.split(maxsplit=1)
        network = ip_network(text)
        first, last = int(network.network_address), int(network.broadcast_address)
        rows.append((network.version, first, last, description.strip()))
    return rows


# The first matching row applies. Sources: IANA's registries of special-purpose addresses, and the
# metadata addresses of cloud providers, whose servers return credentials. 168.63.129.16 is a public
# address that Azure uses for its platform services. Ranges of integers, because a check with
# `ip in network` takes twice as long, and each new connection needs one.
_SPECIAL_RANGES = _parse_table("""
    169.254.169.254/32   a cloud metadata address
    169.254.170.2/32     a cloud metadata address
    169.254.170.23/32    a cloud metadata address
    100.100.100.200/32   a cloud metadata address
    168.63.129.16/32     a cloud metadata address
    192.0.0.192/32       a cloud metadata address
    fd00:ec2::254/128    a cloud metadata address
    fd00:ec2::23/128     a cloud metadata address
    fd20:ce::254/128     a cloud metadata address
    fd00:c1::a9fe:a9fe/128 a cloud metadata address
    fd00:42::42/128      a cloud metadata address
    fd00:a9fe:a9fe::1/128  a cloud metadata address
    fd00:100::100:200/128  a cloud metadata address
    0.0.0.0/32           the unspecified address
    0.0.0.0/8            an address of this host's own network
    10.0.0.0/8           a private address
    100.64.0.0/10        a shared address inside a provider's network
    127.0.0.0/8          a loopback address
    169.254.0.0/16       a link-local address
    172.16.0.0/12        a private address
    192.0.0.0/24         a reserved address
    192.0.2.0/24         a documentation address
    192.88.99.0/24       a reserved address
    192.168.0.0/16       a private address
    198.18.0.0/15        a benchmark address
    198.51.100.0/24      a documentation address
    203.0.113.0/24       a documentation address
    224.0.0.0/4          a multicast address
    255.255.255.255/32   the broadcast address
    240.0.0.0/4          a reserved address
    ::/128               the unspecified address
    ::1/128              a loopback address
    ::ffff:0:0/96        an IPv4-mapped address
    ::ffff:0:0:0/96      an IPv4-translated address
    ::/96                an IPv4-compatible address
    64:ff9b::/96         a NAT64 address
    64:ff9b:1::/48       a local NAT64 address
    2001::/32            a Teredo address
    2001:2::/48          a benchmark address
    2001:db8::/32        a documentation address
    2001::/23            a reserved address
    2002::/16            a 6to4 address
    3fff::/20            a documentation address
    fc00::/7             a private address
    fe80::/10            a link-local address
    fec0::/10            a private address
    ff00::/8             a multicast address
""")
_METADATA = "a cloud metadata address"
_ALLOWED_BY_NAME = frozenset({"a private address"})
_ALLOWED_BY_LOOPBACK_NAME = _ALLOWED_BY_NAME | {"a loopback address"}
_GLOBAL_UNICAST = IPv6Network("2000::/3")  # the allocated part of IPv6; the rest is reserved
_LOOPBACK: tuple[_Network, ...] = (IPv4Network("127.0.0.0/8"), IPv6Network("::1/128"))
_ISATAP_PREFIXES = frozenset({0x00005EFE, 0x02005EFE})
"""The upper 32 bits of an ISATAP interface identifier; the lower 32 are the IPv4 address."""
_LAST_32_BITS = 0xFFFF_FFFF
_MAX_CACHED_HOSTS = 1024  # results of `check_host`, because most tasks go to few hosts
_LOG_INTERVAL_S = 3600.0  # in which a blocked host is logged once: it is tried every minute
_MAX_LOGGED_HOSTS = 1000  # in one interval; tenants choose the hosts, and could fill the log

_METADATA_ADDRESS = "169.254.169.254"
_WELL_KNOWN_NAMES = {  # names whose address is known without DNS
    "localhost": "127.0.0.1",
    "localhost.localdomain": "127.0.0.1",
    "ip6-localhost": "::1",
    "ip6-loopback": "::1",
    "metadata.google.internal": _METADATA_ADDRESS,
    "metadata.goog": _METADATA_ADDRESS,
    "metadata": _METADATA_ADDRESS,
    "instance-data.ec2.internal": _METADATA_ADDRESS,
    "instance-data": _METADATA_ADDRESS,
}


class Guard:
    """Decides which addresses attempts may connect to.

    `allow` has networks (CIDR), host names and `*.suffix` entries. A name allows its private
    addresses; all other special addresses need a network. `dev` allows loopback addresses.
    """

    def __init__(self, allow: Sequence[str] = (), *, dev: bool = False) -> None:
        self._allowed_networks: list[_Network] = list(_LOOPBACK) if dev else []
        self._allowed_hosts: set[str] = set()
        self._allowed_suffixes: list[str] = []
        for entry in allow:
            self._add_allowed(entry)
        self._cached_host_error = lru_cache(_MAX_CACHED_HOSTS)(self._host_error)
        self._logged_hosts: set[str] = set()
        self._log_interval_end: float = 0.0

    def check_host(self, target: Target) -> None:
        """Raise ConfigurationError if the host of the URL is known to be blocked."""
        if error := self._cached_host_error(target.host):
            raise ConfigurationError("targetUrl", f"must be an address that is allowed: {error}")

    def _host_error(self, host: str) -> str | None:
        """Return why a host is blocked; None if it is allowed, or its addresses are not known."""
        if "." not in host and host in self._allowed_hosts and not _is_loopback_name(host):
            return None  # such as `metadata`: may be another host in the operator's DNS domain
        address = "127.0.0.1" if host.endswith(".localhost") else _WELL_KNOWN_NAMES.get(host, host)
        if _parse_address(address) is None:
            return None  # the addresses of a host name are checked when a connection is opened
        reason = self.block_reason(address, host)
        if reason is None:
            return None
        # The address of a well-known name is no secret.
        return f"{host} is {reason}{_allow_hint(host, [address], show_addresses=True)}"

    def report_blocked(self, host: str, addresses: Sequence[str]) -> str:
        """Return the error of an attempt whose addresses are all blocked, and log the addresses."""
        hint = _allow_hint(host, addresses)
        self._log_blocked(host, addresses)
        error = "The host name has no address that is allowed as a target"
        if host in addresses:  # the address is part of the URL
            error = f"{host} is {self.block_reason(host, host)}"
        return error + hint

    def _log_blocked(self, host: str, addresses: Sequence[str]) -> None:
        now = effects.now()
        if now >= self._log_interval_end:
            self._log_interval_end = now + _LOG_INTERVAL_S
            self._logged_hosts.clear()
        if host in self._logged_hosts or len(self._logged_hosts) >= _MAX_LOGGED_HOSTS:
            return
        self._logged_hosts.add(host)
        reasons = ", ".join(
            f"{address} is {self.block_reason(address, host)}" for address in addresses
        )
        hint = _allow_hint(host, addresses, show_addresses=True)
        _logger.warning("target blocked, host=%s: %s%s", host, reasons or "no address", hint)

    def block_reason(self, address: str, host: str) -> str | None:
        """Return what a blocked address of `host` is, such as "a private address".

        Return None if the address is allowed.
        """
        ip = _parse_address(address)
        if ip is None:
            return "not an IP address"
        return self._ip_block_reason(ip, self._descriptions_allowed_by_name(host))

    def _descriptions_allowed_by_name(self, host: str) -> frozenset[str]:
        """Return the descriptions of special addresses that a host may have because of its name."""
        if host not in self._allowed_hosts and (
            not host.endswith(tuple(self._allowed_suffixes))
            # A suffix such as `*.internal` is meant for hosts of the operator.
            or _WELL_KNOWN_NAMES.get(host) == _METADATA_ADDRESS
        ):
            return frozenset()
        return _ALLOWED_BY_LOOPBACK_NAME if _is_loopback_name(host) else _ALLOWED_BY_NAME

    def _ip_block_reason(self, ip: _Address, allowed_by_name: frozenset[str]) -> str | None:
        """Return the description of a blocked address; None if the address is allowed."""
        ipv4_addresses = list(_contained_ipv4(ip)) if isinstance(ip, IPv6Address) else []
        if not any(ip in network for network in self._allowed_networks):
            description = _describe_special(ip) or ("an ISATAP address" if ipv4_addresses else None)
            if description is not None and description not in allowed_by_name:
                return f"{description} of {ipv4_addresses[-1]}" if ipv4_addresses else description
        for address in ipv4_addresses:
            if (reason := self._ip_block_reason(address, allowed_by_name)) is not None:
                return f"an IPv6 address of {address}, {reason}"
        return None

    def _add_allowed(self, entry: str) -> None:
        if not isinstance(entry, str):
            raise ConfigurationTypeError("allow", "must contain CIDRs and host names", entry)
        try:
            self._allowed_networks.append(ip_network(entry))
            return
        except ValueError:
            pass
        try:
            if entry.startswith("*."):
                self._allowed_suffixes.append(f".{parse_host(entry[2:])}")
            else:
                self._allowed_hosts.add(parse_host(entry))
        except ConfigurationError:
            rule = "must contain CIDRs (10.1.0.0/16, no host bits), host names or *.suffixes"
            raise ConfigurationError("allow", rule, entry) from None


def _parse_address(address: str) -> _Address | None:
    try:
        return ip_address(address.partition("%")[0])
    except ValueError:
        return None


def _is_loopback_name(host: str) -> bool:
    """Return whether a name has a loopback address by definition (RFC 6761, 6.3)."""
    return host == "localhost" or host.endswith(".localhost")


def _allow_hint(host: str, addresses: Sequence[str], *, show_addresses: bool = False) -> str:
    """Return how to allow a blocked host; empty if it should stay blocked.

    `show_addresses` is for the log: tenants do not see the addresses of a host name.
    """
    ips: list[_Address] = []
    allowed_by_name = _ALLOWED_BY_LOOPBACK_NAME if _is_loopback_name(host) else _ALLOWED_BY_NAME
    name_is_enough = not addresses or host in addresses
    for address in addresses:
        ip = _parse_address(address)
        if ip is None:
            return ""
        contained = list(_contained_ipv4(ip)) if isinstance(ip, IPv6Address) else []
        if any(_describe_special(each) == _METADATA for each in (ip, *contained)):
            return ""  # the address gives access to the credentials of the machine
        if contained and host == address:
            return ""  # the URL should have the contained address instead
        ips += (ip, *(each for each in contained if _describe_special(each) is not None))
        name_is_enough = name_is_enough or (
            not contained and _describe_special(ip) in allowed_by_name
        )
    if name_is_enough:
        return f"; the operator can allow it: --allow-target {host} (setting allow_target)"
    rule = "; its address is not private, so it must be allowed by address, and not by name"
    if show_addresses:
        entries = " ".join(f"--allow-target {ip}" for ip in ips)
        return f"{rule}: {entries} (setting allow_target)"
    return f"{rule}: --allow-target CIDR (setting allow_target). The log has the address"


def _describe_special(ip: _Address) -> str | None:
    """Return a description of a special-purpose address; None if the address is public."""
    version, number = ip.version, int(ip)
    for row_version, first, last, description in _SPECIAL_RANGES:
        if first <= number <= last and version == row_version:
            return description
    if isinstance(ip, IPv6Address) and ip not in _GLOBAL_UNICAST:
        return "a reserved address"
    return None


def _contained_ipv4(ip: IPv6Address) -> Iterator[IPv4Address]:
    bits = int(ip)
    # IPv4-compatible (but not :: and ::1), IPv4-mapped, IPv4-translated, NAT64
    if bits >> 32 in (0, 0xFFFF, 0xFFFF_0000, 0x64_FF9B << 64) and bits > 1:
        yield IPv4Address(bits & _LAST_32_BITS)
    elif bits >> 80 == 0x64_FF9B_0001:  # noqa: PLR2004 - RFC 6052, 2.2: prefix of 48 or 96 bits
        yield IPv4Address(((bits >> 64 & 0xFFFF) << 16) | (bits >> 40 & 0xFFFF))
        yield IPv4Address(bits & _LAST_32_BITS)
    elif bits >> 112 == 0x2002:  # noqa: PLR2004 - 6to4
        yield IPv4Address(bits >> 80 & _LAST_32_BITS)
    elif bits >> 96 == 0x2001_0000:  # noqa: PLR2004 - Teredo: server, then inverted client
        yield IPv4Address(bits >> 64 & _LAST_32_BITS)
        yield IPv4Address(~bits & _LAST_32_BITS)
    elif bits >> 32 & _LAST_32_BITS in _ISATAP_PREFIXES:
        yield IPv4Address(bits & _LAST_32_BITS)
