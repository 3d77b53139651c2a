"""A forked child gets new locks and thread slots, because it has no threads of its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import tarry
from tarry import Downstream
from tarry.adapters.http import send
from tarry.runtime.events import _log_import_lock, bus
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


class RunningCalls:
    """Calls that run in threads until the `with` block ends."""

    def __init__(self, downstream: Downstream, count: int) -> None:
        self._downstream, self._count = downstream, count
        self._started, self._release = threading.Semaphore(0), threading.Event()
        self._threads: list[threading.Thread] = []

    def _block(self) -> None:
        self._started.release()
        self._release.wait(30)

    def __enter__(self) -> None:
        def call() -> None:
            tarry.call(self._block, on=OSError, downstream=self._downstream)

        for _ in range(self._count):
            self._threads.append(threading.Thread(target=call))
            self._threads[-1].start()
            assert self._started.acquire(timeout=30)

    def __exit__(self, *_: object) -> None:
        self._release.set()
        for thread in self._threads:
            thread.join(30)


@pytest.mark.parametrize(
    "options",
    [
        {"max_in_flight": 2},
        {"limiter": tarry.AIMD(initial=2, min_limit=1, max_limit=2)},
        {"limiter": tarry.AdaptiveLimit(max_in_flight=2)},
    ],
    ids=["max_in_flight", "AIMD", "AdaptiveLimit"],
)
def test_slots_of_the_threads_of_the_parent(options: dict[str, Any]) -> None:
    """A child has all slots of a limiter, and not more, although its parent had used them up."""
    downstream = Downstream("payments", **options)

    def call_nested(depth: int) -> int:
        """Return how many nested calls there are, up to `depth`."""
        if not depth:
            return 0
        try:
            return tarry.call(
                lambda: 1 + call_nested(depth - 1), on=OSError, downstream=downstream, attempts=1
            )
        except tarry.LimitReached:
            return 0

    with RunningCalls(downstream, 2):
        assert 0 == call_nested(1)
        assert "true" == run_in_child(lambda: [2, 2] == [call_nested(3), call_nested(3)])
        assert 0 == call_nested(1)
    assert 2 == call_nested(3)


def test_fork_during_a_call() -> None:
    """A child that is forked inside a call has all slots, also after this call has ended."""
    downstream = Downstream("payments", max_in_flight=1)
    results: list[str] = []

    def fork() -> None:
        def is_free() -> bool:
            return bool(tarry.call(lambda: True, on=OSError, downstream=downstream))

        results.append(run_in_child(is_free))

    tarry.call(fork, on=OSError, downstream=downstream)
    assert ["true"] == results


def test_probes_of_the_parent() -> None:
    """A child sends probes although the probes of its parent run in threads."""
    breaker = tarry.Breaker(consecutive=1, min_span=0, open_for=30, spread=0, probes=1)
    downstream = Downstream("payments", breaker=breaker)

    def fail() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        tarry.call(fail, on=OSError, downstream=downstream, attempts=1)
    breaker._open_until = 0.0  # the next call is a probe

    with RunningCalls(downstream, 1):
        with pytest.raises(tarry.BreakerOpen):
            tarry.call(lambda: True, on=OSError, downstream=downstream)
        assert "true" == run_in_child(
            lambda: tarry.call(lambda: True, on=OSError, downstream=downstream)
        )


_LATE_IMPORTS = """
import os, sys, tarry
import logging  # by the program: only the log listener may be imported by the child
downstream = tarry.Downstream("payments", breaker=tarry.Breaker(consecutive=1, min_span=0))
tarry.call(lambda: 1, on=OSError)
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
modules = set(sys.modules)
def fail(): raise OSError
def read(): return 1
policy = tarry.Policy(initial_delay=0)
for options in ({}, {"timeout": 1}, {"downstream": downstream}, {"downstream": downstream}):
    try:
        tarry.call(fail, on=OSError, attempts=2, policy=policy, **options)
    except (OSError, tarry.BreakerOpen):
        pass
tarry.hedge_sync(read, after=3)
print(sorted(set(sys.modules) - modules - {"tarry.telemetry", "tarry.telemetry.logs"}))
sys.stdout.flush()
os._exit(0)
"""


def test_nothing_is_imported_after_a_fork() -> None:
    """A fork first imports what calls import late: a child cannot wait for an import of a thread.

    The log listener is the exception, which is not imported while a process forks.
    """
    result = subprocess.run(  # noqa: PLW1510 - the test compares the exit code
        [sys.executable, "-c", _LATE_IMPORTS], capture_output=True, text=True, timeout=60
    )
    assert (0, "[]") == (result.returncode, result.stdout.strip()), result.stderr


def test_fork_during_the_import_of_the_log_listener() -> None:
    """A fork waits until a thread has imported the log listener."""
    lock = _log_import_lock.value
    results: list[str] = []
    forking = threading.Thread(target=lambda: results.append(run_in_child(lambda: True)))
    with lock:
        forking.start()
        forking.join(0.1)
        assert [] == results
    forking.join(30)
    assert ["true"] == results
    assert lock is _log_import_lock.value
    assert "true" == run_in_child(lambda: lock is not _log_import_lock.value)
