"""Retry at one layer: errors caused by an error that an inner loop gave up on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

import tarry
from tarry.testing import VirtualClock

INNER_ATTEMPTS, OUTER_ATTEMPTS = 2, 3


class TranslatedError(Exception):
    """The error that the code between both retry loops raises."""


class FailingLoader:
    """A function with retries that always fails."""

    def __init__(self) -> None:
        self.calls = 0
        self.load: Callable[[], None] = tarry.retry(on=OSError, attempts=INNER_ATTEMPTS)(self._load)
        self.aload = tarry.retry(on=OSError, attempts=INNER_ATTEMPTS)(self._aload)

    def _load(self) -> None:
        self.calls += 1
        raise OSError

    async def _aload(self) -> None:
        self._load()


def raise_in_except(loader: FailingLoader) -> None:
    """Raise another error in the `except` block of the first."""
    try:
        loader.load()
    except OSError:
        raise TranslatedError  # noqa: B904 - tested here


def raise_in_finally(loader: FailingLoader) -> None:
    """Raise another error in a `finally` block."""
    try:
        loader.load()
    finally:
        raise TranslatedError


def raise_from_error(loader: FailingLoader) -> None:
    """Raise another error from the first."""
    try:
        loader.load()
    except OSError as error:
        raise TranslatedError from error


def raise_from_none(loader: FailingLoader) -> None:
    """Raise another error with `from None`."""
    try:
        loader.load()
    except OSError:
        raise TranslatedError from None


def raise_after_handling(loader: FailingLoader) -> None:
    """Raise another error after the first was handled."""
    with suppress(OSError):
        loader.load()
    raise TranslatedError


@pytest.mark.parametrize(
    ("translate", "calls"),
    [
        (raise_in_except, INNER_ATTEMPTS),
        (raise_in_finally, INNER_ATTEMPTS),
        (raise_from_error, INNER_ATTEMPTS),
        (raise_from_none, INNER_ATTEMPTS * OUTER_ATTEMPTS),
        (raise_after_handling, INNER_ATTEMPTS * OUTER_ATTEMPTS),
    ],
)
def test_error_caused_by_a_retried_error_is_not_retried(
    clock: VirtualClock, translate: Callable[[FailingLoader], None], calls: int
) -> None:
    loader = FailingLoader()

    with pytest.raises(TranslatedError):
        tarry.call(translate, loader, on=TranslatedError, attempts=OUTER_ATTEMPTS)

    assert calls == loader.calls


def is_group(error: Exception) -> bool:
    """Return whether the error is an exception group."""
    return isinstance(error, ExceptionGroup)


@pytest.mark.parametrize("on", [ExceptionGroup, Exception, is_group, (LookupError, ExceptionGroup)])
def test_group_with_a_retried_member(clock: VirtualClock, on: tarry.On) -> None:
    """An exception group is not retried if an inner loop retried one of its members."""
    loader = FailingLoader()

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(loader.aload())

    with pytest.raises(ExceptionGroup):
        clock.run(lambda: tarry.acall(work, on=on, attempts=OUTER_ATTEMPTS))

    assert INNER_ATTEMPTS == loader.calls


def test_group_without_retried_members(clock: VirtualClock) -> None:
    """An exception group is retried if no inner loop retried a member."""
    loader = FailingLoader()

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(loader._aload())

    with pytest.raises(ExceptionGroup):
        clock.run(lambda: tarry.acall(work, on=ExceptionGroup, attempts=OUTER_ATTEMPTS))

    assert OUTER_ATTEMPTS == loader.calls


@pytest.mark.parametrize(("ignore_retried_below", "calls"), [(False, 1), (True, OUTER_ATTEMPTS)])
def test_unsafe_operation(clock: VirtualClock, ignore_retried_below: bool, calls: int) -> None:
    """An outer loop does not repeat an unsafe operation, except with `ignore_retried_below`."""
    charges: list[int] = []

    @tarry.retry(on=lambda _: tarry.Outcome(tarry.Kind.TRANSIENT, repeatable=False))
    def charge() -> None:
        charges.append(1)
        raise OSError

    policy = tarry.Policy(max_attempts=OUTER_ATTEMPTS, ignore_retried_below=ignore_retried_below)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - it has no message
        tarry.call(charge, on=OSError, policy=policy, name="order")

    inner_reason = "the operation is not repeatable"
    outer_reason = "a layer below has already retried this error"
    reasons = sorted(note.rpartition(": ")[2] for note in caught.value.__notes__)
    assert calls == len(charges)
    assert (
        sorted([inner_reason, "no attempts left" if ignore_retried_below else outer_reason])
        == reasons
    )
