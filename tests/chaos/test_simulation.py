from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tarry.service.engine import attempts
from tarry.service.engine.clock import StoreClock
from tarry.service.engine.result_writer import ResultWriter
from tarry.service.model import Status
from tarry.service.store import FinishStatus
from tests.chaos.oracle import Broken
from tests.chaos.simulation import simulate
from tests.service.stores.model_store import ModelStore

SEEDS, CHUNK = 2_000, 100


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_invariants_hold_whatever_goes_wrong(first: int) -> None:
    """A failing seed is named by the error, and can be repeated."""
    for seed in range(first, first + CHUNK):
        try:
            simulate(seed)
        except Exception as error:
            error.add_note(f"seed {seed}: python -m tests.chaos.simulation {seed}")
            raise


def test_same_seed_is_the_same_run() -> None:
    """Two runs of one seed tell the same story, to the last line."""
    assert simulate(3).world.oracle.history == simulate(3).world.oracle.history


def _forgets_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that says a task has succeeded, whatever came back."""
    monkeypatch.setattr(
        attempts,
        "exhausted_result",
        lambda task, attempt, _reason: attempts.success_result(task, attempt),
    )


def _starts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose clock is ahead of the store's."""
    now_ms = StoreClock.now_ms
    monkeypatch.setattr(StoreClock, "now_ms", lambda self: now_ms(self) + 500)


def _loses_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that answers before it has written."""
    add = ModelStore.add

    async def forgetful(self: Any, tasks: Any, lease: Any = None, **options: Any) -> Any:
        added = await add(self, tasks, lease, **options)
        for one in added[1:]:
            self.state.rows[self.state.ids[one.task.id]].task.status = Status.PENDING
            self.state.rows.pop(self.state.ids.pop(one.task.id))
        return added

    monkeypatch.setattr(ModelStore, "add", forgetful)


def _ignores_a_lost_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that goes on with a task that somebody else has taken over."""
    write = ResultWriter._write_results

    async def stubborn(self: Any, items: Any) -> Any:
        answers = await write(self, items)
        for (result, _, _), answer in zip(items, answers, strict=True):
            if answer is FinishStatus.DONE:
                self._leased_tasks.add([result.task])
        return answers

    monkeypatch.setattr(ResultWriter, "_write_results", stubborn)


@pytest.mark.parametrize(
    "sabotage", [_forgets_answers, _starts_early, _loses_tasks, _ignores_a_lost_lease]
)
def test_the_oracle_sees_what_is_broken(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sabotage of the service is found within a few runs."""
    sabotage(monkeypatch)
    with pytest.raises((Broken, KeyError)):
        for seed in range(40):
            simulate(seed)
