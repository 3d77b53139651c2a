"""Real targets, started once, and both kinds of event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.hostile import Hostile, hostile_targets
from tests.service.delivery import harness


@pytest.fixture(scope="session")
def hostile() -> Iterator[Hostile]:
    """Targets of all kinds."""
    with hostile_targets() as targets:
        yield targets


@pytest.fixture(params=harness.LOOPS)
def either_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs twice."""
    harness.use(request.param, monkeypatch)


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What DNS says of names."""
    said: dict[str, list[str]] = {}

    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", (address, 0)) for address in said[host]]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    return said
