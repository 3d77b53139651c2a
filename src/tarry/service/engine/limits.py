"""The limits of downstreams that operators configure, with the API or in the settings.

Rate and concurrency are upper bounds of the limits that `AdaptiveLimit` finds. They apply to all
processes together: each process gets an equal share.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from tarry.service.engine.lanes import (
    DEFAULT_LIMITS,
    build_breaker,
    build_budget,
    build_downstream,
)
from tarry.service.store import ConfiguredLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.core.breaker import Breaker
    from tarry.service.engine.lanes import LaneDownstream
    from tarry.wire.tasks import BreakerSettings, DownstreamLimits, LimitsSource

MAX_CONFIGURED_LANES = 1_000
"""Lanes of a tenant whose limits can be set with the API. All of them are kept in memory."""


class LimitPattern:
    """Limits of all lanes whose tenant and name match; `*` matches any characters."""

    def __init__(self, tenant: str, lane: str, limits: DownstreamLimits) -> None:
        self.matches: Callable[[str], object] = re.compile(
            re.escape(f"{tenant}/{lane}").replace(r"\*", ".*")
        ).fullmatch
        self.limits = limits


class LimitTable:
    """The configured limits of all lanes, and the downstreams that have them.

    Limits that were set with the API have priority over the first pattern that matches, but rate
    and concurrency cannot exceed those of the settings: a tenant sets limits for its own lanes,
    while the settings protect the targets and the process from all tenants.
    """

    def __init__(
        self,
        patterns: Sequence[LimitPattern] = (),
        *,
        max_in_flight: int,
        build_breaker: Callable[[], Breaker] = build_breaker,
    ) -> None:
        self.stored: ConfiguredLimits = ConfiguredLimits()  # set with the API
        self._patterns = patterns
        self._max_in_flight = max_in_flight  # of a lane without a configured concurrency
        self._build_breaker = build_breaker

    def find(self, lane: str) -> tuple[DownstreamLimits, LimitsSource]:
        """Return the limits of a lane, and where they are configured."""
        matches = (pattern.limits for pattern in self._patterns if pattern.matches(lane))
        settings_limits = next(matches, DEFAULT_LIMITS)
        limits = self.stored.by_lane.get(lane)
        if limits is None:
            return settings_limits, "DEFAULT" if settings_limits is DEFAULT_LIMITS else "SETTINGS"
        rate, concurrency = limits.rate_per_second, limits.concurrency
        max_rate = settings_limits.rate_per_second
        max_concurrency = settings_limits.concurrency
        if max_rate is not None:
            rate = max_rate if rate is None else min(rate, max_rate)
        if concurrency is not None:
            concurrency = min(concurrency, max_concurrency or self._max_in_flight)
        else:
            concurrency = max_concurrency
        return msgspec.structs.replace(limits, rate_per_second=rate, concurrency=concurrency), "API"

    def build_downstream(self, lane: str) -> LaneDownstream:
        """Build the downstream of a lane."""
        downstream = build_downstream(
            lane, max_in_flight=self._max_in_flight, build_breaker=self._build_breaker
        )
        self.configure(downstream)
        return downstream

    def configure(self, downstream: LaneDownstream) -> None:
        """Apply the current limits of a lane to its downstream; attempts in flight stay counted."""
        old, (limits, _) = downstream.limits, self.find(downstream.name)
        downstream.limits = limits
        if limits.breaker != old.breaker:
            self._replace_breaker(downstream, limits.breaker)
        if limits.budget != old.budget:
            downstream.budget = build_budget(limits.budget)
        count, max_in_flight = self.stored.process_count, self._max_in_flight
        if limits.concurrency is not None:
            max_in_flight = max(1, limits.concurrency // count)
        rate = limits.rate_per_second
        max_rate = None if rate is None else rate / count
        downstream.limiter.configure(max_rate=max_rate, max_in_flight=max_in_flight)

    def _replace_breaker(
        self, downstream: LaneDownstream, settings: BreakerSettings | None
    ) -> None:
        old = downstream.breaker
        breaker = self._build_breaker() if settings is None else build_breaker(settings)
        if old is not None and old.consecutive_opens:  # it is open or half-open
            breaker.half_open(old.consecutive_opens)
        downstream.breaker = breaker
