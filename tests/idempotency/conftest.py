"""Fixtures of the idempotency tests."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import pytest

from tarry.runtime.effects import effects
from tarry.testing import VirtualClock

Run: TypeAlias = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=["asyncio", "trio"])
def run_async(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run coroutine functions in virtual time, on asyncio and trio."""
    # One request in a hundred sweeps the store; with this random number, no request does.
    monkeypatch.setattr(effects, "draw_random", lambda: 0.5)

    def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with VirtualClock() as clock:
            (clock.run if request.param == "asyncio" else clock.run_trio)(main)

    return run
