"""Support for tests that are coroutine functions."""

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest


def run_async_test(
    item: pytest.Function, run: Callable[[Callable[[], Coroutine[Any, Any, None]]], object]
) -> bool | None:
    """Pass a test that is a coroutine function, with its arguments, to `run`.

    Return None for other tests, as `pytest_pyfunc_call` has to.
    """
    if not inspect.iscoroutinefunction(item.obj):
        return None
    arguments = {name: item.funcargs[name] for name in inspect.signature(item.obj).parameters}
    run(lambda: item.obj(**arguments))
    return True
