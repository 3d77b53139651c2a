"""Fixtures of the adapter tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import count

import pytest

from tarry.adapters.http import messages
from tarry.testing import no_wait
from tests.adapters.clients import CLIENT_LIBRARIES, ClientLibrary
from tests.integration.flaky import FlakyServer, RecordedRequest, flaky_server

_test_numbers = count(1)


class FlakyServerView:
    """The flaky server, limited to the requests of one test."""

    def __init__(self, flaky: FlakyServer) -> None:
        self.flaky = flaky
        self.run = f"test-{next(_test_numbers)}"
        self._opened_before = flaky.total_connections

    @property
    def received_requests(self) -> list[RecordedRequest]:
        """The requests that the server has received."""
        return self.flaky.received_requests[self.run]

    @property
    def opened_connections(self) -> int:
        """The number of connections that were opened."""
        return self.flaky.total_connections - self._opened_before

    def url(self, plan: str, run_suffix: str = "") -> str:
        """Return a URL with the plan of the server for each request."""
        return f"{self.flaky.url}/thing?run={self.run}{run_suffix}&plan={plan}"

    def header_values(self, header: str) -> list[str | None]:
        """Return the value of a header in each request; None if it is missing."""
        requests = [
            {name.lower(): text for name, text in request.headers.items()}
            for request in self.received_requests
        ]
        return [headers.get(header.lower()) for headers in requests]

    def resume(self) -> None:
        """Resume the responses that are paused."""
        self.flaky.may_continue.set()


@pytest.fixture(scope="session")
def flaky() -> Iterator[FlakyServer]:
    """Run one flaky server for all tests."""
    with flaky_server() as flaky:
        yield flaky


@pytest.fixture
def server(flaky: FlakyServer) -> Iterator[FlakyServerView]:
    """Return a view of the flaky server for one test."""
    flaky.may_continue.clear()
    yield FlakyServerView(flaky)
    flaky.may_continue.set()


@pytest.fixture
def unreachable_url() -> Iterator[str]:
    """Return a URL whose port is reserved but not listening."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}/thing"


@pytest.fixture(params=CLIENT_LIBRARIES, ids=str)
def client(request: pytest.FixtureRequest) -> ClientLibrary:
    """Return each client library in turn."""
    param: ClientLibrary = request.param
    return param


@pytest.fixture(autouse=True)
def _long_drain_timeout() -> Iterator[None]:
    """Raise the drain timeout, so that responses are drained on a slow machine too."""
    # Not the `monkeypatch` fixture: it would then be set up before `_no_waits` and undone after it,
    # but tests patch the same functions as `_no_waits`, so their patches must be undone first.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "DRAIN_TIMEOUT_S", 5.0)
        yield


@pytest.fixture
def _no_waits() -> Iterator[None]:
    """Make waits return at once."""
    with no_wait():
        yield
