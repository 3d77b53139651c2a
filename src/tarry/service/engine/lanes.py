"""The lanes as this process sees them: what is known of each downstream, and what waits for it.

A lane is taken out of the store's hands by parking it there; here it only stops being served.
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

_MOST = 10_000
"""Lanes beyond which those that hold no task are forgotten at once."""
_NEW_ONES = 2
"""New tasks between two that are tried again. More of the latter, and a few that always fail would
make the whole look broken: a breaker opens at one of two."""
_SOONEST, _LATEST = 1_000, 60_000
_BETWEEN = 50
"""Milliseconds until a retry that the budget refuses is asked for again, and from one to the next:
twice as many as the budget's floor lets through, so that the rest do not come in vain."""
_ASK_AGAIN = 50
"""Milliseconds for which a limit is believed to be what it was."""


class LaneState:
    """What is known of one downstream, and the tasks of it that this process holds."""

    __slots__ = (
        "_asked_at",
        "_new_ones",
        "_refused_until",
        "again",
        "downstream",
        "due",
        "held",
        "in_turn",
        "limit",
        "name",
        "paused",
        "running",
        "tenant",
        "used",
    )

    def __init__(self, name: str, downstream: Downstream) -> None:
        self.name: str = name
        self.tenant: str = name.partition("/")[0]
        self.downstream: Downstream = downstream
        self.again: deque[LeasedTask] = deque()
        """Tasks that have begun and whose time has come again. They were promised a time, and
        new ones were not, so they need not queue behind these: every third place is theirs."""
        self.due: deque[LeasedTask] = deque()
        """New tasks whose time has come, in that order."""
        self.held: int = 0
        """Tasks of the lane that are leased to this process."""
        self.running: int = 0
        """Attempts that run."""
        self.in_turn: bool = False
        """Whether it stands in the worker's queue of lanes."""
        self.paused: bool = False
        """Whether somebody has stopped it, as far as this process was asked to."""
        self.used: bool = True
        """Whether it has had a task since somebody last looked for idle lanes."""
        self.limit: int | None = None
        """How many attempts its limit let through when it was last asked, if it refused one."""
        self._asked_at = 0
        self._new_ones = 0
        self._refused_until = 0

    def next_due(self) -> LeasedTask | None:
        """Take a task whose time has come: of three one that has begun, while there are both."""
        if self.due and (not self.again or self._new_ones < _NEW_ONES):
            self._new_ones += 1
            return self.due.popleft()
        self._new_ones = 0
        return self.again.popleft() if self.again else None

    def queue_of(self, task: Task) -> deque[LeasedTask]:
        """Return where a task waits for its turn. One that was replayed begins anew."""
        return self.again if task.attempts > task.forgiven + task.lost else self.due

    def put_off(self, now: int) -> int:
        """Return when to ask again for a retry that the budget has refused."""
        soonest = max(now + _SOONEST, self._refused_until + _BETWEEN)
        self._refused_until = min(soonest, now + _LATEST)
        return self._refused_until

    @property
    def breaker(self) -> Breaker:
        """The breaker, which every lane has."""
        breaker = self.downstream.breaker
        assert breaker is not None  # noqa: S101 - `protected` made it
        return breaker

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is here: no task, and no attempt that outlived its lease."""
        return not self.held and not self.running

    @property
    def is_full(self) -> bool:
        """Whether as many attempts run as its limit let through."""
        return self.limit is not None and self.running >= self.limit

    def refused(self, now: int) -> None:
        """Learn that its limit lets no more through: it need not be asked for each task."""
        self.limit, self._asked_at = max(1, self.running), now

    def ended(self, now: int) -> None:
        """Learn that an attempt has ended. A limit that ramps is asked again after a while."""
        if now >= self._asked_at + _ASK_AGAIN:
            self.limit = None

    @property
    def is_shut(self) -> bool:
        """Whether no task should be sent its way."""
        state = self.breaker.state
        return state is BreakerState.OPEN or state is BreakerState.HALF_OPEN


class LeasedTask(Struct, eq=False):
    """One leased task."""

    task: Task
    lane: LaneState
    content: TaskContent | None
    """What to send, once it was unpacked."""
    started: bool = False
    """Whether somebody has it in hand: its attempt runs, or its end is being written down."""
    queued: bool = False
    """Whether it waits for its time or its turn."""
    gone: bool = False
    """Whether it is not to be started any more: it waits in a queue that will skip it."""


class Lanes:
    """The lanes by name, made when they are first needed; idle ones are forgotten in time."""

    def __init__(self, build_downstream: Callable[[str], Downstream], *, most_held: int) -> None:
        self._protected = build_downstream
        self._most_held = most_held
        self._lanes: dict[str, LaneState] = {}
        self.parked: set[str] = set()
        """The lanes that the store knows to be parked, as far as this process has parked them."""
        self.full: set[str] = set()
        """The lanes of which this process holds as many tasks as it should."""

    def __getitem__(self, name: str) -> LaneState:
        """Return a lane."""
        lane = self._lanes.get(name)
        if lane is None:
            if len(self._lanes) >= _MOST:
                self._make_room()
            lane = self._lanes[name] = LaneState(name, self._protected(name))
        return lane

    def get(self, name: str) -> LaneState | None:
        """Return a lane that is known, or None."""
        return self._lanes.get(name)

    def first(self, most: int, tenant: str | None = None) -> list[LaneState]:
        """Return the lanes, of one tenant or all, that need a look first: the shut, the busiest."""
        lanes = (lane for lane in self._lanes.values() if tenant in {None, lane.tenant})
        return nlargest(most, lanes, key=lambda lane: (lane.is_shut, lane.held))

    def took(self, lane: LaneState) -> None:
        """Count a task that is held from now on."""
        lane.held += 1
        lane.used = True
        if lane.held >= self._most_held:
            self.full.add(lane.name)

    def dropped(self, lane: LaneState) -> None:
        """Count a task that is held no longer."""
        lane.held -= 1
        if self.full and lane.held < self._most_held:
            self.full.discard(lane.name)

    def renew(self, lane: LaneState) -> None:
        """Forget everything that was learnt of a downstream."""
        lane.downstream = self._protected(lane.name)

    def forget(self) -> int:
        """Forget lanes that are well and were not used since the last call; return how many.

        By then their windows are empty, and a new lane knows as much.
        """
        idle = [lane for lane in self._lanes.values() if not lane.used and self._is_well(lane)]
        for lane in self._lanes.values():
            lane.used = not lane.is_empty
        self._drop(idle)
        return len(idle)

    def _make_room(self) -> None:
        """Forget half of what is empty, the oldest first, and what is shut only if all is.

        The store knows which lanes are parked, and says so when it hands out their tasks.
        """
        empty = [lane for lane in self._lanes.values() if lane.is_empty]
        chosen = [lane for lane in empty if self._is_well(lane)] or empty
        self._drop(chosen[: len(chosen) // 2 + 1])

    def _is_well(self, lane: LaneState) -> bool:
        """Say whether nothing would be lost with an empty lane but a few latencies."""
        is_closed = lane.breaker.state is BreakerState.CLOSED
        is_open = is_closed and not lane.paused and lane.name not in self.parked
        return lane.is_empty and is_open

    def _drop(self, lanes: list[LaneState]) -> None:
        for lane in lanes:
            del self._lanes[lane.name]
            self.parked.discard(lane.name)


def build_downstream(
    name: str,
    *,
    max_in_flight: int,
    breaker: Callable[[], Breaker] = Breaker,
) -> Downstream:
    """Return a lane's downstream: a breaker, a budget of retries, and a limit that ramps.

    The budget has a floor in time: a lane with nothing but retries left must still get on.
    """
    return Downstream(
        name,
        breaker=breaker(),
        budget=RatioBudget(0.3, min_per_second=10.0),
        max_in_flight=max_in_flight,
    )
