"""Shares the slots for attempts in flight: between tenants first, then between their lanes.

An attempt holds a slot until it ends: a few milliseconds if the target is healthy, the whole
attempt timeout if the target hangs. Without limits, the attempts of some hanging targets would soon
hold all slots. A lane is *fast* if its attempts usually end within a second, and *slow* otherwise
or until its first attempt ends. Of the slots of a process,

* attempts that started in slow lanes hold at most three fifths,
* a tenant holds at most four times as many as are free,
* a tenant's attempts that started in slow lanes hold at most four times as many as are left for
  such attempts,
* a lane with an attempt in flight holds at most as many as are left for its tenant.

These shares of what is free (dynamic thresholds) let a single tenant use most of the slots, and
still leave slots for other tenants and lanes. Any target may begin to hang, so the shares of fast
lanes are limited in the same way. Their attempts that hang do not count as slow: they may be more
than three fifths, and then no new lane could start its first attempt until they end.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from tarry.service.engine.lanes import FAST_ATTEMPT_MS

if TYPE_CHECKING:
    from tarry.service.engine.lanes import LaneState, TenantState

_TENANT_SLOTS_PER_FREE_SLOT = 4


class Admission(Enum):
    """Whether a lane may start an attempt."""

    ADMITTED = 0
    LANE_HAS_ITS_SHARE = 1
    TENANT_HAS_ITS_SHARE = 2
    NO_SLOT_IS_FREE = 3


@dataclass(slots=True, eq=False)
class Slot:
    """The slot of one attempt in flight."""

    lane: LaneState
    is_slow: bool  # whether the lane was slow when the attempt started
    is_held: bool = True


class AttemptSlots:
    """Counts the attempts in flight of a process, and limits them to `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._max_slow = limit - 2 * (limit // 5)
        self.running_count: int = 0
        self._slow_count = 0
        self._fast_slots: deque[tuple[int, Slot]] = deque()
        """The slots that were acquired as fast, with their start times, oldest first."""

    @property
    def is_full(self) -> bool:
        """Whether no attempt may start."""
        return self.running_count >= self._limit

    @property
    def has_fast_slots(self) -> bool:
        """Whether `mark_slow_lanes` may find attempts later."""
        return bool(self._fast_slots)

    def check(self, lane: LaneState) -> Admission:
        """Return whether a lane may start an attempt; the caller has checked `is_full`."""
        tenant = lane.tenant
        share = _TENANT_SLOTS_PER_FREE_SLOT * (self._limit - self.running_count)
        left = share - tenant.running_count
        if lane.is_slow:
            if self._slow_count >= self._max_slow:
                return Admission.NO_SLOT_IS_FREE
            share = _TENANT_SLOTS_PER_FREE_SLOT * (self._max_slow - self._slow_count)
            left = min(left, share - tenant.slow_count)
        if left <= 0:
            return Admission.TENANT_HAS_ITS_SHARE
        # A lane without attempts in flight is admitted as long as the tenant is.
        return (
            Admission.LANE_HAS_ITS_SHARE if 0 < lane.running_count >= left else Admission.ADMITTED
        )

    def acquire(self, lane: LaneState, now_ms: int) -> Slot:
        """Return a slot for an attempt that starts now."""
        slot = Slot(lane, lane.is_slow)
        self.running_count += 1
        lane.running_count += 1
        lane.tenant.running_count += 1
        if slot.is_slow:
            self._slow_count += 1
            lane.tenant.slow_count += 1
        else:
            self._fast_slots.append((now_ms, slot))
        return slot

    def release(self, slot: Slot) -> None:
        """Release the slot of an attempt that has ended."""
        lane = slot.lane
        slot.is_held = False
        self.running_count -= 1
        lane.running_count -= 1
        lane.tenant.running_count -= 1
        if slot.is_slow:
            self._slow_count -= 1
            lane.tenant.slow_count -= 1

    def mark_slow_lanes(self, now_ms: int) -> list[LaneState]:
        """Mark the lanes of fast attempts that are in flight for a second as slow; return them."""
        slots = self._fast_slots
        marked: list[LaneState] = []
        while slots and (slots[0][0] <= now_ms - FAST_ATTEMPT_MS or not slots[0][1].is_held):
            _, slot = slots.popleft()
            if slot.is_held:
                slot.lane.is_slow = True
                marked.append(slot.lane)
        return marked


class LaneRotation:
    """Lanes with due tasks, served round robin: the tenants in turn, and the lanes of each in turn.

    A tenant that has its share of the slots waits in `_waiting_tenants` with all its lanes, and a
    lane that has its share in `_waiting_lanes`. Both try again after an attempt has ended.
    """

    def __init__(self, slots: AttemptSlots) -> None:
        self._slots = slots
        self._lanes: dict[TenantState, deque[LaneState]] = {}
        self._turns: deque[TenantState] = deque()
        self._waiting_tenants: deque[TenantState] = deque()
        self._waiting_lanes: OrderedDict[LaneState, None] = OrderedDict()

    @property
    def has_turns(self) -> bool:
        """Whether a lane may have a turn."""
        return bool(self._turns)

    def append(self, lane: LaneState) -> None:
        """Add a lane behind the other lanes of its tenant; it leaves the rotation it was in."""
        lane.rotation = self
        lanes = self._lanes.get(lane.tenant)
        if lanes is None:
            self._lanes[lane.tenant] = deque((lane,))
            self._turns.append(lane.tenant)
        else:
            lanes.append(lane)

    def pop(self) -> LaneState | None:
        """Remove and return the next lane that may start an attempt, or None."""
        turns = self._turns
        while turns:
            tenant = turns.popleft()
            lanes = self._lanes[tenant]
            lane = lanes[0]
            admission = None  # if another rotation has the lane: it became fast or slow
            if lane.rotation is self:
                admission = self._slots.check(lane)
                if admission is Admission.NO_SLOT_IS_FREE:
                    turns.appendleft(tenant)
                    return None
                if admission is Admission.TENANT_HAS_ITS_SHARE:
                    self._waiting_tenants.append(tenant)
                    continue
                lane.rotation = None
            lanes.popleft()
            if lanes:
                turns.append(tenant)
            else:
                del self._lanes[tenant]
            if admission is Admission.ADMITTED:
                return lane
            if admission is Admission.LANE_HAS_ITS_SHARE:
                self._waiting_lanes[lane] = None
        return None

    def readmit(self) -> LaneState | None:
        """Give all waiting tenants another turn; return the lane that has waited longest, or None.

        The caller appends the lane again, if it still has due tasks. All tenants are readmitted,
        because the tasks of some may start no attempt. They are few: a tenant waits only while it
        holds four or more slots.
        """
        if self._waiting_tenants:
            self._turns.extend(self._waiting_tenants)
            self._waiting_tenants.clear()
        return self._waiting_lanes.popitem(last=False)[0] if self._waiting_lanes else None
