"""The lanes in this process: the state of each downstream, and the due tasks of each lane.

The store decides for all workers whether a lane is parked or paused. The state here only decides
whether this process starts attempts of the lane.
"""

from __future__ import annotations

from collections import deque
from heapq import nlargest
from typing import TYPE_CHECKING

from msgspec import Struct

from tarry.core.breaker import Breaker, BreakerState
from tarry.core.budget import RatioBudget
from tarry.core.downstream import Downstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.model import Task, TaskContent

_MAX_LANES = 10_000
"""Above this number, lanes without tasks are evicted at once, not only when they have been idle."""
_FIRST_ATTEMPTS_PER_RETRY = 2
"""First attempts between two retries of a lane. A larger share of retries would make a healthy lane
look broken if a few of its tasks always fail: a breaker opens at one failure in two."""
_MIN_BUDGET_PAUSE_MS, _MAX_BUDGET_PAUSE_MS = 1_000, 60_000
_BUDGET_SPACING_MS = 50
"""Milliseconds between two retries that the empty budget deferred: 20 a second, twice as many as
the budget's floor admits, so that few of them are deferred again."""
_LIMIT_REFRESH_MS = 50
"""Milliseconds for which an in-flight limit that was reached is assumed to be unchanged."""


class LaneState:
    """One downstream, and the tasks of its lane that are leased to this process."""

    __slots__ = (
        "_budget_retry_at",
        "_first_attempts_in_a_row",
        "_limit_seen_at",
        "downstream",
        "due_first_attempts",
        "due_retries",
        "is_in_rotation",
        "is_paused",
        "leased",
        "limit",
        "name",
        "running",
        "tenant",
        "was_used",
    )

    def __init__(self, name: str, downstream: Downstream) -> None:
        self.name: str = name
        self.tenant: str = name.partition("/")[0]
        self.downstream: Downstream = downstream
        self.due_retries: deque[LeasedTask] = deque()
        """Due tasks that were attempted before. A retry has a promised time, a first attempt has
        none, so retries do not queue behind first attempts: every third attempt is a retry."""
        self.due_first_attempts: deque[LeasedTask] = deque()
        """Due tasks that were not attempted yet, in the order in which they became due."""
        self.leased: int = 0
        """Tasks of the lane that are leased to this process."""
        self.running: int = 0
        """Attempts in flight."""
        self.is_in_rotation: bool = False
        """Whether the lane is in `LeasedTasks.rotation`."""
        self.is_paused: bool = False
        """Whether an operator paused the lane through this process."""
        self.was_used: bool = True
        """Whether the lane had a task since the last call of `Lanes.forget_idle`."""
        self.limit: int | None = None
        """Attempts in flight when the in-flight limit last refused another one; None: unknown."""
        self._limit_seen_at = 0
        self._first_attempts_in_a_row = 0
        self._budget_retry_at = 0

    def pop_due(self) -> LeasedTask | None:
        """Remove and return a due task: every third one is a retry while there are both."""
        if self.due_first_attempts and (
            not self.due_retries or self._first_attempts_in_a_row < _FIRST_ATTEMPTS_PER_RETRY
        ):
            self._first_attempts_in_a_row += 1
            return self.due_first_attempts.popleft()
        self._first_attempts_in_a_row = 0
        return self.due_retries.popleft() if self.due_retries else None

    def due_queue(self, task: Task) -> deque[LeasedTask]:
        """Return the queue in which a due task waits; a replayed task counts as not attempted."""
        is_retry = task.attempts > task.forgiven + task.lost
        return self.due_retries if is_retry else self.due_first_attempts

    def defer_retry(self, now: int) -> int:
        """Return when to repeat a retry that was deferred because the budget is empty."""
        retry_at = max(now + _MIN_BUDGET_PAUSE_MS, self._budget_retry_at + _BUDGET_SPACING_MS)
        self._budget_retry_at = min(retry_at, now + _MAX_BUDGET_PAUSE_MS)
        return self._budget_retry_at

    @property
    def breaker(self) -> Breaker:
        """The breaker of the downstream."""
        breaker = self.downstream.breaker
        assert breaker is not None  # noqa: S101 - `build_downstream` creates one
        return breaker

    @property
    def is_empty(self) -> bool:
        """Whether no task is leased and no attempt runs; an attempt may outlive its lease."""
        return not self.leased and not self.running

    @property
    def is_full(self) -> bool:
        """Whether as many attempts run as the in-flight limit last admitted."""
        return self.limit is not None and self.running >= self.limit

    def on_limit_reached(self, now: int) -> None:
        """Remember that the in-flight limit refused an attempt, so that no other task tries it."""
        self.limit, self._limit_seen_at = max(1, self.running), now

    def on_attempt_ended(self, now: int) -> None:
        """Forget the remembered limit if it is old, because the limit grows after an outage."""
        if now >= self._limit_seen_at + _LIMIT_REFRESH_MS:
            self.limit = None

    @property
    def is_tripped(self) -> bool:
        """Whether the breaker is open or half-open."""
        state = self.breaker.state
        return state is BreakerState.OPEN or state is BreakerState.HALF_OPEN


