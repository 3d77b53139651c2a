"""Hypothesis profiles, coroutine functions, garbage collection, and SIGINT in started processes.

By default, hypothesis tries the same examples on every run. `pytest --hypothesis-profile=thorough`
tries more examples, with new randomness.
"""

import asyncio
import gc
import inspect
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile(
    "thorough",
    derandomize=False,
    deadline=None,
    max_examples=5_000,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("ci")

# A shell starts background jobs with SIGINT ignored, and their child processes inherit this. Tests
# send SIGINT to the services and commands that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests, which live until the end, from garbage collection.

    With thousands of collected tests, one `gc.collect()` takes 0.2 s, and many tests call it.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function, with the fixture `run_async` where there is one.

    By default it runs on a new event loop.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    run: Any = pyfuncitem.funcargs.get("run_async", lambda main: asyncio.run(main()))
    run(lambda: pyfuncitem.obj(**arguments))
    return True
