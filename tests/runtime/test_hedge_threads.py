"""Hedged calls of plain functions without a free thread for another copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import tarry
from tarry import Downstream
from tests.runtime.test_parallel import MAX_THREADS, BlockedCalls


@pytest.fixture
def one_free_slot() -> Iterator[None]:
    """Use up all thread slots but one."""
    blocked = BlockedCalls()
    try:
        for _ in range(MAX_THREADS - 1):
            with pytest.raises(tarry.AttemptTimeout):
                tarry.call(blocked.block, on=OSError, timeout=1e-4, attempts=1)
        yield
    finally:
        blocked.finish()


@pytest.mark.usefixtures("one_free_slot")
def test_no_slot_for_another_copy() -> None:
    """A hedged call continues with its running copy when all thread slots are used."""
    downstream = Downstream("replicas", max_in_flight=2)
    calls = []

    def read() -> str:
        calls.append(1)
        threading.Event().wait(0.03)
        return "first"

    assert "first" == tarry.hedge_sync(read, after=0.005, downstream=downstream)
    assert [1] == calls
    iterators = [iter(tarry.attempts(on=OSError, downstream=downstream)) for _ in range(2)]
    assert [1, 1] == [next(iterator).number for iterator in iterators]


def test_no_thread_for_another_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy whose thread cannot be started costs nothing and does not fail the call."""
    budget = tarry.TokenBudget()
    downstream = Downstream("replicas", budget=budget)
    start = threading.Thread.start
    started = []

    def fail_second_start(thread: threading.Thread) -> None:
        if thread.name == "tarry-attempt":
            started.append(1)
            if len(started) > 1:
                msg = "can't start new thread"
                raise RuntimeError(msg)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_second_start)
    before = downstream.balance

    def read() -> str:
        threading.Event().wait(0.03)
        return "first"

    assert "first" == tarry.hedge_sync(read, after=0.005, downstream=downstream)
    assert (2, before) == (len(started), downstream.balance)


def test_error_of_the_first_copy_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first copy failed and no thread can be started for the next, its error is raised."""
    start = threading.Thread.start
    started = []

    def fail_second_start(thread: threading.Thread) -> None:
        if thread.name == "tarry-attempt":
            started.append(1)
            if len(started) > 1:
                msg = "can't start new thread"
                raise RuntimeError(msg)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_second_start)

    def read() -> str:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        tarry.hedge_sync(read, after=5, on=ConnectionError)
