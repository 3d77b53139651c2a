"""Retry at one layer: errors caused by an error that an inner loop gave up on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

import tarry
from tarry.testing import VirtualClock

BELOW, ABOVE = 2, 3


class Other(Exception):
    """The error that a middle layer raises."""


class Leaf:
    """A retried function that always fails."""

    def __init__(self) -> None:
        self.calls = 0
        self.load: Callable[[], None] = tarry.retry(on=OSError, attempts=BELOW)(self._load)
        self.aload = tarry.retry(on=OSError, attempts=BELOW)(self._aload)

    def _load(self) -> None:
        self.calls += 1
        raise OSError

    async def _aload(self) -> None:
        self._load()


def through_context(leaf: Leaf) -> None:
    """Raise another error while the first is handled."""
    try:
        leaf.load()
    except OSError:
        raise Other  # noqa: B904 - the very subject


def through_finally(leaf: Leaf) -> None:
    """Raise another error while cleaning up."""
    try:
        leaf.load()
    finally:
        raise Other


def through_cause(leaf: Leaf) -> None:
    """Raise another error from the first."""
    try:
        leaf.load()
    except OSError as error:
        raise Other from error


def from_none(leaf: Leaf) -> None:
    """Raise another error with `from None`."""
    try:
        leaf.load()
    except OSError:
        raise Other from None


def afterwards(leaf: Leaf) -> None:
    """Raise another error after the first was handled."""
    with suppress(OSError):
        leaf.load()
    raise Other


@pytest.mark.parametrize(
    ("between", "calls"),
    [
        (through_context, BELOW),
        (through_finally, BELOW),
        (through_cause, BELOW),
        (from_none, BELOW * ABOVE),
        (afterwards, BELOW * ABOVE),
    ],
)
def test_one_layer(clock: VirtualClock, between: Callable[[Leaf], None], calls: int) -> None:
    """An error caused by a retried one is not retried, unless it was raised `from None`."""
    leaf = Leaf()

    with pytest.raises(Other):
        tarry.call(between, leaf, on=Other, attempts=ABOVE)

    assert calls == leaf.calls


def only(error: Exception) -> bool:
    """Retry groups."""
    return isinstance(error, ExceptionGroup)


@pytest.mark.parametrize("on", [ExceptionGroup, Exception, only, (LookupError, ExceptionGroup)])
def test_one_layer_through_a_task_group(clock: VirtualClock, on: tarry.runtime.config.On) -> None:
    """An exception group is not retried if an inner loop retried one of its members."""
    leaf = Leaf()

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(leaf.aload())

    with pytest.raises(ExceptionGroup):
        clock.run(lambda: tarry.acall(work, on=on, attempts=ABOVE))

    assert BELOW == leaf.calls


def test_group_without_retried_members(clock: VirtualClock) -> None:
    """An exception group is retried if no inner loop retried a member."""
    leaf = Leaf()

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(leaf._aload())

    with pytest.raises(ExceptionGroup):
        clock.run(lambda: tarry.acall(work, on=ExceptionGroup, attempts=ABOVE))

    assert ABOVE == leaf.calls


@pytest.mark.parametrize(("again", "calls"), [(False, 1), (True, ABOVE)])
def test_unsafe_operation(clock: VirtualClock, again: bool, calls: int) -> None:
    """An outer loop does not repeat an unsafe operation, except with `ignore_retried_below`."""
    made: list[int] = []

    @tarry.retry(on=lambda _: tarry.Outcome(tarry.Kind.TRANSIENT, repeatable=False))
    def charge() -> None:
        made.append(1)
        raise OSError

    policy = tarry.Policy(max_attempts=ABOVE, ignore_retried_below=again)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the only one there is
        tarry.call(charge, on=OSError, policy=policy, name="order")

    below = "the operation is not repeatable"
    above = "a layer below has already retried this error"
    ends = sorted(note.rpartition(": ")[2] for note in caught.value.__notes__)
    assert calls == len(made)
    assert sorted([below, "no attempts left" if again else above]) == ends
