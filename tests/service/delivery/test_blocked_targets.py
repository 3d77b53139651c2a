"""Errors of blocked and unreachable targets: what the tenant reads, and what the log has."""

from __future__ import annotations

import logging
import re

import pytest

from tarry.errors import ConfigurationError
from tarry.service.delivery import DeliveryError, Fault
from tarry.service.delivery.grpc import GrpcDeliveryClient
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tarry.service.delivery.http1.connector import select_allowed
from tarry.service.delivery.targets import parse_target
from tarry.testing import VirtualClock
from tests.integration.ports import free_port
from tests.service.delivery.harness import LOOPBACK_GUARD, new_request, send_all


def block(host: str, *addresses: str, guard: Guard | None = None) -> str:
    """Return the error of an attempt whose host has these addresses, which are all blocked."""
    with pytest.raises(DeliveryError) as raised:
        select_allowed(addresses, host, guard or Guard())
    assert Fault.BLOCKED is raised.value.fault
    return str(raised.value)


def reject(url: str) -> str:
    """Return the error of a task whose URL has a host that is known to be blocked."""
    with pytest.raises(ConfigurationError) as raised:
        Guard().check_host(parse_target(url))
    return str(raised.value)


def test_error_of_a_blocked_name_has_the_setting_and_no_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The tenant reads the setting with its value; only the log has the internal address."""
    error = block("billing.internal", "10.1.2.3", "fd12::7")
    hint = "the operator can allow it: --allow-target billing.internal (setting allow_target)"
    assert f"The host name has no address that is allowed as a target; {hint}" == error
    [logged] = caplog.messages
    assert logged.startswith("target blocked, host=billing.internal: 10.1.2.3 is a private address")
    assert logged.endswith(f", fd12::7 is a private address; {hint}")


def test_suggested_value_allows_the_target() -> None:
    """The value in the error is accepted as a setting and allows the target."""
    for host, address in (("a.internal", "10.1.2.3"), ("10.1.2.3",) * 2, ("fd12::7",) * 2):
        value = block(host, address).partition("--allow-target ")[2].split()[0]
        assert [address] == select_allowed([address], host, Guard([value]))


@pytest.mark.parametrize("guard", [Guard(), Guard(["*.example"])])
def test_address_that_a_name_does_not_allow_needs_a_network(
    guard: Guard, caplog: pytest.LogCaptureFixture
) -> None:
    """The error says that a network is needed, and the log has one that is enough."""
    for addresses in (["127.0.0.1"], ["169.254.7.7"], ["64:ff9b::7f00:1"]):
        caplog.clear()
        error = block("a.example", *addresses, guard=guard)
        rule = "its address is not private, so it must be allowed by address, and not by name"
        assert f"{rule}: --allow-target CIDR (setting allow_target). The log has the address" == (
            error.removeprefix("The host name has no address that is allowed as a target; ")
        )
        [logged] = caplog.messages
        guard._logged_hosts.clear()
        assert logged.startswith(f"target blocked, host=a.example: {addresses[0]} is ")
        values = re.findall("--allow-target ([^ ]+)", logged)
        assert addresses == select_allowed(addresses, "a.example", Guard(values))


@pytest.mark.usefixtures("each_loop")
@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_allowed_name_with_a_loopback_address_is_not_dialled(
    scheme: str, dns: dict[str, list[str]]
) -> None:
    """A name with a private entry only: the address is blocked when the connection is made."""
    dns["a.example"] = ["127.0.0.1", "169.254.169.254", "::1"]

    guard = Guard(["a.example", "*.example"])
    client = (HttpDeliveryClient if scheme == "http" else GrpcDeliveryClient)(guard)
    [result] = await send_all(client, new_request(f"{scheme}://a.example:{free_port()}/S/M"))
    assert Fault.BLOCKED is result.fault


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "fd00:ec2::254", "::ffff:169.254.169.254", "168.63.129.16"]
)
def test_metadata_address_has_no_suggestion(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """No operator should allow a host that has a cloud metadata address."""
    error = block("a.example", "10.0.0.1", address)
    assert "The host name has no address that is allowed as a target" == error
    assert "--allow-target" not in caplog.text
    assert address in caplog.text


def test_address_in_the_url_is_described() -> None:
    """The tenant knows an address that is part of the URL, so the error describes it."""
    hint = "; the operator can allow it: --allow-target"
    rule = "targetUrl must be an address that is allowed:"
    assert f"10.1.2.3 is a private address{hint} 10.1.2.3 (setting allow_target)" == block(
        "10.1.2.3", "10.1.2.3"
    )
    assert f"{rule} ::1 is a loopback address{hint} ::1 (setting allow_target)" == reject(
        "http://[::1]/"
    )
    assert f"{rule} localhost is a loopback address{hint} localhost (setting allow_target)" == (
        reject("http://localhost/")
    )
    assert f"{rule} 169.254.169.254 is a cloud metadata address" == reject("http://169.254.169.254")
    for name, address in (("ip6-localhost", "::1"), ("localhost.localdomain", "127.0.0.1")):
        error = reject(f"http://{name}/")
        assert error.endswith(f"--allow-target {address} (setting allow_target)")
        Guard([address]).check_host(parse_target(f"http://{name}/"))
    # The flag would not be enough: the contained address is checked, too.
    assert f"{rule} ::ffff:10.0.0.1 is an IPv4-mapped address of 10.0.0.1" == reject(
        "http://[::ffff:10.0.0.1]/"
    )


def test_log_of_blocked_targets_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A host is logged once an hour, and at most 1,000 hosts are logged in an hour."""
    guard = Guard()
    caplog.set_level(logging.WARNING)
    with VirtualClock() as clock:
        for _ in range(3):
            block("a.internal", "10.0.0.1", guard=guard)
        assert 1 == len(caplog.messages)
        for number in range(1200):
            block(f"{number}.internal", "10.0.0.1", guard=guard)
        assert 1000 == len(caplog.messages)
        clock.advance(3601)
        block("a.internal", "10.0.0.1", guard=guard)
        assert 1001 == len(caplog.messages)


@pytest.mark.usefixtures("each_loop")
@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_error_of_a_refused_connection_has_no_address(
    scheme: str, address: str, dns: dict[str, list[str]]
) -> None:
    """The error names the host of the URL instead of the address that the name resolves to."""
    dns["a.example"] = [address]
    port = free_port()

    client = (HttpDeliveryClient if scheme == "http" else GrpcDeliveryClient)(LOOPBACK_GUARD)
    [result] = await send_all(client, new_request(f"{scheme}://a.example:{port}/S/M"))
    assert result.error is not None
    assert address not in result.error
    assert "a.example" in result.error
    assert "onnection refused" in result.error
