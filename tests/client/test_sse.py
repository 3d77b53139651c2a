"""Live events: parsing of the stream, and reconnects."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.client import errors
from tarry.client.sse import EventStreamParser
from tests.client.client_drivers import ClientDriver
from tests.client.fake_service import FakeService


def event_bytes(kind: str, at: int) -> bytes:
    """Return an event as the service sends it."""
    data = json.dumps({"kind": kind, "at": at, "lane": "https://example.com:443"})
    return f"id: {at}-1\nevent: {kind}\ndata: {data}\n\n".encode()


@pytest.mark.usefixtures("_no_wait")
def test_lost_stream_is_reopened(
    driver: ClientDriver, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading continues after a lost connection and after an outage of the service."""
    service.streams.extend(
        [
            b": hello\n\n" + event_bytes("added", 1) + event_bytes("attempt", 2)[:-1],
            b"",
            event_bytes("succeeded", 3) + event_bytes("added", 4),
        ]
    )
    service.faults.extend(["", "", *["503"] * 8])

    events = driver.events(3)

    assert [("added", 1), ("succeeded", 3), ("added", 4)] == [(one.kind, one.at) for one in events]
    assert 11 == len(service.requests)
    lost = [one.getMessage() for one in caplog.records if one.name == "tarry.client"]
    assert 2 == len(lost)
    assert lost[0].startswith("event stream lost, reconnecting, url=")
    assert {"text/event-stream"} == {request.headers["accept"] for request in service.requests}


@pytest.mark.usefixtures("_no_wait")
def test_first_connection_is_not_retried_forever(
    driver: ClientDriver, service: FakeService
) -> None:
    """The first connection is retried under the client's policy only."""
    service.faults.extend(["503"] * 100)
    with pytest.raises(errors.ServiceUnavailable):
        driver.events(1)
    assert 4 == len(service.requests)


def test_response_is_not_a_stream(driver: ClientDriver, service: FakeService) -> None:
    """A response that is not an event stream is an error."""
    service.responses["GET /events"] = (200, {"hello": "world"})
    with pytest.raises(errors.ServiceError, match="not an event stream"):
        driver.events(1)


LINES = b"".join(
    [
        b": hello\n\n",
        event_bytes("added", 1),
        event_bytes("missed", 2).replace(b"\n", b"\r\n"),
        event_bytes("parked", 3).replace(b"\n", b"\r"),
        b'data: {"kind":\ndata:"missed",\ndata: "missed": 5}\nretry: 10\nodd\n\n',
    ]
)


@given(st.lists(st.integers(0, len(LINES)), max_size=20))
def test_chunks_do_not_matter(cuts: list[int]) -> None:
    """The chunks of a stream do not affect its events."""
    parser = EventStreamParser()
    places = [0, *sorted(cuts), len(LINES)]
    found = [event for start, end in pairwise(places) for event in parser.feed(LINES[start:end])]
    assert ["added", "missed", "parked", "missed"] == [event.kind for event in found]
    assert 5 == found[-1].missed


@pytest.mark.parametrize("piece", [b"x" * 4096, b"\ndata: " + b"x" * 4096])
def test_event_size_is_limited(piece: bytes) -> None:
    """An event has a maximum size, as one line or as many."""
    parser = EventStreamParser()
    with pytest.raises(errors.ServiceError, match="more than 262144 bytes"):
        for _ in range(100):
            assert [] == list(parser.feed(piece))


def test_invalid_event() -> None:
    """An invalid event is an error."""
    with pytest.raises(errors.ServiceError, match="cannot be parsed"):
        list(EventStreamParser().feed(b"data: [1]\n\n"))
