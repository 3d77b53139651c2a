"""The limits of downstreams that operators configure, with the API or in the settings.

Rate and concurrency are upper bounds of the limits that `AdaptiveLimit` finds. They apply to all
processes together: each process gets an equal share. Those of the settings apply to all lanes of a
tenant and endpoint together, because callers choose the lane keys.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec

from tarry.service.engine.endpoint_caps import EndpointCap
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
    """Limits of all lanes whose tenant and name match; `*` matches any characters.

    The name is matched without its lane key, unless the pattern has one.
    """

    def __init__(self, tenant: str, lane: str, limits: DownstreamLimits) -> None:
        self._matches = re.compile(re.escape(f"{tenant}/{lane}").replace(r"\*", ".*")).fullmatch
        self._has_lane_key = "@" in lane
        self.limits = limits

    def match(self, lane: str) -> str | None:
        """Return the name that the lanes with a common limit share; None if they do not match."""
        name = lane if self._has_lane_key else lane.partition("@")[0]
        return None if self._matches(name) is None else name


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
        self._caps: WeakValueDictionary[str, EndpointCap] = WeakValueDictionary()
        """By the name that their lanes share, see `LimitPattern.match`."""

    def find(self, lane: str) -> tuple[DownstreamLimits, LimitsSource]:
        """Return the limits of a lane, and where they are configured."""
        settings_limits, _ = self._find_pattern(lane)
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

    def _find_pattern(self, lane: str) -> tuple[DownstreamLimits, str]:
        """Return the limits of the first pattern that matches, and the name of their cap."""
        for pattern in self._patterns:
            if (name := pattern.match(lane)) is not None:
                return pattern.limits, name
        return DEFAULT_LIMITS, lane

    def build_downstream(self, lane: str) -> LaneDownstream:
        """Build the downstream of a lane."""
        downstream = build_downstream(
            lane, max_in_flight=self._max_in_flight, build_breaker=self._build_breaker
        )
        limits, name = self._find_pattern(lane)
        if limits.rate_per_second is not None or limits.concurrency is not None:
            cap = self._caps.get(name)
            if cap is None:
                cap = self._caps[name] = EndpointCap()
            downstream.set_cap(cap)
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
        if downstream.cap is not None:
            shared, _ = self._find_pattern(downstream.name)
            rate, concurrency = shared.rate_per_second, shared.concurrency
            downstream.cap.configure(
                max_rate=None if rate is None else rate / count,
                max_in_flight=None if concurrency is None else max(1, concurrency // count),
            )

    def _replace_breaker(
        self, downstream: LaneDownstream, settings: BreakerSettings | None
    ) -> None:
        old = downstream.breaker
        breaker = self._build_breaker() if settings is None else build_breaker(settings)
        if old is not None and old.consecutive_opens:  # it is open or half-open
            breaker.half_open(old.consecutive_opens)
        downstream.breaker = breaker
