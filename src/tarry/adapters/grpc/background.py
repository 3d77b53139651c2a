"""The one event loop on which futures of plain channels wait for their next attempts.

However many wait, there is one thread for the waiting, and a few for what may block: interceptors
of others that send an attempt, and callbacks of the user's.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

MOST_THREADS = 32
"""Of those that may block, at a time."""

_lock = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


def loop() -> asyncio.AbstractEventLoop:
    """Return the loop; it is started when it is first needed."""
    with _lock:
        if not _loops:
            made = asyncio.new_event_loop()
            made.set_default_executor(ThreadPoolExecutor(MOST_THREADS, "tarry-future"))
            threading.Thread(target=made.run_forever, name="tarry-futures", daemon=True).start()
            _loops.append(made)
        return _loops[0]


def _after_fork() -> None:
    """Begin anew in a forked child, which has none of its parent's threads."""
    global _lock  # noqa: PLW0603 - whoever held it is not in the child
    _lock = threading.Lock()
    _loops.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
