"""Functions of the wrong kind are refused where they are given, by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest

import tarry


async def is_fine(value: object) -> bool:
    """Answer later."""
    return True


class Judge:
    """An object whose call is a coroutine."""

    async def __call__(self, value: object) -> bool:
        """Answer later."""
        return True


LATER = [
    pytest.param(is_fine, "is_fine", id="function"),
    pytest.param(partial(is_fine), "is_fine", id="partial"),
    pytest.param(Judge(), "Judge", id="object"),
    pytest.param(Judge().__call__, "Judge.__call__", id="method"),
]
FORMS: dict[str, Callable[..., object]] = {
    "retry": tarry.retry,
    "call": lambda **options: tarry.call(lambda: None, **options),
    "acall": lambda **options: tarry.acall(is_fine, 1, **options).send(None),
}


@pytest.mark.parametrize("form", [*FORMS, "attempts"])
@pytest.mark.parametrize(("predicate", "name"), LATER)
def test_on_is_no_coroutine_function(predicate: Any, name: str, form: str) -> None:
    """A coroutine function as `on` would be a yes to everything, so it is refused by its name."""
    make = (FORMS | {"attempts": tarry.attempts})[form]

    with pytest.raises(tarry.ConfigurationTypeError, match=f"^on must .* {name}$"):
        make(on=predicate)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("predicate", "name"), LATER)
def test_until_is_no_coroutine_function(predicate: Any, name: str, form: str) -> None:
    """A coroutine function as `until` would accept everything, so it is refused by its name."""
    with pytest.raises(tarry.ConfigurationTypeError, match=f"^until must .* {name}$"):
        FORMS[form](on=OSError, until=predicate)


def test_on_of_a_hedged_call_is_no_coroutine_function() -> None:
    """Hedged calls refuse a coroutine function as `on` too."""
    later: Any = is_fine
    with pytest.raises(tarry.ConfigurationTypeError, match=r"^on must .* is_fine$"):
        tarry.hedge_sync(lambda: None, after=1, on=later)


def items() -> Iterator[int]:
    """Give items."""
    yield 1


async def async_items() -> AsyncIterator[int]:
    """Give items."""
    yield 1


@pytest.mark.parametrize("fn", [items, async_items, partial(items)])
def test_call_refuses_generator_functions(fn: Any) -> None:
    """Both `call` and `acall` name a generator function and say what to do with it."""
    with pytest.raises(tarry.ConfigurationTypeError, match=r"items is a(n async)? generator .*@"):
        tarry.call(fn, on=OSError)
    with pytest.raises(tarry.ConfigurationTypeError, match=r"items is a(n async)? generator .*@"):
        asyncio.run(tarry.acall(fn, on=OSError))
