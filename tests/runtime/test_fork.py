"""A forked child gets new locks and thread slots, because it has no threads of its parent."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import tarry
from tarry import Downstream
from tarry.adapters.http import send
from tarry.runtime.events import bus
from tarry.runtime.hedge import _downstreams_lock
from tests.runtime.test_parallel import MAX_THREADS, BlockedCalls

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

HANG_TIMEOUT_S = 5


@contextmanager
def locked_by_another_thread(lock: Any) -> Iterator[None]:
    """Hold a lock in another thread during the block."""
    acquired, release = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with lock:
            acquired.set()
            release.wait(30)

    thread = threading.Thread(target=hold_lock)
    thread.start()
    acquired.wait(30)
    try:
        yield
    finally:
        release.set()
        thread.join(30)


def run_in_child(check: Callable[[], bool]) -> str:
    """Run a check in a forked child; return "true", "false", "error" or "hang"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a program with threads
        child = os.fork()
    if not child:
        code = 2
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(HANG_TIMEOUT_S)
            code = 0 if check() else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "true", 1: "false", 2: "error", -signal.SIGALRM: "hang"}.get(code, str(code))


@pytest.mark.parametrize("options", [{"max_in_flight": 1}, {"breaker": tarry.Breaker()}, {}])
def test_lock_held_by_another_thread(options: dict[str, Any]) -> None:
    """A child can use a downstream whose lock was held during the fork."""
    downstream = Downstream("payments", **options)

    @tarry.retry(on=OSError, downstream=downstream)
    def load() -> str:
        return "loaded"

    with locked_by_another_thread(downstream._lock):
        assert "true" == run_in_child(lambda: load() == "loaded" and downstream.balance is None)


def test_hedged_call_in_a_child() -> None:
    """A child can hedge although the lock of the hedged functions was held during the fork."""

    def read() -> str:
        return "read"

    with locked_by_another_thread(_downstreams_lock.value):
        assert "true" == run_in_child(lambda: tarry.hedge_sync(read, after=3) == "read")


def test_new_origin_in_a_child() -> None:
    """A child can add an origin although the lock of the origins was held during the fork."""
    cache: send.LRUCache[str, str] = send.LRUCache()

    with locked_by_another_thread(send._caches_lock.value):
        assert "true" == run_in_child(lambda: cache.add("http://a", "value") == "value")


def test_listening_in_a_child() -> None:
    """A child can add a listener although the lock of the event bus was held during the fork."""
    with locked_by_another_thread(bus.lock.value):
        assert "true" == run_in_child(lambda: callable(tarry.listen(lambda event: None)))


def test_thread_slots_in_a_child() -> None:
    """A child has all thread slots although its parent has used them up."""
    blocked = BlockedCalls()
    try:
        for _ in range(MAX_THREADS):
            with pytest.raises(tarry.AttemptTimeout):
                tarry.call(blocked.block, on=OSError, timeout=1e-4, attempts=1)
        with pytest.raises(tarry.LimitReached):
            tarry.call(blocked.block, on=OSError, timeout=1e-4, attempts=1)

        result = run_in_child(lambda: tarry.call(lambda: True, on=OSError, timeout=3))
    finally:
        blocked.finish()

    assert "true" == result
