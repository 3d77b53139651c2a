from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tarry.errors import ConfigurationError
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.targets import parse_target

BLOCKED = [
    ("127.0.0.1", "loopback"),
    ("127.255.255.254", "loopback"),
    ("::1", "loopback"),
    ("0.0.0.0", "unspecified"),  # noqa: S104 - nothing listens
    ("0.1.2.3", "own network"),
    ("::", "unspecified"),
    ("10.0.0.1", "private"),
    ("172.16.0.1", "private"),
    ("172.31.255.255", "private"),
    ("192.168.1.1", "private"),
    ("fc00::1", "private"),
    ("fdff::1", "private"),
    ("fec0::1", "private"),
    ("169.254.1.1", "link-local"),
    ("fe80::1", "link-local"),
    ("169.254.169.254", "metadata"),
    ("169.254.170.2", "metadata"),
    ("100.100.100.200", "metadata"),
    ("168.63.129.16", "metadata"),
    ("192.0.0.192", "metadata"),
    ("fd00:ec2::254", "metadata"),
    ("fd20:ce::254", "metadata"),
    ("fd00:c1::a9fe:a9fe", "metadata"),
    ("fd00:42::42", "metadata"),
    ("fd00:a9fe:a9fe::1", "metadata"),
    ("fd00:100::100:200", "metadata"),
    ("100.64.0.1", "provider"),
    ("100.127.255.255", "provider"),
    ("198.18.0.1", "benchmark"),
    ("2001:2::1", "benchmark"),
    ("192.0.0.1", "reserved"),
    ("192.0.2.1", "documentation"),
    ("2001:db8::1", "documentation"),
    ("224.0.0.1", "multicast"),
    ("ff02::1", "multicast"),
    ("240.0.0.1", "reserved"),
    ("4000::1", "reserved"),
    ("255.255.255.255", "broadcast"),
    ("::ffff:8.8.8.8", "IPv4-mapped address of 8.8.8.8"),
    ("::ffff:127.0.0.1", "IPv4-mapped address of 127.0.0.1"),
    ("::ffff:0:127.0.0.1", "IPv4-translated address of 127.0.0.1"),
    ("::127.0.0.1", "IPv4-compatible address of 127.0.0.1"),
    ("64:ff9b::127.0.0.1", "NAT64 address of 127.0.0.1"),
    ("64:ff9b:1:7f00:0:100::", "local NAT64"),
    ("2002:7f00:1::1", "6to4 address of 127.0.0.1"),
    ("2001:0:808:808::80ff:fffe", "Teredo address of 127.0.0.1"),
    ("2a00:1450::5efe:127.0.0.1", "ISATAP address of 127.0.0.1"),
    ("2a00:1450::200:5efe:127.0.0.1", "ISATAP address of 127.0.0.1"),
    ("fe80::1%eth0", "link-local"),
    ("/tmp/socket", "not an IP address"),  # noqa: S108 - no file is created
]
PUBLIC = ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2a00:1450::1"]


@pytest.mark.parametrize(("address", "kind"), BLOCKED, ids=[address for address, _ in BLOCKED])
def test_special_addresses_are_blocked(address: str, kind: str) -> None:
    """The reason describes the address."""
    reason = Guard().block_reason(address, "h.example")
    assert reason is not None
    assert kind in reason


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    assert Guard().block_reason(address, "h.example") is None


def test_dev_allows_loopback_only() -> None:
    """The unspecified address is blocked, although connections to it reach this machine."""
    guard = Guard(dev=True)
    assert guard.block_reason("127.0.0.1", "localhost") is None
    assert guard.block_reason("::1", "localhost") is None
    for address in ("0.0.0.0", "10.0.0.1", "169.254.169.254", "::ffff:127.0.0.1"):  # noqa: S104
        assert guard.block_reason(address, "h") is not None


def test_networks_can_be_allowed() -> None:
    """Networks are allowed by CIDR or by single address."""
    guard = Guard(["10.1.0.0/16", "192.168.0.7", "fd12::/16"])
    for address in ("10.1.2.3", "192.168.0.7", "fd12::1"):
        assert guard.block_reason(address, "h") is None
    for address in ("10.2.0.1", "192.168.0.8", "fd13::1", "127.0.0.1"):
        assert guard.block_reason(address, "h") is not None


