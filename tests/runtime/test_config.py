"""Coroutine and generator functions are rejected where a plain function is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest

import tarry


async def is_fine(value: object) -> bool:
    """Return a coroutine."""
    return True


class AsyncPredicate:
    """A callable object whose `__call__` is a coroutine function."""

    async def __call__(self, value: object) -> bool:
        """Return a coroutine."""
        return True


LATER = [
    pytest.param(is_fine, "is_fine", id="function"),
    pytest.param(partial(is_fine), "is_fine", id="partial"),
    pytest.param(AsyncPredicate(), "AsyncPredicate", id="object"),
    pytest.param(AsyncPredicate().__call__, "AsyncPredicate.__call__", id="method"),
]
FORMS: dict[str, Callable[..., object]] = {
    "retry": tarry.retry,
    "call": lambda **options: tarry.call(lambda: None, **options),
    "acall": lambda **options: tarry.acall(is_fine, 1, **options).send(None),
}


@pytest.mark.parametrize("form", [*FORMS, "attempts"])
@pytest.mark.parametrize(("predicate", "name"), LATER)
def test_on_is_no_coroutine_function(predicate: Any, name: str, form: str) -> None:
    """A coroutine function as `on` is rejected: it would match every error."""
    make = (FORMS | {"attempts": tarry.attempts})[form]

    with pytest.raises(tarry.ConfigurationTypeError, match=f"^on must .* {name}$"):
        make(on=predicate)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("predicate", "name"), LATER)
def test_until_is_no_coroutine_function(predicate: Any, name: str, form: str) -> None:
    """A coroutine function as `until` is rejected: it would accept every result."""
    with pytest.raises(tarry.ConfigurationTypeError, match=f"^until must .* {name}$"):
        FORMS[form](on=OSError, until=predicate)


def test_on_of_a_hedged_call_is_no_coroutine_function() -> None:
    """Hedged calls reject a coroutine function as `on` too."""
    later: Any = is_fine
    with pytest.raises(tarry.ConfigurationTypeError, match=r"^on must .* is_fine$"):
        tarry.hedge_sync(lambda: None, after=1, on=later)


def items() -> Iterator[int]:
    """Yield items."""
    yield 1


async def async_items() -> AsyncIterator[int]:
    """Yield items."""
    yield 1


@pytest.mark.parametrize("fn", [items, async_items, partial(items)])
def test_call_refuses_generator_functions(fn: Any) -> None:
    """`call` and `acall` reject a generator function and name the decorator instead."""
    with pytest.raises(tarry.ConfigurationTypeError, match=r"items is a(n async)? generator .*@"):
        tarry.call(fn, on=OSError)
    with pytest.raises(tarry.ConfigurationTypeError, match=r"items is a(n async)? generator .*@"):
        asyncio.run(tarry.acall(fn, on=OSError))
