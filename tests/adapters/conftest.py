"""What all tests of the adapters share."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import count

import pytest

from tarry.adapters.http import headers
from tarry.testing import no_wait
from tests.adapters.clients import CLIENTS, Client
from tests.integration.flaky import Flaky, Seen, flaky_server

_runs = count(1)


class Server:
    """A flaky server, as one test sees it."""

    def __init__(self, flaky: Flaky) -> None:
        self.flaky = flaky
        self.run = f"test-{next(_runs)}"
        self._before = flaky.opened

    @property
    def seen(self) -> list[Seen]:
        """The requests that have arrived."""
        return self.flaky.seen[self.run]

    @property
    def opened(self) -> int:
        """How many connections were opened."""
        return self.flaky.opened - self._before

    def url(self, plan: str, run: str = "") -> str:
        """Return the address that does to each request what the plan says."""
        return f"{self.flaky.url}/thing?run={self.run}{run}&plan={plan}"

    def received(self, header: str) -> list[str | None]:
        """Return what each request had in a header, None where it had none."""
        lowered = [{name.lower(): text for name, text in one.headers.items()} for one in self.seen]
        return [headers.get(header.lower()) for headers in lowered]

    def go_on(self) -> None:
        """Let those go on that wait for it."""
        self.flaky.go_on.set()


@pytest.fixture(scope="session")
def flaky() -> Iterator[Flaky]:
    """Run one flaky server for all."""
    with flaky_server() as flaky:
        yield flaky


@pytest.fixture
def server(flaky: Flaky) -> Iterator[Server]:
    """Give a test its own view of the flaky server."""
    flaky.go_on.clear()
    yield Server(flaky)
    flaky.go_on.set()


@pytest.fixture
def refused() -> Iterator[str]:
    """Give the address of a port that is taken and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/thing"


@pytest.fixture(params=CLIENTS, ids=str)
def client(request: pytest.FixtureRequest) -> Client:
    """Every client in turn."""
    found: Client = request.param
    return found


@pytest.fixture(autouse=True)
def _leisurely() -> Iterator[None]:
    """Give answers that are let go all the time they need, on a machine that is slow."""
    # Not the fixture of that name: tests patch what `_hurry` has, and it must be undone first.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headers, "DRAIN_TIMEOUT_S", 5.0)
        yield


@pytest.fixture
def _hurry() -> Iterator[None]:
    """Make no real waits."""
    with no_wait():
        yield
