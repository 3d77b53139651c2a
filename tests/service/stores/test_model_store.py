"""The store in memory: the conformance cases, and that its heaps and lines stay small."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tarry.runtime.clocks import system
from tarry.service.store import Retention, Store, TaskFilter
from tests.service.stores.bench import DAY, LANE, LEASE, MINUTE, NOON, Clock, succeed, task, wait
from tests.service.stores.conformance import CASES, Bench, Case, name_of
from tests.service.stores.model_store import Data, ModelStore
from tests.service.stores.model_store.rows import Queue


def bench() -> Bench:
    """A bench whose stores share one `Data`."""
    data = Data()
    return Bench(lambda clock: ModelStore(clock, data))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_conformance(case: Case) -> None:
    """The store does what every store must do."""
    asyncio.run(bench().run(case))


def test_time_is_the_wall_clock_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a clock of its own the store has milliseconds since 1970."""
    monkeypatch.setattr(system, "unix_time", lambda: 5.25)

    assert 5250 == asyncio.run(ModelStore().ping())


def test_nothing_in_it_waits() -> None:
    """Each call ends at its first step, so that a simulation stays deterministic."""
    store: Store = ModelStore(Clock())
    calls: list[Coroutine[Any, Any, object]] = [
        store.open(),
        store.add([]),
        store.claim(LEASE, limit=1, per_lane=1),
        store.finish([]),
        store.list_tasks("acme", TaskFilter()),
        store.close(),
    ]
    for call in calls:
        with pytest.raises(StopIteration):
            call.send(None)


def test_notes_do_not_pile_up() -> None:
    """A task that is leased, kept and made to wait for ever costs no more memory than one."""

    async def main(bench: Bench) -> None:
        held = await bench.leased(1)
        for _ in range(2000):
            await bench.store.finish([wait(held, bench.clock.now, keep=LEASE)])
            held = await bench.get(1)
            await bench.store.finish([wait(held, bench.clock.now + DAY)])
            await bench.store.retry_now("acme", held.id)
            [held] = (await bench.claim()).tasks
        await bench.store.finish([succeed(held)])

        assert isinstance(bench.store, ModelStore)
        data = bench.store.data
        queue = data.queues[LANE]
        assert max(len(notes._heap) for notes in (queue.waiting, queue.leases)) < 100
        assert max(len(alarms._heap) for alarms in (data.soon, data.late)) < 100

    asyncio.run(bench().run(main))


def test_what_was_removed_leaves_nothing() -> None:
    """Tasks that come and go leave no list behind them that grows, nor an endless series."""

    async def main(bench: Bench) -> None:
        for number in range(500):
            held = await bench.leased(number)
            await bench.store.finish([wait(held, bench.clock.now, keep=LEASE)])
            await bench.store.cancel("acme", held.id)
            await bench.store.release([])
            await bench.store.finish([succeed(await bench.get(number))])
            bench.clock.advance(5 * MINUTE)
            await bench.store.sweep(Retention(MINUTE, MINUTE), 10)

        assert isinstance(bench.store, ModelStore)
        data = bench.store.data
        tenant = data.tenants["acme"]
        assert (0, 0, 0) == (len(data.rows), len(data.ids), len(data.ended[False]))
        assert len(tenant.numbers) < 3
        assert len(tenant.series) <= DAY // MINUTE // 5 + 1

    asyncio.run(bench().run(main))


def test_a_claim_looks_only_at_lanes_with_something_to_give() -> None:
    """Lanes that are parked, paused or due later are not even looked at."""

    async def main(bench: Bench) -> None:
        for number in range(300):
            given = task(number, f"h{number}", next_attempt_at=NOON + (number % 3 == 0) * DAY)
            await bench.add(given)
            if number % 3 == 1:
                await bench.store.park(given.lane, NOON + DAY, probes=1, opened=1)
            elif number % 3 == 2:
                await bench.store.pause(given.lane)
        await bench.add(task(999))
        assert isinstance(bench.store, ModelStore)
        looked: list[str] = []
        data = bench.store.data
        call = data.call

        def spy() -> Queue | None:
            queue = call()
            looked.extend([queue.lane.name] if queue else [])
            return queue

        data.call = spy  # type: ignore[method-assign]
        await bench.claim()
        assert [LANE] == looked

    asyncio.run(bench().run(main))
