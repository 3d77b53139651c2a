"""Defaults are equal in the settings and in the components that use them."""

from __future__ import annotations

from tarry.service import defaults
from tarry.service.api.context import ApiLimits
from tarry.service.engine.context import EngineLimits
from tarry.service.settings import Settings


def test_the_engine_has_the_defaults_of_the_settings() -> None:
    """The in-flight limits of the engine are those of the settings."""
    settings, limits = Settings(), EngineLimits()
    assert settings.in_flight == limits.max_running_attempts == 2_048
    assert settings.lane_in_flight == limits.max_lane_running_attempts == 128


def test_unfinished_tasks_and_lanes_of_a_tenant_are_limited_by_default() -> None:
    """The engine has the limits of the settings."""
    settings, limits = Settings(), EngineLimits()
    assert 1_000_000 == settings.tenant_pending == limits.max_tenant_unfinished_tasks
    assert 100_000 == settings.tenant_lanes == limits.max_tenant_lanes


def test_policy_versions_of_a_tenant_are_limited_by_default() -> None:
    """The API has the limit of the settings."""
    assert 1_000 == Settings().tenant_policy_versions == ApiLimits().max_tenant_policy_versions


def test_the_default_lease_outlasts_the_longest_attempt_by_twice_the_grace() -> None:
    """An attempt times out two grace periods before its lease, so its result can be stored."""
    settings = Settings()
    assert (
        settings.lease_duration_ms
        == settings.max_attempt_timeout_ms + 2 * defaults.LEASE_GRACE_MS
        == 70_000
    )
