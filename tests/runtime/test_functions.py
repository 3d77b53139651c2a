"""The default names of operations: the function with its module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import tarry
from tarry.runtime.functions import operation_of
from tarry.testing import VirtualClock, captured_events


class Service:
    """A callable object with a method."""

    def __call__(self) -> None:
        """Do nothing."""

    def load(self) -> None:
        """Do nothing."""


def load() -> None:
    """Do nothing."""


async def load_async() -> None:
    """Do nothing."""


NAME = f"{__name__}.load"


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (load, NAME),
        (partial(load), NAME),
        (Service().load, f"{__name__}.Service.load"),
        (Service(), f"{__name__}.Service"),
        (Service, f"{__name__}.Service"),
        (len, "builtins.len"),
        ("abc".find, "str.find"),
    ],
    ids=["function", "partial", "method", "object", "class", "builtin", "method without a module"],
)
def test_operation_has_the_names_of_function_and_module(fn: Callable[..., Any], name: str) -> None:
    assert name == operation_of(fn)


def test_operation_of_a_script_has_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of a script is left out, because it is always `__main__`."""
    monkeypatch.setattr(load, "__module__", "__main__")

    assert "load" == operation_of(load)


def test_events_have_the_module(clock: VirtualClock) -> None:
    """The events of decorated functions, single calls and hedged calls have the module."""
    with captured_events() as events:
        tarry.retry(on=OSError)(load)()
        tarry.call(load, on=OSError)
        clock.run(lambda: tarry.acall(load_async, on=OSError))
        clock.run(lambda: tarry.hedge(load_async, after=1))

    successes = [event.operation for event in events if isinstance(event, tarry.Succeeded)]
    assert [NAME, NAME, f"{NAME}_async", f"{NAME}_async"] == successes
