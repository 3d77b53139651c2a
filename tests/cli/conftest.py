"""Fixtures: one service for all tests of the command line, and a target server for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from tarry.client import Client
from tests.cli.harness import CommandResult, run_command
from tests.integration.flaky import FlakyServer, flaky_server
from tests.integration.service import service


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running service."""
    with service(tmp_path_factory.mktemp("service")) as running_service:
        yield f"http://127.0.0.1:{running_service.port}"


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    """A client of the service."""
    with Client(address) as opened:
        yield opened


@pytest.fixture
def run_cli(address: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CommandResult]:
    """A function that runs a command with TARRY_SERVER set to the service."""
    monkeypatch.setenv("TARRY_SERVER", address)
    return run_command


@pytest.fixture
def target() -> Iterator[FlakyServer]:
    """A target server, with an address and therefore a downstream of its own."""
    with flaky_server() as server:
        yield server


@pytest.fixture
def lane(target: FlakyServer) -> str:
    """The lane (downstream name) of the target in the service."""
    return f"http:{urlsplit(target.url).netloc}"
