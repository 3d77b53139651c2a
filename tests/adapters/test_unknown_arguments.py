"""Arguments that the adapters for HTTP clients do not have."""

from __future__ import annotations

from typing import Any

import pytest

import tarry
from tarry.adapters.aiohttp import RetryMiddleware
from tarry.adapters.httpx import AsyncRetryTransport, RetryTransport
from tarry.adapters.requests import RetryAdapter


@pytest.mark.parametrize(
    "adapter", [RetryAdapter, RetryTransport, AsyncRetryTransport, RetryMiddleware]
)
@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("total", "use policy=tarry.Policy(max_attempts=...)"),
        ("max_attempts", "use policy=tarry.Policy(max_attempts=...)"),
        ("status_forcelist", "use policy=tarry.Policy(retryable_statuses=...)"),
        ("backoff_factor", "use policy=tarry.Policy(initial_delay=...)"),
        ("allowed_methods", 'idempotent methods are retried, others with idempotency_key="auto"'),
        ("zzz", "it has, for example, policy, downstream, idempotency_key, hand_off"),
        ("polcy", "did you mean 'policy'?"),
    ],
)
def test_unknown_argument(adapter: Any, argument: str, advice: str) -> None:
    """The error for an argument that an adapter does not have says what to use instead."""
    with pytest.raises(tarry.ConfigurationTypeError) as caught:
        adapter(**{argument: 1})

    assert f"{adapter.__name__} has no argument {argument}=; {advice}" == str(caught.value)
