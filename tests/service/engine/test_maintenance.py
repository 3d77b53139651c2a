"""Maintenance: replays keep to their rate, and none is forgotten behind the others."""

from __future__ import annotations

import asyncio

import pytest

from tarry.service.delivery import DeliveryResult
from tarry.service.engine.maintenance import replay_step_size
from tarry.service.model import ReplayRecord
from tests.service.engine.harness import EPOCH, OK, EngineHarness, FakeTarget, run
from tests.service.stores.model_store import ModelStore

WRONG = DeliveryResult(status=400, duration_ms=1.0)


async def add_dead_letters(
    harness: EngineHarness, target: FakeTarget, count: int, tenant: str = "default"
) -> None:
    """Add this many dead letters; afterwards the target succeeds."""
    target.responses = [WRONG]
    await harness.add(*(harness.new_task(tenant=tenant) for _ in range(count)))
    await asyncio.sleep(5)
    target.responses = [OK]
    target.times.clear()


@pytest.mark.parametrize(("rate", "count"), [(0.5, 5), (1.5, 12), (30.0, 240), (400.0, 1200)])
def test_replay_keeps_its_rate(rate: float, count: int) -> None:
    """It holds from beginning to end, in small steps, for every rate."""

    async def main() -> None:
        target = FakeTarget()
        harness = EngineHarness(target)
        await harness.engine.start()
        await add_dead_letters(harness, target, count)

        await harness.store.start_replay(ReplayRecord(id="r", tenant="default", rate=rate))
        await asyncio.sleep(count / rate + 5)

        assert count == len(target.times)
        begin = target.times[0]
        portion = replay_step_size(rate)
        for number, time in enumerate(target.times):
            assert number <= (time - begin + 1.1) * rate + portion
        length = target.times[-1] - begin
        assert (count - portion) / rate - 1.1 <= length <= count / rate + 1.1
        await harness.engine.stop(0)

    run(main)


def test_replay_step_is_a_tenth_of_a_second() -> None:
    """It has at least one task, and no more than one transaction should have."""
    assert [1, 1, 2, 100, 200, 200] == [
        replay_step_size(rate) for rate in (0.001, 10.0, 11.0, 1000.0, 5000.0, 0.0)
    ]


def test_hundred_slow_replays_do_not_delay_another() -> None:
    """The replay of one tenant continues, whatever another tenant has started."""

    async def main() -> None:
        target = FakeTarget()
        harness = EngineHarness(target)
        await harness.engine.start()
        await add_dead_letters(harness, target, 250, "evil")
        await add_dead_letters(harness, target, 10, "victim")
        for number in range(110):
            await harness.store.start_replay(
                ReplayRecord(id=f"a{number}", tenant="evil", rate=0.0001)
            )
        await harness.store.start_replay(ReplayRecord(id="v", tenant="victim", rate=2.0))
        for number in range(110):
            await harness.store.start_replay(
                ReplayRecord(id=f"z{number}", tenant="evil", rate=0.0001)
            )
        await asyncio.sleep(10)

        job = await harness.store.get_replay("victim", "v")
        assert job is not None
        assert ("done", 10) == (job.status, job.replayed)
        await harness.engine.stop(0)

    run(main)


class FailingReplayStore(ModelStore):
    """A store that fails for one replay."""

    async def replay_step(self, replay_id: str, limit: int) -> ReplayRecord | None:
        """Fail for this replay, and step all others."""
        if replay_id == "a":
            raise OverflowError
        return await super().replay_step(replay_id, limit)


def test_failing_replay_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged; other replays and the rest of maintenance continue."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        target = FakeTarget()
        harness = EngineHarness(
            target, store=FailingReplayStore(lambda: int((EPOCH + loop.time()) * 1000))
        )
        await harness.engine.start()
        await add_dead_letters(harness, target, 3)
        for replay_id in "ab":
            await harness.store.start_replay(ReplayRecord(id=replay_id, tenant="default"))
        await asyncio.sleep(5)

        job = await harness.store.get_replay("default", "b")
        assert job is not None
        assert ("done", 3) == (job.status, job.replayed)
        await harness.engine.stop(0)

    run(main)
    assert "replay step failed, replay=a" in caplog.text
    assert "maintenance failed" not in caplog.text
