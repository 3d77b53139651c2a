"""`GET /overview`: attempts, finished tasks, scheduling lag and backlog over time.

Without API keys, and for the operator, the figures are those of all tenants, from the series of
`tarry.service.engine.series`. These are not kept for each tenant, because their number would not be
bounded. Other tenants get what the store counts for them: attempts per minute, and the backlog.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from tarry.service.api.messages import ApiResponse
from tarry.service.api.routing import Operation
from tarry.service.engine.metrics import DELAY_BUCKETS_MS, SHORT_BUCKETS_MS
from tarry.service.model import Status
from tarry.service.records.series import SERIES_RETENTION_MS
from tarry.wire.tasks import WaitReason  # noqa: TC001 - msgspec reads the type

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest
    from tarry.service.engine.series import Backlog

_MIN_REUSE_S = 0.4
"""How long a response is used again: many open dashboards cost no more than one. A page that reads
every 0.5 s shows a change within a second, although another page may have read just before."""
_MAX_LOAD = 0.05
"""A response that takes long to build is used longer, so that building takes this share of time."""
_JSON_HEADERS = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]


class TimeRange(StrEnum):
    """The length of the time up to now."""

    QUARTER_HOUR = "15m"
    HOUR = "1h"
    THREE_HOURS = "3h"
    DAY = "24h"
    WEEK = "7d"


class _Resolution(NamedTuple):
    length_ms: int
    step_ms: int


_RESOLUTIONS = {
    TimeRange.QUARTER_HOUR: _Resolution(900_000, 10_000),
    TimeRange.HOUR: _Resolution(3_600_000, 10_000),
    TimeRange.THREE_HOURS: _Resolution(10_800_000, 30_000),
    TimeRange.DAY: _Resolution(86_400_000, 300_000),
    TimeRange.WEEK: _Resolution(604_800_000, 1_800_000),
}
"""At most 361 points."""
_MINUTE_MS = 60_000
_MAX_CACHED_RESPONSES = 200


class OverviewQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query parameters of the overview."""

    range: TimeRange = TimeRange.HOUR


class _OverviewPart(msgspec.Struct, rename="camel", kw_only=True, gc=False):
    pass


class CurrentBacklog(_OverviewPart):
    """The tasks that are stored now."""

    pending: int
    in_flight: int
    dead_letters: int
    oldest_due_age_ms: int
    """Time since the earliest due time of the tasks that wait, also of parked and paused lanes."""
    oldest_due_waiting_for: WaitReason | None = None
    """Why this task waits; null: no task is due."""


class OverviewPoint(_OverviewPart):
    """What happened in one interval."""

    at: int
    """The start of the interval, in epoch ms."""
    attempts: dict[str, int]
    """Number of attempts by outcome."""
    succeeded_first: int | None = None
    """Tasks that succeeded with their first attempt. This and the next fields are null if the scope
    is `tenant`."""
    succeeded_retried: int | None = None
    """Tasks that succeeded with a later attempt."""
    exhausted: int | None = None
    """Tasks that became dead letters."""
    cancelled: int | None = None
    lag_p50_ms: float | None = None
    """Median of the scheduling lag, the time from the due time of an attempt to its start, without
    the time in which its lane was parked, paused or at its limits. It is estimated from a
    histogram with buckets up to 60 s; null without attempts."""
    lag_p99_ms: float | None = None
    pending: float | None = None
    """Average number of PENDING tasks; null if it was not sampled. Likewise for the next fields."""
    in_flight: float | None = None
    dead_letters: float | None = None
    oldest_due_age_ms: float | None = None


class DelayBucket(_OverviewPart):
    """The number of retries with a delay up to `upToMs`, and above that of the previous bucket."""

    up_to_ms: int | None
    """Null: no upper bound."""
    count: int


