"""Attempts in threads: their number, results and context."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from contextvars import ContextVar, copy_context

import pytest

import tarry
from tarry.runtime.parallel import ThreadCopies, _thread_slots
from tarry.testing import no_wait

MAX_THREADS = 256
"""The limit of concurrent attempts in threads that the error message names."""


class BlockedCalls:
    """Calls that block until `finish`."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.threads: list[threading.Thread] = []

    def block(self) -> None:
        """Block until `finish`."""
        self.threads.append(threading.current_thread())
        self.release.wait()

    def finish(self) -> None:
        """Release every call and wait for its thread."""
        self.release.set()
        for thread in self.threads:
            thread.join(30)


@pytest.fixture
def blocked() -> Iterator[BlockedCalls]:
    """Calls that block until the end of the test."""
    blocked = BlockedCalls()
    yield blocked
    blocked.finish()


def test_number_of_attempt_threads_is_limited(blocked: BlockedCalls) -> None:
    """A call that needs a thread is rejected when all thread slots are used."""
    with no_wait():
        for _ in range(MAX_THREADS // 4):
            with pytest.raises(tarry.AttemptTimeout):
                tarry.call(blocked.block, on=ConnectionError, timeout=1e-4, attempts=4)
        assert MAX_THREADS == len(blocked.threads)

        with pytest.raises(
            tarry.LimitReached, match=f"{MAX_THREADS} attempts run in threads already"
        ):
            tarry.call(blocked.block, on=ConnectionError, timeout=1e-4)
        assert MAX_THREADS == len(blocked.threads)

    blocked.finish()
    assert "free" == tarry.call(lambda: "free", on=ConnectionError, timeout=30)


def test_shortest_timeout_ends() -> None:
    """A timeout that ends before the wait for a thread begins is a timeout, too."""
    threads: ThreadCopies[None] = ThreadCopies(lambda _number: None)
    for _ in range(20_000):  # SimpleQueue.get of CPython 3.11 did not return in one of 4,000 calls
        assert threads.next_finished(2e-6) is None


def test_threads_do_not_keep_the_process_alive(blocked: BlockedCalls) -> None:
    """The thread of a timed-out attempt is a daemon, so that the program can exit."""
    with pytest.raises(tarry.AttemptTimeout):
        tarry.call(blocked.block, on=ConnectionError, timeout=1e-3, attempts=1)

    assert blocked.threads[0].daemon


def test_predicate_decides_about_a_timeout(blocked: BlockedCalls) -> None:
    """An attempt in a thread that timed out is not retried if the predicate `on` returns False."""
    with pytest.raises(tarry.AttemptTimeout):
        tarry.call(blocked.block, on=lambda _: False, timeout=1e-3)

    assert 1 == len(blocked.threads)


def test_timeout_that_a_predicate_rejects_opens_the_breaker(blocked: BlockedCalls) -> None:
    """An attempt in a thread that timed out counts for the breaker, whatever `on` returns."""
    downstream = tarry.Downstream("d", breaker=tarry.Breaker(timeouts=1))

    with pytest.raises(tarry.AttemptTimeout):
        tarry.call(blocked.block, on=lambda _: False, timeout=1e-3, downstream=downstream)

    assert tarry.BreakerState.OPEN is downstream.state


def test_late_result_does_not_reach_the_next_attempt(blocked: BlockedCalls) -> None:
    calls = []

    def work() -> int:
        calls.append(1)
        number = len(calls)
        if number == 1:
            blocked.block()
        else:
            blocked.release.set()
            blocked.threads[0].join(30)
        return number

    with no_wait():
        assert 2 == tarry.call(work, on=ConnectionError, timeout=0.5)


def test_late_result_is_discarded(blocked: BlockedCalls) -> None:
    """A result that arrives after `close` is passed to `discard`."""
    discarded: list[int] = []

    def work(number: int) -> int:
        blocked.block()
        return number

    copies = ThreadCopies(work, discarded.append)
    copies.start(7)
    copies.close()
    assert [] == discarded

    blocked.finish()
    assert [7] == discarded


@pytest.mark.parametrize("fails", [False, True], ids=["result", "error"])
def test_unread_result_is_discarded(blocked: BlockedCalls, fails: bool) -> None:
    """A result that arrived before `close` is discarded at once; an error is not."""
    discarded: list[int] = []
    begun = threading.Event()

    def work(number: int) -> int:
        blocked.threads.append(threading.current_thread())
        begun.set()
        if fails:
            raise ValueError
        return number

    copies = ThreadCopies(work, discarded.append)
    copies.start(7)
    assert begun.wait(30)
    blocked.finish()
    assert [] == discarded

    copies.close()
    assert ([] if fails else [7]) == discarded


variable: ContextVar[str] = ContextVar("variable", default="default")


def test_context_reaches_the_thread() -> None:
    """An attempt in a thread sees the context variables of the caller."""
    token = variable.set("caller")
    try:
        assert "caller" == tarry.call(variable.get, on=ConnectionError, timeout=30)
    finally:
        variable.reset(token)


def test_error_keeps_the_frames_of_the_thread() -> None:
    """The traceback of an error from a thread shows where it was raised."""

    def deep_inside() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - it has no message
        tarry.call(deep_inside, on=ConnectionError, timeout=30)

    assert "deep_inside" == caught.traceback[-1].name


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_base_exception_reaches_the_caller(kind: type[BaseException]) -> None:
    """A BaseException in the thread is raised in the caller and not retried."""
    calls = []

    def work() -> None:
        calls.append(1)
        raise kind

    with pytest.raises(kind):
        tarry.call(work, on=Exception, timeout=30)

    assert [1] == calls


# --- state that belongs to the caller's thread ----------------------------------------------------

user: ContextVar[str] = ContextVar("user")


@pytest.mark.parametrize("fails", [False, True])
def test_caller_sees_context_variables_that_an_attempt_sets(fails: bool) -> None:
    """A context variable that a function with a timeout sets keeps its value in the caller."""

    @tarry.retry(on=ConnectionError, timeout=60, attempts=1)
    def log_in() -> None:
        user.set("ada")
        if fails:
            raise ConnectionError

    def main() -> str:
        with suppress(ConnectionError):
            log_in()
        assert None is tarry.remaining()
        return user.get()

    assert "ada" == copy_context().run(main)


def test_next_attempt_sees_context_variables_of_the_last() -> None:
    """A context variable that an attempt with a timeout sets is visible in the next attempt."""
    attempts: ContextVar[int] = ContextVar("attempts", default=0)

    @tarry.retry(on=ConnectionError, timeout=60, attempts=3)
    def load() -> int:
        attempts.set(attempts.get() + 1)
        if attempts.get() < 3:
            raise ConnectionError
        return attempts.get()

    with no_wait():
        assert 3 == copy_context().run(load)


def test_sqlite_connection_of_the_caller_is_rejected() -> None:
    """A function with a timeout that uses an SQLite connection of the caller gets advice."""
    calls = []
    with closing(sqlite3.connect(":memory:")) as connection:

        @tarry.retry(on=Exception, timeout=60)
        def count_rows() -> None:
            calls.append(1)
            connection.execute("SELECT 1")

        with pytest.raises(tarry.ConfigurationError, match=r"another thread.*deadline=") as caught:
            count_rows()

    assert [1] == calls
    assert isinstance(caught.value.__cause__, sqlite3.ProgrammingError)


def test_deadline_alone_needs_no_thread() -> None:
    """A function with a deadline and no timeout runs in the caller's thread."""
    threads = []

    @tarry.retry(on=ConnectionError, deadline=60)
    def load() -> None:
        threads.append(threading.current_thread())

    load()
    assert [threading.current_thread()] == threads


def test_interrupt_while_a_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot of a thread is released once, although the start of the thread was interrupted."""
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    errors: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_value))
    slots, done = _thread_slots.value, threading.Event()
    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    before = len(slots._taken)
    with pytest.raises(KeyboardInterrupt):
        tarry.call(done.wait, on=OSError, timeout=30)
    monkeypatch.undo()

    assert before + 1 == len(slots._taken)
    done.set()
    for thread in threading.enumerate():
        if thread.name == "tarry-attempt":
            thread.join(30)
    assert (before, []) == (len(slots._taken), errors)


def test_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot of a thread that was not started is free."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    slots = _thread_slots.value
    before = len(slots._taken)
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError):
        tarry.call(bool, on=OSError, timeout=30)
    assert before == len(slots._taken)
