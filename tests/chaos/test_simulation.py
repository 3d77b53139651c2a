from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tarry.service.delivery import dns
from tarry.service.engine import attempts
from tarry.service.engine.attempt_slots import Admission, AttemptSlots
from tarry.service.engine.context import StoreClock
from tarry.service.engine.lanes import Lanes
from tarry.service.engine.leased_tasks import LeasedTasks
from tarry.service.engine.result_writer import ResultWriter
from tarry.service.model import Status
from tarry.service.store import FinishStatus
from tests.chaos import environment, simulation
from tests.chaos.invariants import InvariantViolation
from tests.chaos.simulation import simulate
from tests.service.engine.harness import new_breaker
from tests.service.stores.reference_store import ReferenceStore
from tests.service.stores.reference_store.state import Queue, ReferenceState

SEED_COUNT, SEEDS_PER_TEST = 60, 30
"""`make chaos` simulates 20,000 seeds, these among them."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first_seed", range(0, SEED_COUNT, SEEDS_PER_TEST))
def test_invariants_hold_with_random_faults(first_seed: int) -> None:
    """All invariants hold for each seed; the error has the command that repeats a failed run."""
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        try:
            simulate(seed)
        except Exception as error:
            error.add_note(
                f"seed {seed} failed; repeat it with: python -m tests.chaos.simulation {seed}"
            )
            raise


def test_same_seed_has_the_same_history() -> None:
    """Two runs of one seed have the same history."""
    assert simulate(3).environment.invariants.history == simulate(3).environment.invariants.history


def _record_success_for_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the worker record every final result as a success."""
    final_result = attempts.final_result
    monkeypatch.setattr(
        attempts,
        "final_result",
        lambda task, attempt, *_: final_result(task, attempt, Status.SUCCEEDED),
    )


def _start_attempts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock of the worker 500 ms ahead of the store's clock."""
    unrounded_ms = StoreClock.unrounded_ms
    monkeypatch.setattr(StoreClock, "unrounded_ms", lambda self: unrounded_ms(self) + 500)


def _lose_added_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the store lose all tasks of a batch except the first."""
    add = ReferenceStore.add

    async def add_and_lose(self: Any, tasks: Any, lease: Any = None, **options: Any) -> Any:
        added = await add(self, tasks, lease, **options)
        for result in added[1:]:
            self.state.rows[self.state.ids[result.task.id]].task.status = Status.PENDING
            self.state.rows.pop(self.state.ids.pop(result.task.id))
        return added

    monkeypatch.setattr(ReferenceStore, "add", add_and_lose)


def _requeue_finished_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the worker start another attempt of each task that it has finished."""
    process = ResultWriter._on_results_written

    def process_and_requeue(self: Any, leased_tasks: Any, statuses: Any) -> None:
        tasks = [each.task for each in leased_tasks]
        process(self, leased_tasks, statuses)
        for task, status in zip(tasks, statuses, strict=True):
            if status is FinishStatus.APPLIED:
                self._leased_tasks.add([task])

    monkeypatch.setattr(ResultWriter, "_on_results_written", process_and_requeue)


def _keep_unknown_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the store keep leases whose reply was lost until they expire."""

    async def release_nothing(*_: object) -> int:
        return 0

    monkeypatch.setattr(ReferenceStore, "release_unknown_leases", release_nothing)


def _apply_results_of_lost_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the store apply a result although another process has leased the task meanwhile."""

    def find_row(self: Any, task: Any) -> Any:
        row = self.rows.get(self.ids.get(task.id, 0))
        return row if row is not None and row.task.status is Status.IN_FLIGHT else None

    monkeypatch.setattr(ReferenceState, "leased_row", find_row)


def _start_attempts_with_expired_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the worker start leased tasks after a suspension, although their leases have expired."""
    add = LeasedTasks.add

    def add_without_ends(self: Any, tasks: Any, contents: Any = None) -> None:
        for task in tasks:
            task.wake_at = 2**62
        add(self, tasks, contents)

    monkeypatch.setattr(LeasedTasks, "add", add_without_ends)


def _claim_all_tasks_of_half_open_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the store lease more tasks of a half-open lane than its probes."""
    monkeypatch.setattr(Queue, "free_slots", lambda _self, limit: limit)


def _park_lanes_in_which_half_of_the_attempts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a breaker that opens although some attempts of the lane succeed."""
    monkeypatch.setattr(simulation, "Breaker", lambda **_: new_breaker(min_calls=3))


def _admit_every_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow one tenant to hold all slots for attempts."""
    monkeypatch.setattr(environment, "NEIGHBOURS_SHARE", 1.0)
    monkeypatch.setattr(AttemptSlots, "check", lambda _self, _lane: Admission.ADMITTED)


def _lease_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow one tenant to hold all leases of a process."""
    monkeypatch.setattr(environment, "NEIGHBOURS_SHARE", 1.0)
    monkeypatch.setattr(Lanes, "lease_allowance", lambda _self, _tenant, free_leases: free_leases)
    monkeypatch.setattr(Lanes, "is_at_lease_limit", lambda _self, _tenant, _free_leases: False)
    monkeypatch.setattr(Lanes, "select_surplus", lambda *_: [])
    monkeypatch.setattr(Lanes, "_lease_limit", lambda self, _lane: self._max_lane_leased)


def _start_every_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow one tenant to hold all slots for DNS lookups."""
    monkeypatch.setattr(environment, "NEIGHBOURS_SHARE", 1.0)
    monkeypatch.setattr(dns, "_FREE_SLOTS_PER_OCCUPIED_SLOT", 0)


@pytest.mark.parametrize(
    "break_service",
    [
        _record_success_for_failures,
        _start_attempts_early,
        _lose_added_tasks,
        _requeue_finished_tasks,
        _keep_unknown_leases,
        _apply_results_of_lost_leases,
        _start_attempts_with_expired_leases,
        _claim_all_tasks_of_half_open_lanes,
        _park_lanes_in_which_half_of_the_attempts_fail,
        _admit_every_attempt,
        _lease_every_task,
        _start_every_lookup,
    ],
)
def test_invariant_checks_detect_a_broken_service(
    break_service: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each defect of the service is detected within 100 runs."""
    break_service(monkeypatch)
    with pytest.raises((InvariantViolation, KeyError)):
        for seed in range(100):
            simulate(seed)
