"""Both loops, for tests of what has to hold on each."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import pytest

from tarry.testing import VirtualClock

Run: TypeAlias = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run on one loop and on the other, in virtual time."""

    def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with VirtualClock() as clock:
            (clock.run if request.param == "asyncio" else clock.run_trio)(main)

    return run
