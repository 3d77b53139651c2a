"""Secrets are redacted in the attempt log before it is stored."""

from __future__ import annotations

import asyncio

import pytest

from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.model import AttemptRecord
from tests.service.engine.harness import EngineHarness, FakeTarget, run

URL = "http://a.example:80/hook?user=7&api_key=query%2Fsecret"
HEADERS = {"Authorization": "Bearer header-secret", "X-Order": "order-7"}


def log_attempt(response: DeliveryResult) -> AttemptRecord:
    """Return the stored log entry of a failed attempt whose request has secrets."""
    stored: list[AttemptRecord] = []

    async def main() -> None:
        harness = EngineHarness(FakeTarget(response))
        overrides = {"maxAttempts": 1}
        new_task = harness.new_task(URL, headers=HEADERS, overrides=overrides)
        [task] = await harness.add(new_task)
        await asyncio.sleep(1)
        stored.extend(await harness.list_attempts(task))

    run(main)
    [attempt] = stored
    return attempt


def test_secrets_that_a_target_returns_are_not_stored() -> None:
    """Values of secret headers and query parameters are redacted in the excerpt."""
    text = "order-7 header-secret query/secret query%2Fsecret Bearer header-secret"
    attempt = log_attempt(DeliveryResult(status=500, excerpt=text.encode()))
    assert "order-7 [redacted] [redacted] [redacted] [redacted]" == attempt.response_excerpt


def test_secrets_of_the_target_are_not_stored() -> None:
    """Values of JSON members with a secret name are redacted in the excerpt."""
    excerpt = b'{"error": "expired", "access_token": "t-1"}'
    attempt = log_attempt(DeliveryResult(status=500, excerpt=excerpt))
    assert '{"error": "expired", "access_token": "[redacted]"}' == attempt.response_excerpt


@pytest.mark.parametrize(
    "response",
    [
        DeliveryResult(fault=Fault.INVALID, error="bad header header-secret"),
        DeliveryResult(status="INTERNAL", error="bad header header-secret"),
    ],
    ids=["fault", "gRPC status"],
)
def test_secrets_in_an_error_are_not_stored(response: DeliveryResult) -> None:
    """The error of an attempt is redacted like the excerpt."""
    assert "bad header [redacted]" == log_attempt(response).error_message


@pytest.mark.parametrize("start", [500, 505, 511, 1015])
def test_no_part_of_a_secret_is_stored(start: int) -> None:
    """Secrets are redacted before the text is cut, so that no beginning of a secret is left."""
    text = "." * start + "header-secret" + "." * 600
    for response in (
        DeliveryResult(status=500, excerpt=text.encode()),
        DeliveryResult(status="INTERNAL", error=text),
    ):
        attempt = log_attempt(response)
        stored = attempt.response_excerpt or attempt.error_message or ""
        assert ("." * start + "[redacted]" + "." * 600)[:512] == stored


def test_excerpt_is_marked_as_truncated_if_redaction_shortens_it() -> None:
    """An excerpt is truncated although the redacted text has less than 512 characters."""
    text = '{"token": "' + "x" * 3000
    attempt = log_attempt(DeliveryResult(status=500, excerpt=text[:2048].encode(), truncated=True))
    assert ('{"token": "[redacted]', True) == (attempt.response_excerpt, attempt.response_truncated)
