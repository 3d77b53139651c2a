"""The candidates: a hand-written loop, peer libraries, and tarry.

All candidates have the same configuration: four attempts, a delay of 0.1 s that doubles up to 30 s,
jitter, retries on ``OSError`` only, and the original error after the last attempt. Other options
have each library's defaults. Two peers differ slightly: stamina adds its jitter to the delay, and
hyx counts retries instead of attempts and raises its own error after the last attempt. A library is
imported when its candidate is built, so that a missing library only affects its own row.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

Work = Callable[[], Any]
"""A sync or async function without arguments."""


def wrap_in_loop(fn: Work) -> Work:
    """Return a function that calls ``fn`` in a retry loop as a careful engineer would write it."""

    def loop() -> Any:
        for attempt in range(1, 5):
            try:
                return fn()
            except OSError:
                if attempt == 4:
                    raise
                time.sleep(random.random() * min(30.0, 0.1 * 2 ** (attempt - 1)))
        raise AssertionError

    async def async_loop() -> Any:
        for attempt in range(1, 5):
            try:
                return await fn()
            except OSError:
                if attempt == 4:
                    raise
                await asyncio.sleep(random.random() * min(30.0, 0.1 * 2 ** (attempt - 1)))
        raise AssertionError

    return async_loop if asyncio.iscoroutinefunction(fn) else loop


def import_lazily(module: str, decorator: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a factory of a decorator; the factory imports the library when it is called."""
    return lambda: decorator(import_module(module))


def build_tarry(*guards: str) -> Callable[[], Any]:
    """Return a factory of tarry's decorator, with a downstream that has the named guards, if any.

    The guards are ``budget`` and ``breaker``.
    """

    def build() -> Any:
        t = import_module("tarry")
        if not guards:
            return t.retry(on=OSError, attempts=4)
        # In two cases every second attempt fails, which would open a breaker with defaults.
        factories = {"budget": t.TokenBudget, "breaker": lambda: t.Breaker(failure_rate=1.0)}
        downstream = t.Downstream("bench", **{guard: factories[guard]() for guard in guards})
        return t.retry(on=OSError, attempts=4, downstream=downstream)

    return build


ASYNC_ONLY = frozenset({"hyx"})
CANDIDATES: dict[str, Callable[[], Any]] = {
    "loop": lambda: wrap_in_loop,
    "tenacity": import_lazily(
        "tenacity",
        lambda t: t.retry(
            stop=t.stop_after_attempt(4),
            wait=t.wait_random_exponential(multiplier=0.1, max=30),
            retry=t.retry_if_exception_type(OSError),
            reraise=True,
        ),
    ),
    "stamina": import_lazily(
        "stamina",
        lambda s: s.retry(on=OSError, attempts=4, timeout=None, wait_initial=0.1, wait_max=30.0),
    ),
    "backoff": import_lazily(
        "backoff",
        lambda b: b.on_exception(b.expo, OSError, max_tries=4, factor=0.1, max_value=30),
    ),
    "opnieuw": import_lazily(  # configured with the sum of the waits: 0.1 + 0.2 + 0.4 s
        "opnieuw",
        lambda o: o.retry(
            retry_on_exceptions=OSError,
            max_calls_total=4,
            retry_window_after_first_call_in_seconds=0.7,
        ),
    ),
    "hyx": import_lazily(
        "hyx.retry",
        lambda h: h.retry(
            on=OSError,
            attempts=3,
            backoff=h.backoffs.expo(
                min_delay_secs=0.1,
                max_delay_secs=30,
                jitter=import_module("hyx.retry.jitters").full,
            ),
        ),
    ),
    "nopanic": import_lazily("nopanic", lambda n: n.retry(attempts=4, on=OSError)),
    "nopanic budget+breaker": import_lazily(  # the budget allows one retry per call
        "nopanic",
        lambda n: n.compose(
            n.circuit_breaker(),
            n.retry(attempts=4, on=OSError, budget=n.RetryBudget(ratio=1.0)),
        ),
    ),
    "tarry": build_tarry(),
    "tarry budget": build_tarry("budget"),
    "tarry breaker": build_tarry("breaker"),
    "tarry budget+breaker": build_tarry("budget", "breaker"),
}
"""The factory of each candidate's decorator, by the name of the table row."""
