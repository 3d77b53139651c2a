"""Shares the slots for attempts in flight: between tenants first, then between their lanes.

An attempt holds a slot until it ends: a few milliseconds if the target is healthy, the whole
attempt timeout if the target hangs. Without limits, the attempts of some hanging targets would soon
hold all slots. A lane is *fast* if its attempts usually end within a second, and *slow* otherwise
or until its first attempt ends. Of the slots of a process,

* attempts that started in slow lanes hold at most three fifths (the slots for slow lanes),
* tenants have shares of all slots, and of the slots for slow lanes (see `SlotShares`),
* a lane that has a slot holds at most as many as its tenant can still acquire.

Any target may begin to hang, so the limits of tenants and lanes apply to fast lanes, too. A hanging
attempt that started in a fast lane does not count as slow. Such attempts may hold more than three
fifths of the slots: if they counted as slow, no new lane could start its first attempt until they
end.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct

from tarry.service.engine.lanes import MAX_FAST_ATTEMPT_MS, MAX_SLOTS_PER_FREE_SLOT, SlotShares

if TYPE_CHECKING:
    from tarry.service.engine.lanes import LocalLane, TenantState


_MAX_READMITTED_TENANTS = 8
"""Waiting tenants that are readmitted when an attempt of another tenant ends. With 250 waiting
tenants, it took 0.5 ms to check all of them. Each waiting tenant holds a slot, so it is readmitted
when one of its own attempts ends, at the latest."""


class Admission(Enum):
    """Whether a lane may start an attempt."""

    ADMITTED = 0
    LANE_AT_LIMIT = 1
    TENANT_AT_LIMIT = 2
    NO_FREE_SLOT = 3


# To read a member of an enum takes 0.27 us in Python 3.11, a constant 0.01 us.
ADMITTED = Admission.ADMITTED


class Slot(Struct, eq=False):
    """The slot of one attempt in flight."""

    lane: LocalLane
    is_slow: bool  # whether the lane was slow when the attempt started


class AttemptSlots:
    """Counts the attempts in flight of a process, and limits them to `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.free_count: int = limit
        """How many more attempts may start."""
        self._max_slow = limit - 2 * (limit // 5)
        self._shares = SlotShares(limit)
        self._slow_shares = SlotShares(self._max_slow)
        self._slow_count = 0
        self._fast_slots: dict[Slot, int] = {}
        """The slots of attempts in flight that started in a fast lane less than about a second ago,
        with their start times, oldest first."""

    @property
    def running_count(self) -> int:
        """The number of attempts in flight."""
        return self._limit - self.free_count

    @property
    def has_fast_slots(self) -> bool:
        """Whether `mark_slow_lanes` must be called, because a fast lane has attempts in flight."""
        return bool(self._fast_slots)

    def check(self, lane: LocalLane) -> Admission:
        """Return whether a lane may start an attempt; `free_count` must not be 0."""
        tenant = lane.tenant
        # The usual case, computed without a call of `remaining`: the tenant may acquire more slots
        # than the lane holds.
        if (
            not lane.is_slow
            and lane.running_count + tenant.running_count
            < MAX_SLOTS_PER_FREE_SLOT * (self.free_count - self._shares.reserved)
        ):
            return ADMITTED
        left = self._shares.remaining(self.free_count, tenant.running_count)
        if lane.is_slow:
            free_slow = self._max_slow - self._slow_count
            if free_slow <= 0:
                return Admission.NO_FREE_SLOT
            left = min(left, self._slow_shares.remaining(free_slow, tenant.slow_count))
        if left <= 0:
            return Admission.TENANT_AT_LIMIT
        # A lane without attempts in flight is admitted if its tenant is below its limits.
        return Admission.LANE_AT_LIMIT if 0 < lane.running_count >= left else ADMITTED

    def acquire(self, lane: LocalLane, now_ms: int) -> Slot:
        """Return a slot for an attempt that starts now."""
        slot = Slot(lane, lane.is_slow)
        self.free_count -= 1
        lane.running_count += 1
        lane.tenant.running_count += 1
        if slot.is_slow:
            self._slow_count += 1
            lane.tenant.slow_count += 1
        else:
            self._fast_slots[slot] = now_ms
        return slot

    def release(self, slot: Slot) -> None:
        """Release the slot of an attempt that has ended."""
        lane = slot.lane
        self.free_count += 1
        lane.running_count -= 1
        lane.tenant.running_count -= 1
        if slot.is_slow:
            self._slow_count -= 1
            lane.tenant.slow_count -= 1
        else:
            self._fast_slots.pop(slot, None)  # missing after `mark_slow_lanes`

    def mark_slow_lanes(self, now_ms: int) -> list[LocalLane]:
        """Mark fast lanes with an attempt in flight for a second as slow; return these lanes."""
        slow_slots: list[Slot] = []
        for slot, started_at in self._fast_slots.items():
            if started_at > now_ms - MAX_FAST_ATTEMPT_MS:
                break
            slow_slots.append(slot)
        for slot in slow_slots:
            del self._fast_slots[slot]
            slot.lane.is_slow = True
        return [slot.lane for slot in slow_slots]


class LaneRotation:
    """Lanes with due tasks, served round robin: the tenants in turn, and the lanes of each in turn.

    A tenant at its limit of slots waits in `waiting_tenants` with all its lanes, and a lane at its
    limit in `waiting_lanes`. Both are readmitted after an attempt has ended, see `readmit`.
    """

    def __init__(self, slots: AttemptSlots) -> None:
        self._slots = slots
        self._lanes: dict[TenantState, deque[LocalLane]] = {}
        self.tenant_queue: deque[TenantState] = deque()  # if it is empty, `pop` returns None
        self.waiting_tenants: OrderedDict[TenantState, None] = OrderedDict()
        self.waiting_lanes: OrderedDict[LocalLane, None] = OrderedDict()

    def append(self, lane: LocalLane) -> None:
        """Add a lane after the other lanes of its tenant; its former rotation skips it."""
        lane.rotation = self
        lanes = self._lanes.get(lane.tenant)
        if lanes is None:
            self._lanes[lane.tenant] = deque((lane,))
            self.tenant_queue.append(lane.tenant)
        else:
            lanes.append(lane)

    def pop(self) -> LocalLane | None:
        """Remove and return the next lane that may start an attempt, or None."""
        tenants = self.tenant_queue
        while tenants:
            tenant = tenants.popleft()
            lanes = self._lanes[tenant]
            lane = lanes[0]
            admission = None  # stays None if the lane has moved to the other rotation
            if lane.rotation is self:
                admission = self._slots.check(lane)
                if admission is not ADMITTED:
                    if admission is Admission.NO_FREE_SLOT:
                        tenants.appendleft(tenant)
                        return None
                    if admission is Admission.TENANT_AT_LIMIT:
                        self.waiting_tenants[tenant] = None
                        continue
                lane.rotation = None
            lanes.popleft()
            if lanes:
                tenants.append(tenant)
            else:
                del self._lanes[tenant]
            if admission is ADMITTED:
                return lane
            if admission is Admission.LANE_AT_LIMIT:
                self.waiting_lanes[lane] = None
        return None

    def readmit(self, tenant: TenantState) -> LocalLane | None:
        """Readmit waiting tenants and a waiting lane, because an attempt of `tenant` has ended.

        Readmits this tenant, and other tenants in turn, of which some may have no task that can
        start now. Removes and returns the longest-waiting lane, or None. The caller appends the
        lane again, if it still has due tasks.
        """
        waiting, queue = self.waiting_tenants, self.tenant_queue
        if tenant in waiting:
            del waiting[tenant]
            queue.append(tenant)
        for _ in range(min(len(waiting), _MAX_READMITTED_TENANTS)):
            queue.append(waiting.popitem(last=False)[0])
        return self.waiting_lanes.popitem(last=False)[0] if self.waiting_lanes else None
