"""Fixtures: misbehaving targets, the event loops, and a fake DNS."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from tests.integration.hostile import HostileTargets, hostile_targets
from tests.service.delivery import harness


@pytest.fixture(scope="session")
def hostile() -> Iterator[HostileTargets]:
    """Run the hostile targets: slow, endless, malformed, redirecting or closing the connection."""
    with hostile_targets() as targets:
        yield targets


@pytest.fixture(autouse=True)
def run_async() -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    """Run coroutine functions on the loop of `each_loop`, by default asyncio."""
    return lambda main: harness.run(main())


@pytest.fixture(params=harness.LOOPS)
def each_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test once per event loop."""
    harness.use_loop(request.param, monkeypatch)


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return the hosts of a fake DNS with their addresses, which the test fills in."""
    addresses: dict[str, list[str]] = {}

    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", (address, 0)) for address in addresses[host]]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    return addresses
