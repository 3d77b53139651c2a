"""The lanes in this process: their downstreams, and their due tasks.

A lane is the queue of one tenant's tasks for one downstream. The store has the state that all
workers share: whether a lane is parked (its breaker opened) or paused (by an operator). The state
here only determines whether this process starts attempts of the lane.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace, nlargest, nsmallest
from itertools import chain, islice
from math import inf
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from msgspec import Struct

from tarry.core.adaptive_limit import AdaptiveLimit
from tarry.core.breaker import Breaker, BreakerState
from tarry.core.downstream import Downstream
from tarry.core.verdict import Reason, Stop
from tarry.service.defaults import MAX_LANE_CLAIMED
from tarry.service.engine.lane_owners import LaneOwners
from tarry.service.engine.retry_budget import SharedBudget
from tarry.service.model import LaneWait
from tarry.service.store import LaneLimits
from tarry.wire.tasks import WAIT_REASONS, BreakerSettings, BudgetSettings, DownstreamLimits

if TYPE_CHECKING:
    from asyncio import TimerHandle
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from tarry.core.limiter import Limiter
    from tarry.core.verdict import DelayedPermit
    from tarry.service.delivery import DeliveryResult
    from tarry.service.engine.endpoint_caps import EndpointCap
    from tarry.service.model import Task, TaskContent
    from tarry.service.store import DueLane, TaskResult
    from tarry.wire.tasks import WaitReason

MAX_LANES = 10_000  # at this number, lanes without tasks are removed to create another one
_MAX_BLOCKED_LANES = 200  # below `_MAX_REPORTED_LANES`, so that a heartbeat has all of them
_MAX_TENANT_BLOCKED_LANES = 100
_LIMIT_REASONS: tuple[WaitReason, ...] = ("rate-limit", "concurrency-limit")
_MAX_HANDED_OVER_LANES = 400
"""Lanes that the store reports to be ready, but of which this process claims no tasks. Each claim
passes over all of them: with 5,000, a claim in SQLite took 0.8 s, and so did each new task."""
_MIN_STORED_CHANGE = 0.2  # a rate that differs by this share is stored again
_FIRST_ATTEMPTS_PER_RETRY = 2
"""First attempts between two retries of a lane, while both are due. So tasks that always fail get
at most a third of the attempts."""
_MIN_RETRY_DEFERRAL_MS, _MAX_RETRY_DEFERRAL_MS = 1_000, 60_000  # while the retry budget is empty
_DEFERRED_RETRY_SPACING_MS = 50
"""Deferred retries of a lane become due at 20 per second. The retry budget admits 10 per second
plus a share of the calls, so at most about half of the deferred retries are deferred again."""
_DEFERRAL_GRACE_S = 2
"""A task whose deferral has ended is started, or deferred again, within this time."""
_MAX_LIMITER_DELAY_S = 3600.0  # longer than any delay of `AdaptiveLimit`, so it never rejects
_MAX_EVIDENCE_AGE_MS = 1_000
"""The limiter ignores a retry that starts within this time after a first attempt: first attempts
show the state of the target, while the retried task may be one that always fails."""
_MIN_REFUSED_FIRST_ATTEMPTS = 10
"""After this number of failed first attempts in a row, the limiter does not ignore retries: the
target may refuse the first attempt of each task ("processing, ask again") and accept the second."""
_MIN_ACCEPTED_RETRIES = 4
"""After this number of successful retries in a row, in addition, the target does so; an overloaded
target refuses retries, too. Then the limiter starts again, and ignores first attempts. As the share
of first attempts changes, the share of failures changes, too, and the limiter would take that for
the effect of a rate that is too high: a lane with 61 new tasks per second was limited to 3 attempts
per second for half a minute."""
_LIMITER_RESTART_INTERVAL_MS = 60_000
"""The limiter does not start again more often, because the target may be at its capacity, too."""
_MAX_RATE_DELAY_S = 2.0
"""How long a leased task may wait because of the rate limit of its lane. Tasks that would wait
longer are not leased yet, so that other processes can start them."""
_MAX_SLOW_LANE_LEASED = 256
"""How many tasks of a slow lane are leased at a time. More would only wait for a slot, and their
leases would be released before they start."""
_HAND_OVER_MS = 300_000
"""How long a process leaves a lane to its owner. Then it starts attempts in addition to the owner,
until they find the capacity of the target: one process may not be enough for a target that accepts
more."""
_REJOIN_MS = 60_000  # how long the capacity is looked for
MAX_SLOTS_PER_FREE_SLOT = 4  # of a tenant, see `SlotShares`
MAX_FAST_ATTEMPT_MS = 1_000
"""An attempt that takes longer is slow."""
DEFAULT_LIMITS = DownstreamLimits()  # one object for all lanes
_UNREACHABLE_MIN_CALLS = 1 << 62  # `min_calls` of a breaker that must not open
_DURATION_WEIGHT = 1 / 8  # of the newest attempt in the mean duration of a lane

# To read a member of an enum takes 0.27 us in Python 3.11, a constant 0.01 us.


class LaneDownstream(Downstream):
    """The downstream of a lane, with a limiter that follows the capacity of the target."""

    __slots__ = ("cap", "limiter", "limits")

    def __init__(self, name: str, *, breaker: Breaker, max_in_flight: int) -> None:
        budget = build_budget()
        self.limits: DownstreamLimits = DEFAULT_LIMITS
        """The configured limits, see `LimitTable`."""
        self.limiter: AdaptiveLimit = AdaptiveLimit(
            max_in_flight=max_in_flight, max_wait=_MAX_LIMITER_DELAY_S
        )
        self.cap: EndpointCap | None = None
        super().__init__(name, breaker=breaker, budget=budget, limiter=self.limiter)

    def set_cap(self, cap: EndpointCap) -> None:
        """Add the limits that the lane shares with others; no attempt may be in flight."""
        self.cap = cap
        self._limiters: tuple[Limiter, ...] = (self.limiter, cap)

    @property
    def has_configured_limits(self) -> bool:
        """Whether an operator limits the rate or the concurrency; the processes share both."""
        limits = self.limits
        is_limited = limits.rate_per_second is not None or limits.concurrency is not None
        return is_limited or self.cap is not None

    def admit(self, now: float, attempt_id: int = 0) -> int | DelayedPermit | Stop:
        """Return a permit for an attempt, see `Downstream.admit`."""
        permit = None if self.breaker is None else self.breaker.permit_if_closed
        if permit is None or self.limiter.rate is not None or self.cap is not None:
            return super().admit(now, attempt_id)
        # The usual case, without the loop over all limiters: 44 instead of 74 bytecode
        # instructions. Without a rate, the limiter delays no attempt.
        return Stop(Reason.LIMIT) if self.limiter.acquire(now) is None else permit


class SlotShares:
    """Divides `total` slots or leases between tenants.

    A tenant may hold four times as many slots as are free (a dynamic threshold). So a single tenant
    can use most of the slots, and some always stay free for other tenants. But each further tenant
    whose targets hang takes four fifths of the remaining slots, and holds them for an attempt
    timeout. So one sixteenth of the slots is reserved for tenants that hold almost none: each of 16
    tenants can have a 256th of all slots, whatever other tenants hold.
    """

    def __init__(self, total: int) -> None:
        self.reserved: int = total // 16
        self._minimum = max(1, total // 256)

    def remaining(self, free: int, held: int) -> int:
        """Return how many more slots a tenant with `held` slots may acquire; 0 or less: none."""
        remaining = MAX_SLOTS_PER_FREE_SLOT * (free - self.reserved) - held
        if remaining < self._minimum:
            remaining = max(remaining, min(self._minimum - held, free))
        return remaining


@dataclass(slots=True, eq=False, weakref_slot=True)
class TenantState:
    """Counts the attempts in flight (see `AttemptSlots`) and leases of a tenant in this process."""

    running_count: int = 0
    slow_count: int = 0  # attempts in flight that started while their lane was slow
    leased_count: int = 0
    blocked_count: int = 0  # lanes, see `Lanes.block`


# Not a Struct: each attempt sets several attributes, which takes 0.02 instead of 0.09 us each.
@dataclass(slots=True, eq=False)
class LocalLane:
    """The downstream of a lane, and the lane's tasks that are leased to this process."""

    name: str
    downstream: LaneDownstream
    tenant: TenantState = field(default_factory=TenantState)
    due_retries: deque[LeasedTask] | None = None
    """Due tasks that were attempted before. They have their own queue, so that retries start near
    their due time: while both queues have tasks, every third attempt is a retry. None until a task
    is queued: an empty deque takes 0.7 KB, and most lanes have no retries."""
    due_first_attempts: deque[LeasedTask] = field(default_factory=deque)
    """Due tasks that were not attempted yet, in the order in which they became due."""
    leased_count: int = 0  # tasks of the lane that are leased to this process
    running_count: int = 0  # attempts in flight
    is_slow: bool = True
    """Whether attempts usually take longer than a second, or none has ended yet."""
    _mean_duration_ms: float | None = None
    rotation: object | None = None  # the `LaneRotation` in which the lane waits for its turn
    is_paused: bool = False  # whether an operator paused the lane
    waits_until: int = 0
    """No attempt starts before this time (ms), see `DeliveryResult.pause_s`."""
    wait_reason: str | None = None
    """Why the lane is parked although its breaker is closed, or is blocked here (`Lanes.block`);
    None: no such reason is known."""
    blocked_until: int = 0
    """When the target of a blocked lane is tried again (ms), see `Lanes.block`; 0: not blocked."""
    was_used: bool = True  # whether the lane had a task since the last call of `Lanes.remove_idle`
    was_held_back: bool = False
    """Whether the lane was parked, paused or at its limits since an attempt was last started."""
    startable_since: int = 0
    """When the first attempt after the end of such a time was started (ms). Waits before it do not
    count as scheduling lag: they do not show that the process is overloaded."""
    waits_for_cap: bool = False  # whether an attempt must wait for those of other lanes
    rate_timer: TimerHandle | None = None
    """Set while the lane waits for its limiter to admit the next attempt."""
    stored_rate: float | None = None
    """The rate that this process has last written to the store, or read from it."""
    _deferrals: dict[tuple[WaitReason, int], int] | None = None
    """The earliest due time of deferred tasks, by the reason and the second in which the deferral
    ends: each of these tasks is deferred again, or its attempt starts. None until the first."""
    _refused_first_attempts: int = 0  # failed first attempts since one last succeeded
    _accepted_retries: int = 0  # successful retries since one last failed
    _limiter_restarted_at: int = 0  # see `_LIMITER_RESTART_INTERVAL_MS`
    _first_attempt_at: int = 0  # when a task was last attempted for the first time
    _first_attempts_in_a_row: int = 0
    _last_reserved_time: int = 0

    @property
    def waiting_for(self) -> WaitReason:
        """Why due tasks of the lane wait in this process, or are not leased by it."""
        if self.is_paused:
            return "pause"
        if self.blocked_until:
            return "blocked"
        if self.is_tripped:
            return "breaker"
        if self.rate_timer is not None:
            return "rate-limit"
        if self.waits_for_cap or self.downstream.limiter.is_full:
            return "concurrency-limit"
        return "free-slot"

    def record_deferral(self, reason: WaitReason, due_at: int, until: int, now: int) -> None:
        """Record that the attempt of a task that was due at `due_at` is deferred."""
        key = (reason, until // 1000)
        deferrals = self._deferrals or {}
        if key not in deferrals:
            oldest = now // 1000 - _DEFERRAL_GRACE_S
            deferrals = {each: at for each, at in deferrals.items() if each[1] >= oldest}
        deferrals[key] = min(deferrals.get(key, due_at), due_at)
        self._deferrals = deferrals

    def deferrals(self, now: int) -> Iterator[tuple[WaitReason, int]]:
        """Yield the reasons of deferrals and the due times of these tasks, the latest first."""
        oldest = now // 1000 - _DEFERRAL_GRACE_S
        entries = sorted((self._deferrals or {}).items(), key=lambda entry: -entry[1])
        return ((reason, due_at) for (reason, second), due_at in entries if second >= oldest)

    def find_wait(self, now: int) -> LaneWait | None:
        """Return why due tasks wait in this process; None: for no reason that others must know."""
        found = dict(self.deferrals(now))  # of each reason the last, which is the earliest
        reason = self.waiting_for
        if reason in _LIMIT_REASONS:
            queues = filter(None, (self.due_first_attempts, self.due_retries))
            due_times = [queue[0].task.next_attempt_at for queue in queues]
            if not due_times and not found:
                return LaneWait(reason)
            if due_times:
                found[reason] = min(due_times)
        if not found:
            return None
        reason = min(found, key=lambda each: found[each])
        return LaneWait(reason, found[reason])

    @property
    def has_due_tasks(self) -> bool:
        """Whether a due task waits; it may have been dropped."""
        return bool(self.due_first_attempts or self.due_retries)

    def pop_due(self) -> LeasedTask | None:
        """Remove and return the next due task (None: no task is due), see `due_retries`."""
        if self.due_first_attempts and (
            not self.due_retries or self._first_attempts_in_a_row < _FIRST_ATTEMPTS_PER_RETRY
        ):
            self._first_attempts_in_a_row += 1
            return self.due_first_attempts.popleft()
        self._first_attempts_in_a_row = 0
        return self.due_retries.popleft() if self.due_retries else None

    def due_queue(self, task: Task) -> deque[LeasedTask]:
        """Return the queue in which a due task waits."""
        if not _is_retry(task):
            return self.due_first_attempts
        if self.due_retries is None:
            self.due_retries = deque()
        return self.due_retries

    def should_limiter_ignore(self, now: int, is_retry: bool) -> bool:  # noqa: FBT001 - positional for speed
        """Return whether the limiter must ignore the outcome of an attempt that starts now.

        Also records the start of a first attempt, see `_MAX_EVIDENCE_AGE_MS`, and starts the
        limiter again if only first attempts are refused, see `_MIN_ACCEPTED_RETRIES`.
        """
        if not is_retry:
            self._first_attempt_at = now
            if (
                self._refused_first_attempts >= _MIN_REFUSED_FIRST_ATTEMPTS
                and self._accepted_retries >= _MIN_ACCEPTED_RETRIES
            ):
                self._restart_limiter(now)
                return True
        elif (
            now < self._first_attempt_at + _MAX_EVIDENCE_AGE_MS
            and self._refused_first_attempts < _MIN_REFUSED_FIRST_ATTEMPTS
        ):
            return True
        # The breaker alone evaluates probes. The limiter starts over when the breaker closes.
        breaker = self.downstream.breaker  # not `is_tripped`: this is called for each attempt
        return breaker is not None and breaker.is_tripped

    def _restart_limiter(self, now: int) -> None:
        """Undo the cuts that refused first attempts have caused, at most once in an interval."""
        if now >= self._limiter_restarted_at + _LIMITER_RESTART_INTERVAL_MS:
            self._limiter_restarted_at = now
            limiter = self.downstream.limiter
            if limiter.rate is not None:
                limiter.on_recovery(now / 1000)

    def record_result(
        self,
        duration_ms: float,
        timed_out: bool,  # noqa: FBT001 - positional for speed
        is_refused: bool | None = None,  # noqa: FBT001
        is_accepted: bool | None = None,  # noqa: FBT001
    ) -> None:
        """Update `is_slow` after an attempt.

        `is_refused` is whether a first attempt has failed, `is_accepted` whether a retry has
        succeeded.
        """
        if is_accepted is not None:
            self._accepted_retries = self._accepted_retries + 1 if is_accepted else 0
        if is_refused is not None:
            self._refused_first_attempts = self._refused_first_attempts + 1 if is_refused else 0
        mean = self._mean_duration_ms
        mean = duration_ms if mean is None else mean + (duration_ms - mean) * _DURATION_WEIGHT
        self._mean_duration_ms = mean
        self.is_slow = timed_out or mean >= MAX_FAST_ATTEMPT_MS

    def reserve_retry_time(self, now: int) -> int:
        """Reserve and return a time for a retry that the empty retry budget has rejected."""
        after_last = self._last_reserved_time + _DEFERRED_RETRY_SPACING_MS
        retry_at = max(now + _MIN_RETRY_DEFERRAL_MS, after_last)
        self._last_reserved_time = min(retry_at, now + _MAX_RETRY_DEFERRAL_MS)
        return self._last_reserved_time

    @property
    def breaker(self) -> Breaker:
        """The breaker of the downstream."""
        breaker = self.downstream.breaker
        assert breaker is not None  # noqa: S101 - `build_downstream` creates one
        return breaker

    @property
    def is_empty(self) -> bool:
        """Whether no task is leased and no attempt runs. An attempt may outlive its lease."""
        return not self.leased_count and not self.running_count

    @property
    def limits(self) -> LaneLimits:
        """The limits to store, so that a restarted process continues with them."""
        limiter = self.downstream.limiter
        return LaneLimits(self.name, limiter.settled_rate, limiter.limit)

    @property
    def has_changed_rate(self) -> bool:
        """Whether the rate differs by a fifth or more from the stored rate."""
        rate, stored_rate = self.downstream.limiter.settled_rate, self.stored_rate
        if rate is None or stored_rate is None:
            return rate is not stored_rate
        return abs(rate - stored_rate) >= _MIN_STORED_CHANGE * stored_rate

    @property
    def is_tripped(self) -> bool:
        """Whether the breaker is open or half-open."""
        return self.breaker.is_tripped


class LeasedTask(Struct, eq=False):
    """One task leased to this process."""

    task: Task
    lane: LocalLane
    content: TaskContent | None  # unpacked; None until the first attempt needs it
    is_busy: bool = False  # whether a policy load, attempt, write or cancellation is running
    is_queued: bool = False  # whether it is in the heap of `LeasedTasks` or in a queue of its lane
    is_dropped: bool = False  # whether it was removed from `LeasedTasks`; queues skip it
    start_slot: int | None = None  # see `Store.record_start`; None: no attempt was started
    startable_since: int = 0  # of the lane, when the last attempt was started
    result: TaskResult | None = None  # the result that is being written
    delivery_result: DeliveryResult | None = None  # for API callers that wait for the result


class Lanes(dict[str, LocalLane]):
    """Lanes by name. `lanes[name]` creates a lane; `remove_idle` removes idle lanes."""

    def __init__(
        self,
        build_downstream: Callable[[str], LaneDownstream],
        *,
        max_leased: int,
        max_lane_leased: int | None = None,
    ) -> None:
        super().__init__()
        self.build_downstream: Callable[[str], LaneDownstream] = build_downstream
        self._max_lane_leased = max_leased if max_lane_leased is None else max_lane_leased
        self._max_slow_waiting = max_leased // 2  # leased tasks of slow lanes without an attempt
        self._leased_count = 0
        self._lease_shares = SlotShares(max_leased)
        self.reserved_leases: int = self._lease_shares.reserved
        self._tenants: WeakValueDictionary[str, TenantState] = WeakValueDictionary()
        self.parked: set[str] = set()  # names of lanes that this process has parked in the store
        self._blocked: set[str] = set()  # names, see `block`
        self.owners: LaneOwners = LaneOwners()
        self._handed_over: dict[str, int] = {}
        """Lanes that this process leaves to their owners, and until when (ms)."""
        self._rejoined: dict[str, int] = {}
        """Lanes that are not handed over during slow start, and until when (ms)."""
        self.waits_elsewhere: dict[str, LaneWait] = {}
        """Why due tasks wait in other processes, by lane, as they last reported."""
        self._limited: set[str] = set()
        """Names of lanes near their limit of leases: a claim without a limit could exceed it."""
        self._limits: dict[str, LaneLimits] = {}
        """Limits of up to `MAX_LANES` lanes that are not in the dict, last used lanes last. They
        are applied when a lane is created."""

    def __missing__(self, name: str) -> LocalLane:
        """Create and return a lane."""
        if len(self) >= MAX_LANES:
            self._evict_empty()
        tenant_name = name.partition("/")[0]
        tenant = self._tenants.get(tenant_name)
        if tenant is None:
            tenant = self._tenants[tenant_name] = TenantState()
        lane = self[name] = LocalLane(name, self.build_downstream(name), tenant)
        limits = self._limits.pop(name, None)
        if limits is not None:
            lane.stored_rate = limits.rate
            lane.downstream.limiter.restore(rate=limits.rate, limit=limits.concurrency)
        return lane

    def restore_limits(self, limits: Sequence[LaneLimits]) -> None:
        """Use these limits (of last used lanes first) for lanes that are created from now on."""
        self._limits.update((each.lane, each) for each in reversed(limits))

    def list_changed_limits(self) -> list[LaneLimits]:
        """Return the limits of lanes whose rate differs by a fifth from the stored rate."""
        return [
            lane.limits
            for lane in self.values()
            if lane.has_changed_rate and lane.name not in self._handed_over
        ]

    def mark_stored(self, limits: Iterable[LaneLimits]) -> None:
        """Record that these limits are stored."""
        for each in limits:
            lane = self.get(each.lane)
            if lane is not None:
                lane.stored_rate = each.rate

    def list_outdated_budgets(self) -> list[tuple[str, SharedBudget]]:
        """Return lane name and retry budget, where changes of the budget are not stored yet."""
        budgets = ((lane.name, lane.downstream.budget) for lane in self.values())
        return [
            (name, budget)
            for name, budget in budgets
            if isinstance(budget, SharedBudget) and budget.is_outdated
        ]

    def tripped_and_busiest(self, limit: int, tenant: str | None = None) -> list[LocalLane]:
        """Return up to `limit` lanes of a tenant (None: of all tenants).

        Tripped lanes come first, then lanes with the most leased tasks.
        """
        lanes = self._lanes_of(tenant)
        return nlargest(limit, lanes, key=lambda lane: (lane.is_tripped, lane.leased_count))

    def oldest_due(
        self, due_lanes: Iterable[DueLane], now: int, tenant: str | None = None
    ) -> dict[WaitReason, int]:
        """Return the earliest due time of the tasks that wait, by the reason why they wait.

        `due_lanes` are those of the store (`Counters.due_lanes`). The tasks that are leased to this
        process, and wait here, are added, and those whose attempts this process has deferred.
        """
        found: dict[WaitReason, int] = {}
        for due_lane in due_lanes:
            reason = due_lane.waiting_for
            if reason is None:
                lane = self.get(due_lane.lane)
                reason = "free-slot" if lane is None else lane.waiting_for
                if reason == "free-slot":
                    reason = self.reason_elsewhere(due_lane.lane) or reason
            found[reason] = min(found.get(reason, due_lane.due_at), due_lane.due_at)
        for lane in self._lanes_of(tenant):
            for leased_task in chain(lane.due_first_attempts, lane.due_retries or ()):
                if not (leased_task.is_dropped or leased_task.is_busy):
                    reason, due_at = lane.waiting_for, leased_task.task.next_attempt_at
                    found[reason] = min(found.get(reason, due_at), due_at)
            for reason, due_at in lane.deferrals(now):
                found[reason] = min(found.get(reason, due_at), due_at)
        for name, wait in self.waits_elsewhere.items():
            reason = self.reason_elsewhere(name)
            if wait.due_at is not None and reason and tenant in {None, name.partition("/")[0]}:
                found[reason] = min(found.get(reason, wait.due_at), wait.due_at)
        return found

    def list_waits(self, limit: int, now: int) -> dict[str, LaneWait]:
        """Return why due tasks wait in this process, of up to `limit` lanes: the earliest."""
        waits = ((lane.name, lane.find_wait(now)) for lane in self.values())
        found = ((name, wait) for name, wait in waits if wait is not None)
        return dict(nsmallest(limit, found, key=lambda item: _by_due_time(item[1])))

    def set_waits_elsewhere(self, waits: Iterable[Mapping[str, LaneWait]]) -> None:
        """Replace `waits_elsewhere` with what other processes have reported."""
        self.waits_elsewhere = {}
        for wait_by_lane in waits:
            for name, wait in wait_by_lane.items():
                other = self.waits_elsewhere.get(name, wait)
                self.waits_elsewhere[name] = min(other, wait, key=_by_due_time)

    def reason_elsewhere(self, name: str) -> WaitReason | None:
        """Return why due tasks of a lane wait in another process; None: no reason is known."""
        wait = self.waits_elsewhere.get(name)
        return None if wait is None else next((r for r in WAIT_REASONS if r == wait.reason), None)

    def _lanes_of(self, tenant: str | None) -> Iterator[LocalLane]:
        return (lane for lane in self.values() if tenant in {None, lane.name.partition("/")[0]})

    def increment_leased(self, lane: LocalLane, count: int = 1) -> None:
        """Count tasks that were leased to this process."""
        lane.was_used = True
        self._leased_count += count
        lane.leased_count += count
        lane.tenant.leased_count += count
        self._update_limited(lane)

    def decrement_leased(self, lane: LocalLane) -> None:
        """Stop counting a task that is no longer leased."""
        self._leased_count -= 1
        lane.leased_count -= 1
        lane.tenant.leased_count -= 1
        # Skipped for most tasks: no lane is near its limit, and the limit of this lane is constant.
        if self._limited or lane.is_slow or lane.downstream.limiter.rate is not None:
            self._update_limited(lane)

    def _update_limited(self, lane: LocalLane) -> None:
        """Add a lane to the lanes whose limit the next claim could exceed, or remove it."""
        limit = self._max_lane_leased
        if lane.is_slow or lane.downstream.limiter.rate is not None:
            limit = self._lease_limit(lane)
        if lane.leased_count and limit - lane.leased_count < MAX_LANE_CLAIMED:
            self._limited.add(lane.name)
        else:
            self._limited.discard(lane.name)

    def lease_capacity(self, lane: LocalLane) -> int:
        """Return how many more tasks of a lane may be leased; negative if its rate has dropped."""
        return self._lease_limit(lane) - lane.leased_count

    def claim_limits(self) -> dict[str, int]:
        """Return how many tasks of each lane near its limit the next claim may lease, by name."""
        return {name: self._claim_limit(self[name]) for name in self._limited}

    def blocked_limits(self, now: int) -> dict[str, int]:
        """Return how many tasks of each blocked lane the next claim may lease, by name.

        The limit is 0, and 1 when the target is to be tried again.
        """
        lanes = map(self.__getitem__, self._blocked)
        return {
            lane.name: int(now >= lane.blocked_until and not lane.leased_count) for lane in lanes
        }

    def block(self, lane: LocalLane, until: int) -> bool:
        """Lease no task of a lane until a time, because this process does not allow its target.

        The store does not know of it, so that processes that allow the target deliver the tasks.
        Return False if too many lanes are blocked: each claim of this process passes over them.
        """
        if lane.name not in self._blocked:
            if (
                len(self._blocked) >= _MAX_BLOCKED_LANES
                or lane.tenant.blocked_count >= _MAX_TENANT_BLOCKED_LANES
            ):
                return False
            lane.tenant.blocked_count += 1
            self._blocked.add(lane.name)
        lane.blocked_until = until
        return True

    def unblock(self, lane: LocalLane) -> None:
        """Lease tasks of a lane again after `block`."""
        lane.blocked_until = 0
        if lane.name in self._blocked:
            self._blocked.remove(lane.name)
            lane.tenant.blocked_count -= 1

    def is_target_blocked(self, name: str) -> bool:
        """Return whether this process does not allow the target of a lane, see `block`."""
        return name in self._blocked

    def blocked_reasons(self, limit: int) -> dict[str, str]:
        """Return the reasons of up to `limit` blocked lanes, by name."""
        return {name: self[name].wait_reason or "" for name in islice(self._blocked, limit)}

    def hand_over(self, lane: LocalLane, now: int) -> bool:
        """Leave a lane, whose limiter has just delayed an attempt, to its owner.

        Return False if this process keeps the lane: as its owner, or because the rates of several
        processes add up as intended. So do their shares of a configured limit, and the attempts of
        a slow lane, which are limited by their concurrency.
        """
        if lane.downstream.has_configured_limits or lane.is_slow or lane.is_tripped:
            return False
        if self.owners.is_own(lane.name):
            return False
        if len(self._handed_over) >= _MAX_HANDED_OVER_LANES:
            return False
        phase = lane.downstream.limiter.phase
        if phase == "test":  # it may show that the failures do not depend on the rate
            return False
        if phase == "slow-start" and self._rejoined.get(lane.name, 0) > now:
            return False
        self._handed_over[lane.name] = now + _HAND_OVER_MS
        return True

    def list_handed_over(self, now: int) -> list[str]:
        """Return the names of lanes of which this process claims no tasks."""
        for name, until in list(self._handed_over.items()):
            lane = self.get(name)
            # With a limit that was set meanwhile, the owner would use only its own share of it.
            is_shared = lane is not None and lane.downstream.has_configured_limits
            if is_shared or self.owners.is_own(name):
                del self._handed_over[name]
            elif until <= now:
                del self._handed_over[name]
                self[name].downstream.limiter.on_recovery(now / 1000)
                self._rejoined[name] = now + _REJOIN_MS
        for name in [name for name, until in self._rejoined.items() if until <= now]:
            del self._rejoined[name]
        return list(self._handed_over)

    def _claim_limit(self, lane: LocalLane) -> int:
        limit = self._lease_limit(lane)
        capacity = limit - lane.leased_count
        # Up to an eighth too many, so that a fast lane needs no claim for each task that ends.
        return 0 if capacity <= 0 else max(capacity, limit // 8)

    def lease_allowance(self, tenant: str, free_leases: int) -> int:
        """Return how many more tasks of a tenant may be leased.

        Without a limit, tasks that wait for a slot because their targets hang would soon have all
        leases of this process.
        """
        state = self._tenants.get(tenant)
        left = self._lease_shares.remaining(free_leases, 0 if state is None else state.leased_count)
        # Each lease also lowers the limit by four. A tenant below its limit gets at least one.
        return max(left // (MAX_SLOTS_PER_FREE_SLOT + 1), 1) if left > 0 else 0

    def tenants_at_lease_limit(self, free_leases: int) -> list[str]:
        """Return the names of tenants at their limit of leases, see `lease_allowance`."""
        tenants = self._tenants.items()
        return [name for name, state in tenants if self.is_at_lease_limit(state, free_leases)]

    def is_at_lease_limit(self, tenant: TenantState, free_leases: int) -> bool:
        """Return whether a tenant is at its limit of leases, see `lease_allowance`."""
        return self._lease_shares.remaining(free_leases, tenant.leased_count) <= 0

    def select_surplus(
        self, leased_tasks: Collection[LeasedTask], free_leases: int
    ) -> list[LeasedTask]:
        """Return waiting tasks of slow lanes whose leases other tenants or fast lanes may need.

        At most half of the leases may be those of such tasks, and none of the reserved leases. The
        tasks belong to the tenants that have the most of them. Without this limit, the first
        tenants whose targets hang could have most of the leases, and each further tenant a few of
        the reserved leases, until none is left.
        """
        waiting: dict[TenantState, list[LeasedTask]] = {}
        for leased_task in leased_tasks:
            if leased_task.lane.is_slow and not leased_task.is_busy:
                waiting.setdefault(leased_task.lane.tenant, []).append(leased_task)
        surplus = sum(map(len, waiting.values())) - self._max_slow_waiting
        surplus = max(surplus, self.reserved_leases - free_leases)
        # Few at a time: tasks of other slow lanes may be leased instead.
        surplus = min(surplus, self.reserved_leases)
        # The number only breaks ties, because tasks cannot be compared.
        heap = [(-len(tasks), number, tasks) for number, tasks in enumerate(waiting.values())]
        heapify(heap)
        selected: list[LeasedTask] = []
        while heap and len(selected) < surplus:
            _, number, tasks = heap[0]
            selected.append(tasks.pop())
            if tasks:
                heapreplace(heap, (-len(tasks), number, tasks))
            else:
                heappop(heap)
        return selected

    def _lease_limit(self, lane: LocalLane) -> int:
        if lane.name in self._handed_over:
            return 0
        limit = self._max_lane_leased
        if lane.is_slow:
            # The more tasks are leased, the fewer may wait in a slow lane, so that leases stay free
            # for fast lanes, also for those of the same tenant.
            waiting = max(1, (self._max_slow_waiting - self._leased_count) // 4)
            limit = min(limit, _MAX_SLOW_LANE_LEASED, lane.running_count + waiting)
        rate = lane.downstream.limiter.rate
        if rate is None:
            return limit
        # Attempts in flight do not wait for the rate: with them, slow attempts would block a lane.
        return min(limit, lane.running_count + 1 + int(rate * _MAX_RATE_DELAY_S))

    def remove_idle(self) -> int:
        """Remove disposable lanes that had no task since the last call; return their number."""
        # Only latency statistics are lost: the time windows of outcomes are empty by then.
        idle = [lane for lane in self.values() if not lane.was_used and self._is_disposable(lane)]
        for lane in self.values():
            lane.was_used = not lane.is_empty
        self._remove(idle)
        return len(idle)

    def _evict_empty(self) -> None:
        """Remove the older half of the disposable lanes; if there are none, of the empty lanes."""
        # A parked lane stays parked: the store reports it when tasks of the lane are claimed.
        empty = [lane for lane in self.values() if lane.is_empty]
        candidates = [lane for lane in empty if self._is_disposable(lane)] or empty
        self._remove(candidates[: len(candidates) // 2 + 1])

    def _is_disposable(self, lane: LocalLane) -> bool:
        """Return whether a lane is empty, neither paused nor parked, and its breaker is closed."""
        is_closed = lane.breaker.state is BreakerState.CLOSED
        # A blocked lane that still has tasks is not idle: its target is tried again and again.
        is_stopped = lane.is_paused or lane.name in self.parked
        return lane.is_empty and is_closed and not is_stopped

    def _remove(self, lanes: list[LocalLane]) -> None:
        for lane in lanes:
            del self[lane.name]
            self.parked.discard(lane.name)
            self.unblock(lane)
            if lane.downstream.limiter.rate is not None:
                self._limits[lane.name] = lane.limits
                if len(self._limits) > MAX_LANES:
                    del self._limits[next(iter(self._limits))]


def _is_retry(task: Task) -> bool:
    # Attempts before the last replay and lost attempts do not make the next attempt a retry.
    return task.attempts > task.attempts_before_replay + task.lost_attempts


def _by_due_time(wait: LaneWait) -> float:
    return inf if wait.due_at is None else wait.due_at


def build_budget(settings: BudgetSettings | None = None) -> SharedBudget | None:
    """Build the retry budget of a lane; None if it is not enabled."""
    settings = settings or BudgetSettings()
    if not settings.enabled:
        return None
    ratio = 0.3 if settings.ratio is None else settings.ratio
    # Ten retries a second are always admitted, so that a lane with only retries makes progress.
    min_per_second = 10.0 if settings.min_per_second is None else settings.min_per_second
    return SharedBudget(ratio, min_per_second)


def build_breaker(settings: BreakerSettings | None = None) -> Breaker:
    """Build the breaker of a lane.

    It opens only when nearly all attempts fail, because the limiter handles a target that refuses
    only some of them. It opens for a short time that grows slowly: a target that was down for T
    seconds is probed again within about 0.5 s + 0.05 T. Every attempt counts as a call, because the
    retries of a task are far apart: each one is new evidence.
    """
    settings = settings or BreakerSettings()
    open_for = (settings.open_for_ms or 500) / 1000
    return Breaker(
        failure_rate=settings.failure_rate or 0.9,
        # A disabled breaker never opens, but still closes if an earlier process opened it.
        min_calls=(settings.min_calls or 20) if settings.enabled else _UNREACHABLE_MIN_CALLS,
        window=(settings.window_ms or 10_000) / 1000,
        min_span=0.0,
        count_retries=True,
        consecutive=settings.consecutive_failures if settings.enabled else None,
        timeouts=3 if settings.enabled else None,
        open_for=open_for,
        growth=1.05,
        max_open=max(open_for, (settings.max_open_ms or 300_000) / 1000),
        probes=settings.probes or 3,
        close_after=1,
    )


def build_downstream(
    name: str, *, max_in_flight: int, build_breaker: Callable[[], Breaker] = build_breaker
) -> LaneDownstream:
    """Build the downstream of a lane, with a breaker, a retry budget and a limiter."""
    return LaneDownstream(name, breaker=build_breaker(), max_in_flight=max_in_flight)
