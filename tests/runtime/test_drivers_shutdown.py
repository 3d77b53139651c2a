"""Async generators that are left open when their loop ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from typing import Any

import pytest

import tarry

MANY = 16
"""The loop closes them in no particular order: enough for every order of two."""


@pytest.mark.parametrize("held", [True, False], ids=["held", "collected"])
@pytest.mark.parametrize("options", [{}, {"deadline": 5}, {"timeout": 5}], ids=str)
def test_abandoned_generator_at_shutdown(held: bool, options: dict[str, Any]) -> None:
    """A generator that is left open ends once with the loop, and nothing is reported."""
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
        for _ in range(MANY):
            items = stream()
            total += await anext(items)
            if held:
                generators.append(items)
        return total

    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: reported.append(context))
        assert MANY == runner.run(main())
        gc.collect()
    gc.collect()

    assert (["ended"] * MANY, []) == (ended, reported)
