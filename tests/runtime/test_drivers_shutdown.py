"""Async generators that are still open when their event loop is closed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from typing import Any

import pytest

import tarry

GENERATOR_COUNT = 16
"""Enough generators for different orders of closing: the event loop has no fixed order."""


@pytest.mark.parametrize("is_referenced", [True, False], ids=["referenced", "collected"])
@pytest.mark.parametrize("options", [{}, {"deadline": 5}, {"timeout": 5}], ids=str)
def test_open_generators_are_closed_at_shutdown(
    is_referenced: bool, options: dict[str, Any]
) -> None:
    """The event loop closes each open generator once, and reports no error."""
    ended: list[str] = []
    reported: list[dict[str, Any]] = []
    generators: list[object] = []

    @tarry.retry(on=OSError, **options)
    async def stream() -> AsyncGenerator[int]:
        try:
            yield 1
            yield 2
        finally:
            ended.append("ended")
            await asyncio.sleep(0)

    async def main() -> int:
        total = 0
        for _ in range(GENERATOR_COUNT):
            items = stream()
            total += await anext(items)
            if is_referenced:
                generators.append(items)
        return total

    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: reported.append(context))
        assert GENERATOR_COUNT == runner.run(main())
        gc.collect()
    gc.collect()

    assert (["ended"] * GENERATOR_COUNT, []) == (ended, reported)
