"""The limits of the API."""

from __future__ import annotations

from tarry.service.api.context import ApiLimits
from tarry.service.settings import Settings


def test_the_api_has_the_defaults_of_the_settings() -> None:
    """Request size, inline body size and attempt timeout are those of the settings."""
    settings, limits = Settings(), ApiLimits()
    assert settings.max_body_bytes == limits.max_request_bytes == 10 << 20
    assert settings.inline_body_bytes == limits.inline_body_bytes == 16 << 10
    assert settings.max_attempt_timeout_ms == limits.max_attempt_timeout_s * 1000 == 60_000
