from __future__ import annotations

from collections.abc import Iterator

import pytest

from tarry.service.defaults import MAX_RESPONSE_BYTES
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.client import HttpDelivery
from tarry.service.delivery.messages import DeliveryResult, Fault
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
    """Targets of all kinds."""
    with hostile_targets() as targets:
        yield targets


@pytest.fixture(params=LOOPS, autouse=True)
def either_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs twice."""
    use_loop(request.param, monkeypatch)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_what_a_hostile_target_comes_to(hostile: HostileTargets, name: str) -> None:
    """A value, whatever it does: its status, or a fault in words; and it was asked but once."""
    expected, before = EXPECTED[name], len(hostile.seen)
    result = send(hostile.url + name, timeout=0.3 if expected is Fault.TIMEOUT else 20.0)
    if isinstance(expected, Fault):
        assert (expected, None) == (result.fault, result.status)
        assert result.error
    else:
        assert (expected, None) == (result.status, result.fault)
    assert 1 == len(hostile.seen) - before


def test_a_target_that_hangs_up_at_once(hostile: HostileTargets) -> None:
    """Before it reads anything."""
    assert Fault.RESET is send(hostile.closing).fault


@pytest.mark.parametrize("kind", ["expired", "selfsigned", "wronghost"])
def test_a_certificate_that_is_not_in_order(hostile: HostileTargets, kind: str) -> None:
    """Nothing is sent to whom cannot prove who he is."""
    before = len(hostile.seen)
    result = send(hostile.tls[kind] + "ok", ca=hostile.ca)
    assert Fault.TLS is result.fault
    assert result.error
    assert before == len(hostile.seen)


def test_a_handshake_that_nobody_answers(hostile: HostileTargets) -> None:
    """TLS with a target that hangs up, and plain HTTP with one that wants TLS."""
    assert Fault.TLS is send(hostile.closing.replace("http:", "https:"), ca=hostile.ca).fault
    assert Fault.RESET is send(hostile.tls["good"].replace("https:", "http:")).fault


def test_a_bomb_is_not_unpacked(hostile: HostileTargets) -> None:
    """The excerpt is of the bytes that were sent."""
    result = send(hostile.url + "bomb")
    assert BOMB[:2048] == result.excerpt


def test_a_new_connection_that_ends_is_not_tried_again(hostile: HostileTargets) -> None:
    """The target may have read it: that is one attempt, and it failed."""
    before = len(hostile.seen)
    assert Fault.RESET is send(hostile.url + "close-before-answer").fault
    assert 1 == len(hostile.seen) - before


def test_a_redirect_is_shown_and_not_followed(hostile: HostileTargets) -> None:
    """Wherever it points."""
    result = send(hostile.url + "redirect")
    assert METADATA == dict(result.headers)["location"]
    assert "127.0.0.1" == result.remote


def test_reading_ends_at_the_bound(hostile: HostileTargets) -> None:
    """An endless body costs no more than that; the connection is not used again."""

    async def main() -> list[DeliveryResult]:
        return await send_all(
            HttpDelivery(LOOPBACK_GUARD, max_body=100_000),
            request(hostile.url + "endless", max_excerpt=MAX_RESPONSE_BYTES),
            request(hostile.url + "ok"),
        )

    before = hostile.connections
    first, second = run(main())
    assert 100_000 <= len(first.excerpt) < 200_000
    assert [200, 200] == [first.status, second.status]
    assert 2 == hostile.connections - before


def test_only_the_headers_of_the_answer_count(hostile: HostileTargets) -> None:
    """Neither those of interim answers nor trailers."""
    assert [("content-length", "2")] == send(hostile.url + "continue").headers
    names = [name for name, _ in send(hostile.url + "trailers").headers]
    assert ["x-head", "transfer-encoding"] == names


def test_what_ends_on_a_kept_connection_is_sent_once_more_and_no_oftener(
    hostile: HostileTargets,
) -> None:
    """It may have been closed long ago; on a new connection the silence counts."""

    async def main() -> list[DeliveryResult]:
        return await send_all(
            HttpDelivery(LOOPBACK_GUARD),
            request(hostile.url + "ok"),
            request(hostile.url + "close-before-answer"),
            request(hostile.url + "ok"),
            request(hostile.url + "close-before-answer", method="GET", body=b""),
        )

    before = len(hostile.seen)
    result = run(main())
    assert [None, Fault.RESET, None, Fault.RESET] == [each.fault for each in result]
    assert 4 + 2 == len(hostile.seen) - before


def test_a_redirect_target_is_refused_when_asked_for_itself() -> None:
    """Metadata is not reached by asking plainly either."""
    assert Fault.BLOCKED is send(METADATA, Guard(dev=True), timeout=5.0).fault
