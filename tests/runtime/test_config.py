"""Coroutine and generator functions are rejected where a plain function is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest

import tarry
from tarry.testing import VirtualClock


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
PLAIN_CALLS: dict[str, Callable[..., object]] = {
    "retry": lambda **options: tarry.retry(**options)(lambda: None),
    "generator": lambda **options: tarry.retry(**options)(items),
    "call": lambda **options: tarry.call(lambda: None, **options),
    "attempts": lambda **options: iter(tarry.attempts(**options)),
}


@pytest.mark.parametrize("plain_call", PLAIN_CALLS)
@pytest.mark.parametrize(("predicate", "name"), COROUTINE_FUNCTIONS)
def test_coroutine_function_as_on_of_a_plain_call_is_rejected(
    predicate: Any, name: str, plain_call: str
) -> None:
    """A coroutine function as `on` is rejected where nothing can await it."""
    rule = f"on is the coroutine function {name}, which only an async call can await"
    with pytest.raises(tarry.ConfigurationTypeError, match=rule):
        PLAIN_CALLS[plain_call](on=predicate)


@pytest.mark.parametrize("plain_call", ["retry", "call"])
@pytest.mark.parametrize(("predicate", "name"), COROUTINE_FUNCTIONS)
def test_coroutine_function_as_until_of_a_plain_call_is_rejected(
    predicate: Any, name: str, plain_call: str
) -> None:
    rule = f"until is the coroutine function {name}, which only an async call can await"
    with pytest.raises(tarry.ConfigurationTypeError, match=rule):
        PLAIN_CALLS[plain_call](on=OSError, until=predicate)


@pytest.mark.parametrize("argument", ["on", "until", "fallback", "on_retry"])
def test_async_generator_function_as_an_argument_is_rejected(argument: str) -> None:
    options: dict[str, Any] = {"on": OSError, argument: async_items}
    with pytest.raises(tarry.ConfigurationTypeError, match=f"^{argument} must .* async_items$"):
        tarry.retry(**options)


def test_async_generator_function_as_fallback_of_a_hedged_call_is_rejected(
    clock: VirtualClock,
) -> None:
    fallback: Any = async_items

    async def main() -> None:
        await tarry.hedge(async_predicate, OSError(), after=1, fallback=fallback)

    with pytest.raises(tarry.ConfigurationTypeError, match=r"^fallback must .* async_items$"):
        clock.run(main)


def test_coroutine_function_as_on_of_a_hedged_call_is_rejected() -> None:
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