def test_hosts_can_be_allowed() -> None:
    """A name matches in any spelling, a suffix matches all names below it."""
    guard = Guard(["Internal.Example", "*.svc.local"])
    for host in ("internal.example", "a.svc.local", "a.b.svc.local"):
        assert guard.block_reason("10.0.0.1", host) is None
    for host in ("x.internal.example", "svc.local", "evilsvc.local", "svc.local.evil.example"):
        assert guard.block_reason("10.0.0.1", host) is not None


def test_allowed_name_has_private_addresses_only() -> None:
    """The owner of the DNS of an allowed name does not reach other internal addresses."""
    guard = Guard(["a.example", "*.example", "127.0.0.2", "169.254.3.0/24"])
    hosts = "a.example", "b.a.example"
    for address, kind in BLOCKED:
        expected = kind == "private"
        reasons = [guard.block_reason(address, host) for host in hosts]
        assert [expected] * 2 == [reason is None for reason in reasons], address
    for address in ("127.0.0.2", "169.254.3.1"):  # networks allow addresses of any kind
        assert guard.block_reason(address, "a.example") is None


def test_loopback_name_has_loopback_addresses() -> None:
    """`localhost` is a loopback address by definition, but no other special address."""
    guard = Guard(["localhost", "*.localhost"])
    for host in ("localhost", "a.localhost"):
        for address in ("127.0.0.1", "::1"):
            assert guard.block_reason(address, host) is None
        for address in ("169.254.169.254", "169.254.1.1", "::ffff:127.0.0.1"):
            assert guard.block_reason(address, host) is not None


METADATA_NAMES = [
    "metadata.google.internal",
    "metadata.goog",
    "instance-data.ec2.internal",
    "metadata",
    "instance-data",
]


@pytest.mark.parametrize("name", METADATA_NAMES)
def test_metadata_name_matches_no_suffix(name: str) -> None:
    """A metadata name is rejected with the URL, and its private addresses are not allowed."""
    guard = Guard(["*.internal", "*.google.internal", "*.ec2.internal", "*.goog"])
    for url in (f"http://{name}/", f"http://{name.upper()}./latest", f"grpc://{name}:1/S/M"):
        with pytest.raises(ConfigurationError, match=r"cloud metadata address$"):
            guard.check_host(parse_target(url))
    assert guard.block_reason("10.0.0.1", name) is not None


def test_metadata_address_needs_its_network() -> None:
    """An entry with the name of a metadata server does not allow its address."""
    for name in METADATA_NAMES:
        assert Guard([name]).block_reason("169.254.169.254", name) is not None
        Guard(["169.254.169.254"]).check_host(parse_target(f"http://{name}/"))
    # A name without a dot may be another host in the search domain of the operator.
    guard = Guard(["metadata"])
    guard.check_host(parse_target("http://metadata/"))
    assert guard.block_reason("10.0.0.1", "metadata") is None


SPECIAL_ADDRESSES = st.one_of(
    st.ip_addresses(),
    *[
        st.ip_addresses(network=network)
        for network in (
            "127.0.0.0/8", "169.254.0.0/16", "0.0.0.0/8", "100.64.0.0/10", "224.0.0.0/4",
            "fe80::/10", "::/96", "::ffff:0:0/96", "64:ff9b::/96", "2002::/16", "ff00::/8",
        )
    ],
    st.sampled_from([address for address, _ in BLOCKED[:22]]).map(ip_address),
)  # fmt: skip
NAMES = st.one_of(
    st.from_regex(r"([a-z0-9]{1,8}\.){0,3}[a-z]{2,8}", fullmatch=True),
    st.sampled_from([*METADATA_NAMES, "ip6-localhost", "localhost.localdomain"]),
)


