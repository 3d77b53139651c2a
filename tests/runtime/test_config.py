"""Coroutine and generator functions are rejected where a plain function is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest

import tarry


async def async_predicate(value: object) -> bool:
    """Return True."""
    return True


class AsyncPredicate:
    """A callable object whose `__call__` is a coroutine function."""

    async def __call__(self, value: object) -> bool:
        """Return True."""
        return True


COROUTINE_FUNCTIONS = [
    pytest.param(async_predicate, "async_predicate", id="function"),
    pytest.param(partial(async_predicate), "async_predicate", id="partial"),
    pytest.param(AsyncPredicate(), "AsyncPredicate", id="object"),
    pytest.param(AsyncPredicate().__call__, "AsyncPredicate.__call__", id="method"),
]
ENTRY_POINTS: dict[str, Callable[..., object]] = {
    "retry": tarry.retry,
    "call": lambda **options: tarry.call(lambda: None, **options),
    "acall": lambda **options: tarry.acall(async_predicate, 1, **options).send(None),
}


@pytest.mark.parametrize("entry_point", [*ENTRY_POINTS, "attempts"])
@pytest.mark.parametrize(("predicate", "name"), COROUTINE_FUNCTIONS)
def test_coroutine_function_as_on_is_rejected(predicate: Any, name: str, entry_point: str) -> None:
    """A coroutine function as `on` is rejected: it would match every error."""
    create = (ENTRY_POINTS | {"attempts": tarry.attempts})[entry_point]

    with pytest.raises(tarry.ConfigurationTypeError, match=f"^on must .* {name}$"):
        create(on=predicate)


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize(("predicate", "name"), COROUTINE_FUNCTIONS)
def test_coroutine_function_as_until_is_rejected(
    predicate: Any, name: str, entry_point: str
) -> None:
    """A coroutine function as `until` is rejected: it would accept every result."""
    with pytest.raises(tarry.ConfigurationTypeError, match=f"^until must .* {name}$"):
        ENTRY_POINTS[entry_point](on=OSError, until=predicate)


def test_coroutine_function_as_on_of_a_hedged_call_is_rejected() -> None:
    """A coroutine function as `on` of a hedged call is rejected."""
    predicate: Any = async_predicate
    with pytest.raises(tarry.ConfigurationTypeError, match=r"^on must .* async_predicate$"):
        tarry.hedge_sync(lambda: None, after=1, on=predicate)


def items() -> Iterator[int]:
    """Yield items."""
    yield 1


async def async_items() -> AsyncIterator[int]:
    """Yield items."""
    yield 1


@pytest.mark.parametrize("fn", [items, async_items, partial(items)])
def test_call_rejects_generator_functions(fn: Any) -> None:
    """The error of `call` and `acall` for a generator function names the decorator."""
    with pytest.raises(tarry.ConfigurationTypeError, match=r"items is a(n async)? generator .*@"):
        tarry.call(fn, on=OSError)
    with pytest.raises(tarry.ConfigurationTypeError, match=r"items is a(n async)? generator .*@"):
        asyncio.run(tarry.acall(fn, on=OSError))
