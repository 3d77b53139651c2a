"""Attempts in threads: their number, results and context."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

import tarry
from tarry.runtime.parallel import ThreadCopies
from tarry.testing import no_wait

MOST = 256
"""The number of attempts in threads at a time that the error tells."""


class Stuck:
    """Calls that block until `finish`."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.threads: list[threading.Thread] = []

    def hang(self) -> None:
        """Block until `finish`."""
        self.threads.append(threading.current_thread())
        self.release.wait()

    def finish(self) -> None:
        """Release every call and wait for its thread."""
        self.release.set()
        for thread in self.threads:
            thread.join(30)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    """Calls that block until the end of the test."""
    stuck = Stuck()
    yield stuck
    stuck.finish()


def test_number_of_threads_is_limited(stuck: Stuck) -> None:
    """The number of threads for blocked calls is limited."""
    with no_wait():
        for _ in range(MOST // 4):
            with pytest.raises(tarry.AttemptTimeout):
                tarry.call(stuck.hang, on=ConnectionError, timeout=1e-4, attempts=4)
        assert MOST == len(stuck.threads)

        with pytest.raises(tarry.LimitReached, match=f"{MOST} attempts run in threads already"):
            tarry.call(stuck.hang, on=ConnectionError, timeout=1e-4)
        assert MOST == len(stuck.threads)

    stuck.finish()
    assert "free" == tarry.call(lambda: "free", on=ConnectionError, timeout=30)


def test_threads_do_not_keep_the_process_alive(stuck: Stuck) -> None:
    """The thread of a timed-out attempt is a daemon, so that the program can exit."""
    with pytest.raises(tarry.AttemptTimeout):
        tarry.call(stuck.hang, on=ConnectionError, timeout=1e-3, attempts=1)

    assert stuck.threads[0].daemon


def test_late_result_does_not_reach_the_next_attempt(stuck: Stuck) -> None:
    """The late result of a timed-out attempt does not reach the next attempt."""
    calls = []

    def work() -> int:
        calls.append(1)
        number = len(calls)
        if number == 1:
            stuck.hang()
        else:
            stuck.release.set()
            stuck.threads[0].join(30)
        return number

    with no_wait():
        assert 2 == tarry.call(work, on=ConnectionError, timeout=0.05)


def test_late_result_is_discarded(stuck: Stuck) -> None:
    """A result that arrives after `close` is passed to `discard`."""
    discarded: list[int] = []

    def work(number: int) -> int:
        stuck.hang()
        return number

    threads = ThreadCopies(work, discarded.append)
    threads.start(7)
    threads.close()
    assert [] == discarded

    stuck.finish()
    assert [7] == discarded


@pytest.mark.parametrize("fails", [False, True], ids=["result", "error"])
def test_unread_result_is_discarded(stuck: Stuck, fails: bool) -> None:
    """A result that arrived before `close` is discarded at once; an error is not."""
    discarded: list[int] = []
    begun = threading.Event()

    def work(number: int) -> int:
        stuck.threads.append(threading.current_thread())
        begun.set()
        if fails:
            raise ValueError
        return number

    threads = ThreadCopies(work, discarded.append)
    threads.start(7)
    assert begun.wait(30)
    stuck.finish()
    assert [] == discarded

    threads.close()
    assert ([] if fails else [7]) == discarded


place: ContextVar[str] = ContextVar("place", default="nowhere")


def test_context_reaches_the_thread() -> None:
    """An attempt in a thread sees the context variables of the caller."""
    token = place.set("here")
    try:
        assert "here" == tarry.call(place.get, on=ConnectionError, timeout=30)
    finally:
        place.reset(token)


def test_context_of_the_thread_stays_there() -> None:
    """Context variables that an attempt in a thread sets do not reach the caller."""
    tarry.call(lambda: place.set("there"), on=ConnectionError, timeout=30)

    assert "nowhere" == place.get()


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
