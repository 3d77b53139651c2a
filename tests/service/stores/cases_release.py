"""What every store must do: leases that are handed back."""

from __future__ import annotations

from msgspec.structs import replace

from tarry.service.model import Status
from tarry.service.store import FinishStatus, NewTask, Release
from tests.service.stores.bench import (
    HOUR,
    LEASE,
    NOON,
    OTHER,
    Bench,
    attempt_of,
    conforms,
    numbers,
    succeed,
    task,
    task_id,
    wait,
)


@conforms
async def a_released_task_is_due_when_it_was(bench: Bench) -> None:
    """No attempt is counted, another may claim it at once, and the old holder has lost it."""
    held = await bench.leased(1, next_attempt_at=NOON + 500)

    assert [FinishStatus.DONE] == await bench.store.release([Release(held)])

    freed = await bench.get(1)
    assert (Status.PENDING, None, 0, NOON + 500, NOON + 500) == (
        freed.status,
        freed.worker,
        freed.attempts,
        freed.next_attempt_at,
        freed.wake_at,
    )
    assert [] == await bench.store.list_attempts("acme", held.id)
    assert {Status.PENDING: 1} == await bench.counts()
    assert [1] == numbers((await bench.claim(OTHER)).tasks)
    assert [FinishStatus.SUPERSEDED] == await bench.store.finish([succeed(held)])


@conforms
async def a_task_is_released_for_later_but_not_for_earlier(bench: Bench) -> None:
    """A time puts it off; no attempt comes before the time that it had."""
    await bench.add(task(1, next_attempt_at=NOON + 500), task(2, next_attempt_at=NOON + 500))
    one, two = (await bench.claim()).tasks

    await bench.store.release([Release(one, NOON + HOUR), Release(two, NOON)])

    assert NOON + HOUR == (await bench.get(1)).next_attempt_at == (await bench.get(1)).wake_at
    assert NOON + 500 == (await bench.get(2)).next_attempt_at
    assert [2] == numbers((await bench.claim()).tasks)


@conforms
async def only_a_lease_that_is_held_is_released(bench: Bench) -> None:
    """Twice, unknown, finished, or from before a kept lease: nothing happens."""
    await bench.add(task(1), task(2), task(3))
    one, two, three = (await bench.claim()).tasks
    await bench.store.finish([succeed(one), wait(two, NOON + 500, keep=LEASE)])
    await bench.store.release([Release(three, NOON + HOUR)])
    before = [await bench.get(number) for number in (1, 2, 3)]

    stranger = replace(one, id=task_id(77))
    again = await bench.store.release([Release(one) for one in (one, two, three, stranger)])
    assert [FinishStatus.SUPERSEDED] * 4 == again
    assert [] == await bench.store.release([])

    assert before == [await bench.get(number) for number in (1, 2, 3)]
    assert 0 == (await bench.store.counters()).superseded


@conforms
async def a_released_task_that_was_cancelled_ends(bench: Bench) -> None:
    """No attempt follows a request to cancel, also when none was made."""
    held = await bench.leased(1)
    await bench.store.cancel("acme", held.id)

    assert [FinishStatus.CANCELLED] == await bench.store.release([Release(held)])

    ended = await bench.get(1)
    assert (Status.CANCELLED, 0, NOON) == (ended.status, ended.attempts, ended.finished_at)
    assert {Status.CANCELLED: 1} == await bench.counts()


@conforms
async def a_direct_lease_is_a_lease(bench: Bench) -> None:
    """What was leased when it was added is released, kept, lost and finished like any other."""
    batch = [NewTask(task(number), direct=True) for number in range(1, 5)]
    one, two, three, four = [answer.task for answer in await bench.store.add(batch, LEASE)]
    await bench.store.release([Release(one)])
    await bench.store.finish([wait(two, NOON + 100, keep=LEASE), succeed(three)])
    bench.clock.now = four.wake_at

    tasks = (await bench.claim(OTHER)).tasks

    assert [1, 4] == numbers(tasks)
    assert [0, 1] == [held.attempts for held in tasks]
    assert attempt_of(tasks[1]).number == 2
