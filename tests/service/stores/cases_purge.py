"""What every store must do: dead letters that are removed."""

from __future__ import annotations

from tarry.service.model import Status
from tarry.service.store import AddStatus, TaskFilter
from tests.service.stores.bench import (
    HOUR,
    NOON,
    Bench,
    conforms,
    numbers,
    succeed,
    task,
    task_id,
)

JOB = "0195d000-0000-7000-9000-000000000001"


@conforms
async def a_purge_removes_dead_letters(bench: Bench) -> None:
    """Up to a limit, oldest first, with their logs, bodies and keys; nothing else goes."""
    for number in range(4):
        await bench.dead(number, body_ref=f"b{number}")
    await bench.add(task(10, next_attempt_at=NOON + HOUR, body_ref="b10"))
    held = await bench.leased(11)
    await bench.store.finish([succeed(held)])

    assert 3 == await bench.store.purge("acme", TaskFilter(), 3)

    assert [11, 10, 3] == numbers((await bench.store.list_tasks("acme", TaskFilter())).items)
    assert [] == await bench.store.list_attempts("acme", task_id(0))
    assert ["b0", "b1", "b2"] == sorted(await bench.store.orphans(10))
    assert {Status.PENDING: 1, Status.SUCCEEDED: 1, Status.EXHAUSTED: 1} == await bench.counts()
    assert 1 == (await bench.lane()).dead
    assert AddStatus.ADDED is (await bench.add(task(0)))[0].status
    assert 1 == await bench.store.purge("acme", TaskFilter(), 3)
    assert 0 == await bench.store.purge("acme", TaskFilter(), 3)


@conforms
async def a_purge_has_filters(bench: Bench) -> None:
    """Lane, policy and reason choose; a query for another status removes nothing."""
    await bench.dead(1, "budget")
    await bench.dead(2, "attempts", policy_id="webhook")
    await bench.dead(3, "attempts", host="b")
    await bench.add(task(4))
    purge = bench.store.purge

    assert 0 == await purge("acme", TaskFilter(status=Status.PENDING), 10)
    assert 0 == await purge("acme", TaskFilter(reason="unknown"), 10)
    assert 1 == await purge("acme", TaskFilter(status=Status.EXHAUSTED, reason="budget"), 10)
    assert 1 == await purge("acme", TaskFilter(policy_id="webhook"), 10)
    assert 1 == await purge("acme", TaskFilter(lane="acme/https:b.example:443"), 10)
    assert {Status.PENDING: 1} == await bench.counts()