class Overview(_OverviewPart):
    """The state of the service over a time range, for all processes."""

    scope: Literal["all", "tenant"]
    """Whether the figures are those of all tenants, or of the tenant of the API key. The attempts
    of a tenant are counted by minute, for one day."""
    range: TimeRange
    from_: int = msgspec.field(name="from")
    to: int
    step_ms: int
    """The length of the interval of a point."""
    points: list[OverviewPoint]
    """In the order of time. Intervals in which nothing was recorded are omitted."""
    current: CurrentBacklog
    lag_p50_ms: float | None = None
    """Scheduling lag over the whole range; null without attempts, or if `scope` is `tenant`."""
    lag_p99_ms: float | None = None
    delays: list[DelayBucket] = []
    """Delays before retries, as they were drawn: from the first to the last bucket with retries."""


class _CachedResponse(NamedTuple):
    body: bytes
    used_until_s: float


class OverviewResource:
    """The operation on the series of the service."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._responses: dict[tuple[str | None, TimeRange], _CachedResponse] = {}
        """By tenant (None: all tenants) and range."""
        self._lock = asyncio.Lock()  # one response is built at a time

    @Operation("GET", "/overview", "getOverview", Overview, query=OverviewQuery)
    async def get_overview(self, request: ApiRequest) -> ApiResponse:
        """Get attempts, finished tasks, scheduling lag and backlog over time."""
        time_range = request.parse_query(OverviewQuery).range
        context = self._context
        reads_all = not context.require_api_keys or request.tenant == context.operator_tenant
        tenant = None if reads_all else request.tenant
        async with self._lock:
            started_at = context.monotonic()
            cached = self._responses.get((tenant, time_range))
            if cached is None or started_at >= cached.used_until_s:
                build = (
                    self._build(time_range) if reads_all else self._build_for(tenant, time_range)
                )
                body = msgspec.json.encode(await build)
                ended_at = context.monotonic()
                reuse_s = max(_MIN_REUSE_S, (ended_at - started_at) / _MAX_LOAD)
                cached = _CachedResponse(body, ended_at + reuse_s)
                self._cache(tenant, time_range, cached)
        return ApiResponse(200, cached.body, _JSON_HEADERS)

    def _cache(self, tenant: str | None, time_range: TimeRange, response: _CachedResponse) -> None:
        self._responses.pop((tenant, time_range), None)
        if len(self._responses) >= _MAX_CACHED_RESPONSES:
            del self._responses[next(iter(self._responses))]  # the oldest
        self._responses[tenant, time_range] = response

    async def _build_for(self, tenant: str | None, time_range: TimeRange) -> Overview:
        """Return the overview of one tenant."""
        length_ms, step_ms = _RESOLUTIONS[time_range]
        step_ms = max(step_ms, _MINUTE_MS)
        backlog = await self._context.engine.series.read_backlog(tenant)
        now = self._context.engine.clock.now_ms()
        start = _start_of_range(now, length_ms, step_ms)
        attempts: dict[int, Counter[str]] = {}
        for minute in await self._context.store.attempts_per_minute(tenant, since=start):
            at = minute.minute - minute.minute % step_ms
            attempts.setdefault(at, Counter()).update(minute.counts_by_outcome)
        return Overview(
            scope="tenant",
            range=time_range,
            from_=start,
            to=now,
            step_ms=step_ms,
            points=[
                OverviewPoint(at=at, attempts=dict(sorted(counts.items())))
                for at, counts in sorted(attempts.items())
            ],
            current=_current_backlog(backlog),
        )

    async def _build(self, time_range: TimeRange) -> Overview:
        """Return the overview of all tenants."""
        engine = self._context.engine
        length_ms, step_ms = _RESOLUTIONS[time_range]
        stored_step_ms = max(step for step in SERIES_RETENTION_MS if step_ms % step == 0)
        backlog = await engine.series.read_backlog()
        now = engine.clock.now_ms()
        start = _start_of_range(now, length_ms, step_ms)
        sums: dict[int, Counter[str]] = {}
        for point in await engine.series.read(stored_step_ms, start):
            sums.setdefault(point.at - point.at % step_ms, Counter()).update(point.sums)
        totals: Counter[str] = Counter()
        for counts in sums.values():
            totals.update(counts)
        return Overview(
            scope="all",
            range=time_range,
            from_=start,
            to=now,
            step_ms=step_ms,
            points=[_build_point(at, counts) for at, counts in sorted(sums.items())],
            lag_p50_ms=estimate_lag(totals, 0.5),
            lag_p99_ms=estimate_lag(totals, 0.99),
            delays=[
                DelayBucket(up_to_ms=None if math.isinf(bound) else int(bound), count=count)
                for bound, count in _read_histogram(totals, "delay", DELAY_BUCKETS_MS)
            ],
            current=_current_backlog(backlog),
        )


def _start_of_range(now: int, length_ms: int, step_ms: int) -> int:
    """Return the start of the interval in which a range up to now begins."""
    return (now - length_ms) // step_ms * step_ms


def _build_point(at: int, sums: Mapping[str, int]) -> OverviewPoint:
    samples = sums.get("samples", 0)

    def average(name: str) -> float | None:
        return round(sums.get(f"backlog.{name}", 0) / samples, 1) if samples else None

    def count(status: str) -> int:
        names = (f"finished.{status}.first", f"finished.{status}.retried")
        return sum(sums.get(name, 0) for name in names)

    return OverviewPoint(
        at=at,
        attempts={
            name.removeprefix("attempts."): number
            for name, number in sorted(sums.items())
            if name.startswith("attempts.")
        },
        succeeded_first=sums.get("finished.succeeded.first", 0),
        succeeded_retried=sums.get("finished.succeeded.retried", 0),
        exhausted=count("exhausted"),
        cancelled=count("cancelled"),
        lag_p50_ms=estimate_lag(sums, 0.5),
        lag_p99_ms=estimate_lag(sums, 0.99),
        pending=average(Status.PENDING.name),
        in_flight=average(Status.IN_FLIGHT.name),
        dead_letters=average(Status.EXHAUSTED.name),
        oldest_due_age_ms=average("age_ms"),
    )


def _current_backlog(backlog: Backlog) -> CurrentBacklog:
    counts = backlog.task_counts
    return CurrentBacklog(
        pending=counts[Status.PENDING],
        in_flight=counts[Status.IN_FLIGHT],
        dead_letters=counts[Status.EXHAUSTED],
        oldest_due_age_ms=backlog.oldest_due_age_ms,
        oldest_due_waiting_for=backlog.waiting_for,
    )


def _read_histogram(
    sums: Mapping[str, int], name: str, bounds_ms: Sequence[int]
) -> list[tuple[float, int]]:
    """Return the buckets of a histogram, from the first to the last that is not empty.

    A bucket is its upper bound in ms and its count.
    """
    counts = {
        bound: sums.get(f"{name}.{bound}", 0) for bound in (*map(str, bounds_ms), str(math.inf))
    }
    buckets = [(float(bound), count) for bound, count in counts.items()]
    used = [index for index, (_, count) in enumerate(buckets) if count]
    return buckets[used[0] : used[-1] + 1] if used else []


def estimate_lag(sums: Mapping[str, int], quantile: float) -> float | None:
    """Return a quantile of the scheduling lag in ms; None without attempts.

    It is interpolated within its bucket. A lag above the largest bound is reported as that bound.
    """
    bounds = SHORT_BUCKETS_MS
    buckets = _read_histogram(sums, "lag", bounds)
    rank = quantile * sum(count for _, count in buckets)
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                break
            lower = max((other for other in bounds if other < bound), default=0)
            return round(lower + (bound - lower) * rank / count, 3)
        rank -= count
    return float(bounds[-1]) if buckets else None
