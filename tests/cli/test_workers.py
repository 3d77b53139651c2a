"""`tarry workers`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from tests.cli.harness import CommandResult


def test_workers_lists_the_processes(run_cli: Callable[..., CommandResult]) -> None:
    """The table has a row for the running service, and `--json` has the fields of the API."""
    [worker] = run_cli("workers", "--json").json["items"]
    assert ("all", version("tarry")) == (worker["role"], worker["version"])
    assert worker["startedAt"] <= worker["seenAt"]

    lines = run_cli("workers").out.splitlines()
    assert ["name", "host", "pid", "role", "version", "uptime", "last", "seen"] == (
        lines[0].split()[:8]
    )
    assert {str(worker["pid"]), "all", version("tarry")} <= set(lines[1].split())
