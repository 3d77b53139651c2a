"""What every store must do: leases that run out, and whose holder is late."""

from __future__ import annotations

from msgspec.structs import replace

from tarry.service.model import LOST, AttemptRecord, Status
from tarry.service.store import CancelStatus, FinishStatus, Release, SeriesPoint
from tests.service.stores.bench import (
    HOUR,
    LEASE,
    NOON,
    OTHER,
    Bench,
    conforms,
    succeed,
    wait,
)


@conforms
async def an_abandoned_task_is_claimed_again(bench: Bench) -> None:
    """When a lease ends the attempt is logged as lost, counts, and the task has a new holder."""
    old = await bench.leased(1, next_attempt_at=NOON + 500)
    bench.clock.now = old.wake_at

    claimed = await bench.claim(OTHER)

    [new] = claimed.tasks
    assert (1, 0) == (claimed.lost, (await bench.claim()).lost)
    expected = replace(
        old,
        attempts=1,
        lost=1,
        worker="other",
        version=old.version + 1,
        next_attempt_at=old.wake_at,
        wake_at=old.wake_at + OTHER.length,
    )
    assert expected == new == await bench.get(1)
    lost = AttemptRecord(
        number=1,
        scheduled_at=NOON + 500,
        started_at=NOON + 500,
        outcome=LOST,
        worker="worker",
    )
    assert [lost] == await bench.store.list_attempts("acme", old.id)
    assert {Status.IN_FLIGHT: 1} == await bench.counts()
    assert 1 == (await bench.lane()).in_flight


@conforms
async def the_horizon_is_not_for_leases(bench: Bench) -> None:
    """A lease that ends within the horizon is still held."""
    old = await bench.leased(1)
    bench.clock.now = old.wake_at - 1

    assert [] == (await bench.claim(OTHER)).tasks
    assert [] == await bench.store.list_attempts("acme", old.id)


@conforms
async def who_lost_a_lease_is_superseded(bench: Bench) -> None:
    """Once another holds the task, the first can neither finish nor release it; the other can."""
    old = await bench.leased(1)
    bench.clock.now = old.wake_at
    [new] = (await bench.claim(OTHER)).tasks

    assert [FinishStatus.SUPERSEDED] == await bench.store.finish([succeed(old)])
    await bench.store.release([Release(old)])

    assert new == await bench.get(1)
    assert 1 == len(await bench.store.list_attempts("acme", old.id))
    assert 1 == (await bench.store.counters()).superseded
    assert [FinishStatus.DONE] == await bench.store.finish([succeed(new)])
    assert [1, 2] == [row.number for row in await bench.store.list_attempts("acme", old.id)]


@conforms
async def a_task_may_be_abandoned_again_and_again(bench: Bench) -> None:
    """Each lost attempt has its row, numbered on, and a store that crashes loses none."""
    held = await bench.leased(1)
    for _ in range(3):
        bench.clock.advance(LEASE.length)
        await bench.reopen()
        [held] = (await bench.claim()).tasks

    assert 3 == held.attempts
    rows = await bench.store.list_attempts("acme", held.id)
    assert [(1, LOST), (2, LOST), (3, LOST)] == [(row.number, row.outcome) for row in rows]
    assert {"lost": 3} == _outcomes(await bench.store.series(None, since=0))


def _outcomes(points: list[SeriesPoint]) -> dict[str, int]:
    total: dict[str, int] = {}
    for point in points:
        for outcome, count in point.outcomes.items():
            total[outcome] = total.get(outcome, 0) + count
    return total


@conforms
async def an_abandoned_task_that_was_cancelled_ends(bench: Bench) -> None:
    """Nobody gets it: the lost attempt is logged, and the task is CANCELLED."""
    old = await bench.leased(1)
    assert CancelStatus.REQUESTED is await bench.store.cancel("acme", old.id)
    bench.clock.now = old.wake_at

    claimed = await bench.claim(OTHER)

    assert [] == claimed.tasks
    ended = await bench.get(1)
    assert (Status.CANCELLED, 1, old.wake_at) == (ended.status, ended.attempts, ended.finished_at)
    assert [LOST] == [row.outcome for row in await bench.store.list_attempts("acme", old.id)]
    assert {Status.CANCELLED: 1} == await bench.counts()
    assert [FinishStatus.SUPERSEDED] == await bench.store.finish([succeed(old)])


@conforms
async def what_the_next_decision_needs_outlives_a_lost_attempt(bench: Bench) -> None:
    """A lost attempt leaves previous delay and class as the last outcome set them."""
    held = await bench.leased(1)
    result = wait(held, NOON + 10, previous_delay=0.1 + 0.2, restarted=2)
    await bench.store.finish([result])
    await bench.claim()
    bench.clock.advance(HOUR)

    [new] = (await bench.claim(OTHER)).tasks

    assert (2, 0.1 + 0.2, 2) == (new.attempts, new.previous_delay, new.restarted)
    assert ("transient", 1) == (new.last_kind, new.lost)


@conforms
async def an_abandoned_task_is_late_since_its_lease_ended(bench: Bench) -> None:
    """However late it is claimed, the next attempt was due when the lease ran out."""
    old = await bench.leased(1)
    bench.clock.advance(HOUR)

    [new] = (await bench.claim(OTHER)).tasks

    assert (old.wake_at, NOON + HOUR + OTHER.length) == (new.next_attempt_at, new.wake_at)
    assert NOON == new.started_at
