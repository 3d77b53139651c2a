"""Live events: the bytes of a stream, and connections that are lost."""

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


def told(kind: str, at: int) -> bytes:
    """One event as the service writes it."""
    data = json.dumps({"kind": kind, "at": at, "lane": "https://example.com:443"})
    return f"id: {at}-1\nevent: {kind}\ndata: {data}\n\n".encode()


@pytest.mark.usefixtures("_no_wait")
def test_a_stream_that_is_lost_is_opened_again(
    driver: ClientDriver, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader goes on after its connection was lost, and after a service that was away."""
    service.streams.extend(
        [
            b": hello\n\n" + told("added", 1) + told("attempt", 2)[:-1],
            b"",
            told("succeeded", 3) + told("added", 4),
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
def test_the_first_connection_is_not_tried_for_ever(
    driver: ClientDriver, service: FakeService
) -> None:
    """A service that is not there is an error, as for any other call."""
    service.faults.extend(["503"] * 100)
    with pytest.raises(errors.ServiceUnavailable):
        driver.events(1)
    assert 4 == len(service.requests)


def test_no_stream(driver: ClientDriver, service: FakeService) -> None:
    """An answer that is no stream of events is an error, not an endless loop."""
    service.responses["GET /events"] = (200, {"hello": "world"})
    with pytest.raises(errors.ServiceError, match="not an event stream"):
        driver.events(1)


LINES = b"".join(
    [
        b": hello\n\n",
        told("added", 1),
        told("missed", 2).replace(b"\n", b"\r\n"),
        told("parked", 3).replace(b"\n", b"\r"),
        b'data: {"kind":\ndata:"missed",\ndata: "missed": 5}\nretry: 10\nodd\n\n',
    ]
)


@given(st.lists(st.integers(0, len(LINES)), max_size=20))
def test_bytes_come_as_they_come(cuts: list[int]) -> None:
    """Where a stream is cut into pieces does not change its events."""
    parser = EventStreamParser()
    places = [0, *sorted(cuts), len(LINES)]
    found = [event for start, end in pairwise(places) for event in parser.feed(LINES[start:end])]
    assert ["added", "missed", "parked", "missed"] == [event.kind for event in found]
    assert 5 == found[-1].missed


@pytest.mark.parametrize("piece", [b"x" * 4096, b"\ndata: " + b"x" * 4096])
def test_an_event_without_end(piece: bytes) -> None:
    """What never ends is given up, not collected: one long line, or lines without number."""
    parser = EventStreamParser()
    with pytest.raises(errors.ServiceError, match="more than 262144 bytes"):
        for _ in range(100):
            assert [] == list(parser.feed(piece))


def test_an_event_that_cannot_be_read() -> None:
    """What is no event is an error that says so."""
    with pytest.raises(errors.ServiceError, match="cannot be parsed"):
        list(EventStreamParser().feed(b"data: [1]\n\n"))
