from __future__ import annotations

from collections.abc import Iterator

import pytest

from tarry.service.defaults import MAX_RESPONSE_BYTES
from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tests.integration.hostile import BEHAVIOURS, BOMB, METADATA, HostileTargets, hostile_targets
from tests.service.delivery.harness import (
    LOOPBACK_GUARD,
    LOOPS,
    request,
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
    "close-before-answer": Fault.RESET,
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
    "second-answer": 200,
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
    """Run the hostile targets."""
    with hostile_targets() as targets:
        yield targets


@pytest.fixture(params=LOOPS, autouse=True)
def either_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test on both event loops."""
    use_loop(request.param, monkeypatch)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_result_for_a_hostile_target(hostile: HostileTargets, name: str) -> None:
    """Each target gets one request, and the result is its status or a fault with a description."""
    expected, before = EXPECTED[name], len(hostile.seen)
    result = send(hostile.url + name, timeout=0.3 if expected is Fault.TIMEOUT else 20.0)
    if isinstance(expected, Fault):
        assert (expected, None) == (result.fault, result.status)
        assert result.error
    else:
        assert (expected, None) == (result.status, result.fault)
    assert 1 == len(hostile.seen) - before


def test_target_that_closes_at_once(hostile: HostileTargets) -> None:
    """The target closes before it reads anything."""
    assert Fault.RESET is send(hostile.closing).fault


@pytest.mark.parametrize("kind", ["expired", "selfsigned", "wronghost"])
def test_invalid_certificate(hostile: HostileTargets, kind: str) -> None:
    """No request is sent to a target with an invalid certificate."""
    before = len(hostile.seen)
    result = send(hostile.tls[kind] + "ok", ca_file=hostile.ca)
    assert Fault.TLS is result.fault
    assert result.error
    assert before == len(hostile.seen)


def test_tls_and_plain_http_mixed_up(hostile: HostileTargets) -> None:
    """TLS with a plain target and plain HTTP with a TLS target are faults."""
    assert Fault.TLS is send(hostile.closing.replace("http:", "https:"), ca_file=hostile.ca).fault
    assert Fault.RESET is send(hostile.tls["good"].replace("https:", "http:")).fault


def test_compressed_body_is_not_decompressed(hostile: HostileTargets) -> None:
    """The excerpt has the bytes as they were sent."""
    result = send(hostile.url + "bomb")
    assert BOMB[:2048] == result.excerpt


def test_closed_new_connection_is_not_retried(hostile: HostileTargets) -> None:
    """The target may have read the request, so the attempt has failed."""
    before = len(hostile.seen)
    assert Fault.RESET is send(hostile.url + "close-before-answer").fault
    assert 1 == len(hostile.seen) - before


def test_redirect_is_not_followed(hostile: HostileTargets) -> None:
    """The result has the redirect, wherever it points to."""
    result = send(hostile.url + "redirect")
    assert METADATA == dict(result.headers)["location"]
    assert "127.0.0.1" == result.remote


def test_endless_body_is_cut(hostile: HostileTargets) -> None:
    """Reading stops at the limit, and the connection is not reused."""

    async def main() -> list[DeliveryResult]:
        return await send_all(
            HttpDeliveryClient(LOOPBACK_GUARD, max_response_bytes=100_000),
            request(hostile.url + "endless", max_excerpt=MAX_RESPONSE_BYTES),
            request(hostile.url + "ok"),
        )

    before = hostile.connections
    first, second = run(main())
    assert 100_000 <= len(first.excerpt) < 200_000
    assert [200, 200] == [first.status, second.status]
    assert 2 == hostile.connections - before


def test_only_headers_of_the_final_response_count(hostile: HostileTargets) -> None:
    """Headers of interim responses and trailers are ignored."""
    assert [("content-length", "2")] == send(hostile.url + "continue").headers
    names = [name for name, _ in send(hostile.url + "trailers").headers]
    assert ["x-head", "transfer-encoding"] == names


def test_request_on_a_closed_idle_connection_is_resent_once(
    hostile: HostileTargets,
) -> None:
    """An idle connection may have been closed; on a new connection the close is a fault."""

    async def main() -> list[DeliveryResult]:
        return await send_all(
            HttpDeliveryClient(LOOPBACK_GUARD),
            request(hostile.url + "ok"),
            request(hostile.url + "close-before-answer"),
            request(hostile.url + "ok"),
            request(hostile.url + "close-before-answer", method="GET", body=b""),
        )

    before = len(hostile.seen)
    result = run(main())
    assert [None, Fault.RESET, None, Fault.RESET] == [each.fault for each in result]
    assert 4 + 2 == len(hostile.seen) - before


def test_metadata_address_is_refused() -> None:
    """The metadata address cannot be used as a target either."""
    assert Fault.BLOCKED is send(METADATA, Guard(dev=True), timeout=5.0).fault
