from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tarry.service.engine import attempts
from tarry.service.engine.context import StoreClock
from tarry.service.engine.result_writer import ResultWriter
from tarry.service.model import Status
from tarry.service.store import FinishStatus
from tests.chaos.invariants import InvariantViolation
from tests.chaos.simulation import simulate
from tests.service.stores.model_store import ModelStore

SEEDS, CHUNK = 2_000, 100


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_invariants_hold_with_random_faults(first: int) -> None:
    """The error names the failing seed, so that the run can be repeated."""
    for seed in range(first, first + CHUNK):
        try:
            simulate(seed)
        except Exception as error:
            error.add_note(f"seed {seed}: python -m tests.chaos.simulation {seed}")
            raise


def test_same_seed_is_the_same_run() -> None:
    """Two runs of one seed have the same history."""
    assert simulate(3).environment.invariants.history == simulate(3).environment.invariants.history


def _ignore_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the worker record a success for every exhausted task."""
    final_result = attempts.final_result
    monkeypatch.setattr(
        attempts,
        "final_result",
        lambda task, attempt, *_: final_result(task, attempt, Status.SUCCEEDED),
    )


def _start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock of the worker ahead of the store's."""
    unrounded_ms = StoreClock.unrounded_ms
    monkeypatch.setattr(StoreClock, "unrounded_ms", lambda self: unrounded_ms(self) + 500)


def _lose_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the store reply without having stored all tasks."""
    add = ModelStore.add

    async def add_and_lose(self: Any, tasks: Any, lease: Any = None, **options: Any) -> Any:
        added = await add(self, tasks, lease, **options)
        for one in added[1:]:
            self.state.rows[self.state.ids[one.task.id]].task.status = Status.PENDING
            self.state.rows.pop(self.state.ids.pop(one.task.id))
        return added

    monkeypatch.setattr(ModelStore, "add", add_and_lose)


def _ignore_lost_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the worker continue with tasks that it has finished."""
    write = ResultWriter._write_results

    async def write_and_requeue(self: Any, items: Any) -> Any:
        answers = await write(self, items)
        for (result, _, _), answer in zip(items, answers, strict=True):
            if answer is FinishStatus.APPLIED:
                self._leased_tasks.add([result.task])
        return answers

    monkeypatch.setattr(ResultWriter, "_write_results", write_and_requeue)


@pytest.mark.parametrize(
    "break_service", [_ignore_failures, _start_early, _lose_tasks, _ignore_lost_leases]
)
def test_invariant_checks_detect_a_broken_service(
    break_service: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each defect is detected within a few runs."""
    break_service(monkeypatch)
    with pytest.raises((InvariantViolation, KeyError)):
        for seed in range(40):
            simulate(seed)
