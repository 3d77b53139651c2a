from __future__ import annotations

from collections.abc import Iterator

import pytest

from tarry.service.defaults import MAX_RESPONSE_BYTES
from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tests.integration.hostile import (
    BEHAVIOURS,
    BOMB,
    METADATA_URL,
    HostileTargets,
    hostile_targets,
)
from tests.service.delivery.harness import (
    LOOPBACK_GUARD,
    LOOPS,
    new_request,
    run,
    send,
    send_all,
    use_loop,
)

EXPECTED: dict[str, int | Fault] = {
    "never": Fault.TIMEOUT,
    "drip": Fault.TIMEOUT,
    "dripping-headers": Fault.TIMEOUT,
    "endless": 200,
    "endless-500": 500,
    "endless-chunks": 200,
    "huge": 200,
    "bomb": 200,
    "million-headers": Fault.PROTOCOL,
    "200-headers": 200,
    "many-headers": Fault.PROTOCOL,
    "endless-header": Fault.PROTOCOL,
    "large-headers": Fault.PROTOCOL,
    "endless-100": Fault.PROTOCOL,
    "close-before-response": Fault.RESET,
    "close-in-status": Fault.RESET,
    "close-in-headers": Fault.RESET,
    "close-in-body": Fault.RESET,
    "close-in-chunk": Fault.RESET,
    "redirect": 302,
    "http10": 200,
    "http09": Fault.PROTOCOL,
    "continue": 200,
    "switching": Fault.PROTOCOL,
    "bad-status": Fault.PROTOCOL,
    "bad-version": Fault.PROTOCOL,
    "not-http": Fault.PROTOCOL,
    "status-999": 999,
    "body-too-long": 200,
    "two-lengths": Fault.PROTOCOL,
    "bad-length": Fault.PROTOCOL,
    "bad-chunks": Fault.PROTOCOL,
    "bad-encoding": Fault.PROTOCOL,
    "null-in-header": Fault.PROTOCOL,
    "no-colon": Fault.PROTOCOL,
    "trailers": 200,
    "bytes-in-header": 200,
    "second-response": 200,
    "endless-extension": 200,
    "endless-trailers": 200,
    "endless-short-headers": Fault.PROTOCOL,
    "endless-lines": Fault.PROTOCOL,
    "continue-then-nonsense": Fault.PROTOCOL,
    "length-and-chunks": Fault.PROTOCOL,
    "carriage-return": Fault.PROTOCOL,
    "zipped-chunks": Fault.PROTOCOL,
}


@pytest.fixture(scope="module")
def hostile() -> Iterator[HostileTargets]:
    """Run the hostile targets: slow, endless, malformed, redirecting or closing the connection."""
    with hostile_targets() as targets:
        yield targets


@pytest.fixture(params=LOOPS, autouse=True)
def each_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test once per event loop."""
    use_loop(request.param, monkeypatch)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_result_for_a_hostile_target(hostile: HostileTargets, name: str) -> None:
    """Each target gets one request; the result has the status, or a fault with a description."""
    expected, before = EXPECTED[name], len(hostile.received_requests)
    result = send(hostile.url + name, timeout=1.0 if expected is Fault.TIMEOUT else 20.0)
    if isinstance(expected, Fault):
        assert (expected, None) == (result.fault, result.status)
        assert result.error
    else:
        assert (expected, None) == (result.status, result.fault)
    assert 1 == len(hostile.received_requests) - before


def test_connection_closed_before_the_request_is_a_reset_fault(hostile: HostileTargets) -> None:
    assert Fault.RESET is send(hostile.closing_url).fault


@pytest.mark.parametrize("certificate", ["expired", "selfsigned", "wronghost"])
def test_invalid_certificate_is_a_tls_fault(hostile: HostileTargets, certificate: str) -> None:
    """A target with an invalid certificate gets no request."""
    before = len(hostile.received_requests)
    result = send(hostile.tls_urls[certificate] + "ok", ca_file=hostile.ca_file)
    assert Fault.TLS is result.fault
    assert result.error
    assert before == len(hostile.received_requests)


def test_tls_handshake_without_a_tls_peer_is_a_fault(hostile: HostileTargets) -> None:
    """A handshake that the target closes is a TLS fault; HTTP to a TLS target is a RESET fault."""
    assert (
        Fault.TLS
        is send(hostile.closing_url.replace("http:", "https:"), ca_file=hostile.ca_file).fault
    )
    assert Fault.RESET is send(hostile.tls_urls["good"].replace("https:", "http:")).fault


def test_compressed_body_is_not_decompressed(hostile: HostileTargets) -> None:
    """The excerpt has the compressed bytes."""
    result = send(hostile.url + "bomb")
    assert BOMB[:2048] == result.excerpt


def test_request_is_not_resent_if_a_new_connection_is_closed(hostile: HostileTargets) -> None:
    """A new connection that the target closes without a response is a RESET fault."""
    before = len(hostile.received_requests)
    assert Fault.RESET is send(hostile.url + "close-before-response").fault
    assert 1 == len(hostile.received_requests) - before


def test_redirect_is_not_followed(hostile: HostileTargets) -> None:
    """The result has the `Location` header, and the target's address."""
    result = send(hostile.url + "redirect")
    assert METADATA_URL == dict(result.headers)["location"]
    assert "127.0.0.1" == result.remote


def test_endless_body_is_truncated(hostile: HostileTargets) -> None:
    """Reading stops at the limit, and the connection is not reused."""

    async def main() -> list[DeliveryResult]:
        return await send_all(
            HttpDeliveryClient(LOOPBACK_GUARD, max_response_bytes=100_000),
            new_request(hostile.url + "endless", max_excerpt=MAX_RESPONSE_BYTES),
            new_request(hostile.url + "ok"),
        )

    before = hostile.connections
    first, second = run(main())
    assert 100_000 <= len(first.excerpt) < 200_000
    assert [200, 200] == [first.status, second.status]
    assert 2 == hostile.connections - before


def test_result_has_only_headers_of_the_final_response(hostile: HostileTargets) -> None:
    """Headers of interim responses and trailers are ignored."""
    assert [("content-length", "2")] == send(hostile.url + "continue").headers
    names = [name for name, _ in send(hostile.url + "trailers").headers]
    assert ["x-head", "transfer-encoding"] == names


def test_request_on_a_closed_idle_connection_is_resent_once(
    hostile: HostileTargets,
) -> None:
    """The resent request goes to a new connection, where another close is a RESET fault."""

    async def main() -> list[DeliveryResult]:
        return await send_all(
            HttpDeliveryClient(LOOPBACK_GUARD),
            new_request(hostile.url + "ok"),
            new_request(hostile.url + "close-before-response"),
            new_request(hostile.url + "ok"),
            new_request(hostile.url + "close-before-response", method="GET", body=b""),
        )

    before = len(hostile.received_requests)
    result = run(main())
    assert [None, Fault.RESET, None, Fault.RESET] == [each.fault for each in result]
    assert 4 + 2 == len(hostile.received_requests) - before


def test_metadata_address_is_blocked() -> None:
    """The cloud metadata address is blocked, even in development mode."""
    assert Fault.BLOCKED is send(METADATA_URL, Guard(dev=True), timeout=5.0).fault
