"""Each default of the service has one value, wherever it is used."""

from __future__ import annotations

from tarry.service import defaults
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tarry.service.engine.context import EngineLimits
from tarry.service.settings import Settings


def test_the_engine_has_the_defaults_of_the_settings() -> None:
    """The in-flight limits are those that the operator sees."""
    settings, limits = Settings(), EngineLimits()
    assert settings.in_flight == limits.max_running_attempts == 512
    assert settings.lane_in_flight == limits.max_lane_running_attempts == 128


def test_the_http_client_has_the_default_of_the_settings() -> None:
    """Response bytes that are read."""
    delivery = HttpDeliveryClient(Guard())
    assert Settings().max_response_bytes == delivery._max_response_bytes == 1 << 20


def test_the_default_lease_outlasts_the_longest_attempt_by_twice_the_grace() -> None:
    """The worker ends an attempt one grace period before its lease, and the result is stored."""
    settings = Settings()
    assert (
        settings.lease_duration_ms
        == settings.max_attempt_timeout_ms + 2 * defaults.LEASE_GRACE_MS
        == 70_000
    )
