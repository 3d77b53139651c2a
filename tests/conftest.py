"""Hypothesis profiles, coroutine functions, garbage collection, and SIGINT in started processes.

By default, hypothesis tries the same examples on every run. `pytest --hypothesis-profile=thorough`
tries more examples, with new randomness.
"""

import asyncio
import gc
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.async_tests import run_async_test

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
    """Run a test that is a coroutine function on a new event loop."""
    return run_async_test(pyfuncitem, lambda main: asyncio.run(main()))