@given(address=SPECIAL_ADDRESSES, name=NAMES)
def test_entry_with_a_name_allows_no_other_special_address(
    address: IPv4Address | IPv6Address, name: str
) -> None:
    """With a name or suffix, exactly private addresses are allowed besides public ones."""
    assume(name != "localhost")
    entries = [name, *([f"*.{name.partition('.')[2]}"] if "." in name else [])]
    default = Guard().block_reason(str(address), name)
    reason = Guard(entries).block_reason(str(address), name)
    assert (default in {None, "a private address"}) == (reason is None)


def test_embedded_ipv4_address_is_checked() -> None:
    """Allowing NAT64 does not allow loopback through NAT64."""
    guard = Guard(["64:ff9b::/96", "2002::/16", "::ffff:0:0/96", "10.0.0.0/8"])
    for address in ("64:ff9b::8.8.8.8", "2002:808:808::1", "::ffff:10.0.0.1"):
        assert guard.block_reason(address, "h") is None
    for address in ("64:ff9b::127.0.0.1", "2002:a9fe:a9fe::1", "::ffff:192.168.0.1"):
        reason = guard.block_reason(address, "h")
        assert reason is not None
        assert "an IPv6 address of" in reason


def test_both_addresses_in_teredo_are_checked() -> None:
    """The server's address and the inverted address of the client are checked."""
    guard = Guard(["2001::/32"])
    assert guard.block_reason("2001:0:808:808::f7f7:f7f7", "h") is None
    assert guard.block_reason("2001:0:7f00:1::f7f7:f7f7", "h") is not None
    assert guard.block_reason("2001:0:808:808::80ff:fffe", "h") is not None


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://localhost/",
        "http://LOCALHOST./",
        "http://a.localhost/",
        "http://localhost.localdomain/",
        "http://ip6-localhost/",
        "http://metadata.google.internal/",
        "http://169.254.169.254/latest/",
        "http://\uff11\uff16\uff19.\uff12\uff15\uff14.\uff11\uff16\uff19.\uff12\uff15\uff14/",
        "http://[::1]/",
        "http://[::]/",
        "http://[::ffff:169.254.169.254]/",
        "http://[fd00:ec2::254]/",
        "grpc://127.0.0.1:1/S/M",
    ],
)
def test_url_with_a_blocked_address_is_rejected(url: str) -> None:
    """The error names the field `targetUrl`."""
    with pytest.raises(ConfigurationError, match="targetUrl must be an address that is allowed"):
        Guard().check_host(parse_target(url))


def test_url_with_a_name_is_checked_at_connect() -> None:
    """`check_host` does not resolve names, and allows public addresses."""
    for url in ("https://example.com/", "https://8.8.8.8/", "https://[2606:4700::1111]/"):
        Guard().check_host(parse_target(url))


def test_url_with_an_allowed_address_is_accepted() -> None:
    """`check_host` allows what `block_reason` allows."""
    Guard(dev=True).check_host(parse_target("http://localhost:8080/"))
    Guard(["localhost"]).check_host(parse_target("http://localhost:8080/"))
    Guard(["10.0.0.0/8"]).check_host(parse_target("http://10.1.1.1/"))


@pytest.mark.parametrize("entry", ["", "10.0.0.1/8", "http://h/", "h:80", "*", "a*.b", "10.0.0"])
def test_invalid_allow_entry_is_rejected(entry: str) -> None:
    """The message names the field and the valid formats."""
    with pytest.raises(ConfigurationError, match=r"^allow must contain CIDRs"):
        Guard([entry])
    with pytest.raises(TypeError, match=r"^allow must contain CIDRs"):
        Guard([7])  # type: ignore[list-item]


@given(st.ip_addresses(v=4))
def test_no_ipv6_format_bypasses_the_check(ipv4: IPv4Address) -> None:
    """An IPv4 address embedded in an IPv6 address is checked like the address itself."""
    guard = Guard(["::/0"])
    allowed = guard.block_reason(str(ipv4), "h") is None
    bits = int(ipv4)
    high, low = bits >> 16, bits & 0xFFFF
    embedded = [
        f"::ffff:{ipv4}",
        f"64:ff9b::{ipv4}",
        f"2002:{high:x}:{low:x}::1",
        f"2a00::5efe:{ipv4}",
    ]
    assert [allowed] * len(embedded) == [
        guard.block_reason(address, "h") is None for address in embedded
    ]