class LeasedTask(Struct, eq=False):
    """One task leased to this process."""

    task: Task
    lane: LaneState
    content: TaskContent | None
    """The unpacked content of the task; None until the first attempt needs it."""
    is_busy: bool = False
    """Whether an attempt runs, or a result or a cancellation is being written."""
    is_queued: bool = False
    """Whether it is in the heap of `LeasedTasks` or in a queue of its lane."""
    is_dropped: bool = False
    """Whether the lease is gone: a queue that still holds the task skips it."""


class Lanes:
    """Lanes by name, created when they are first needed; idle lanes are forgotten."""

    def __init__(self, build_downstream: Callable[[str], Downstream], *, max_leased: int) -> None:
        self._build_downstream = build_downstream
        self._max_leased = max_leased
        self._lanes: dict[str, LaneState] = {}
        self.parked: set[str] = set()
        """Names of lanes that this process has parked in the store."""
        self.full: set[str] = set()
        """Names of lanes of which this process has leased the maximum number of tasks."""

    def __getitem__(self, name: str) -> LaneState:
        """Return a lane, creating it if necessary."""
        lane = self._lanes.get(name)
        if lane is None:
            if len(self._lanes) >= _MAX_LANES:
                self._evict_empty()
            lane = self._lanes[name] = LaneState(name, self._build_downstream(name))
        return lane

    def get(self, name: str) -> LaneState | None:
        """Return a lane, or None if this process has no such lane."""
        return self._lanes.get(name)

    def most_notable(self, limit: int, tenant: str | None = None) -> list[LaneState]:
        """Return lanes of one tenant or of all: tripped ones first, then the busiest."""
        lanes = (lane for lane in self._lanes.values() if tenant in {None, lane.tenant})
        return nlargest(limit, lanes, key=lambda lane: (lane.is_tripped, lane.leased))

    def count_leased(self, lane: LaneState) -> None:
        """Count a task that is leased from now on."""
        lane.leased += 1
        lane.was_used = True
        if lane.leased >= self._max_leased:
            self.full.add(lane.name)

    def count_dropped(self, lane: LaneState) -> None:
        """Count a task that is no longer leased."""
        lane.leased -= 1
        if self.full and lane.leased < self._max_leased:
            self.full.discard(lane.name)

    def reset_downstream(self, lane: LaneState) -> None:
        """Replace the downstream of a lane by a new one."""
        lane.downstream = self._build_downstream(lane.name)

    def forget_idle(self) -> int:
        """Forget healthy lanes that were not used since the last call; return how many.

        Their time windows of outcomes are empty by then, so that no statistics are lost.
        """
        idle = [
            lane for lane in self._lanes.values() if not lane.was_used and self._is_disposable(lane)
        ]
        for lane in self._lanes.values():
            lane.was_used = not lane.is_empty
        self._remove(idle)
        return len(idle)

    def _evict_empty(self) -> None:
        """Forget half of the empty lanes, oldest first; tripped lanes only if there are no others.

        A parked lane is not lost: the store reports it when tasks of the lane are claimed.
        """
        empty = [lane for lane in self._lanes.values() if lane.is_empty]
        candidates = [lane for lane in empty if self._is_disposable(lane)] or empty
        self._remove(candidates[: len(candidates) // 2 + 1])

    def _is_disposable(self, lane: LaneState) -> bool:
        """Return whether a lane is empty, and only latency statistics would be lost with it."""
        is_healthy = lane.breaker.state is BreakerState.CLOSED
        is_held_back = lane.is_paused or lane.name in self.parked
        return lane.is_empty and is_healthy and not is_held_back

    def _remove(self, lanes: list[LaneState]) -> None:
        for lane in lanes:
            del self._lanes[lane.name]
            self.parked.discard(lane.name)


def build_downstream(
    name: str,
    *,
    max_in_flight: int,
    breaker: Callable[[], Breaker] = Breaker,
) -> Downstream:
    """Build the downstream of a lane: breaker, retry budget, and an in-flight limit.

    The budget always admits ten retries a second, because a lane that has only retries left must
    still make progress.
    """
    return Downstream(
        name,
        breaker=breaker(),
        budget=RatioBudget(0.3, min_per_second=10.0),
        max_in_flight=max_in_flight,
    )
