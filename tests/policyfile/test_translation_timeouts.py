"""Tests for the timeouts of imported policies."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.policyfile.grpc import from_grpc, to_grpc
from tarry.policyfile.istio import from_istio, to_istio
from tests.policyfile.builders import difference_text
from tests.policyfile.resources import virtual_service

GRPC_RETRY = {
    "maxAttempts": 3,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def import_grpc(**entry: Any) -> Any:
    """Import a gRPC service config with one entry for all calls."""
    return from_grpc({"methodConfig": [{"name": [{}], **entry}]})


def import_istio(**route: Any) -> Any:
    """Import a VirtualService with one route."""
    return from_istio([virtual_service(route)])


def timeouts(result: Any) -> tuple[float | None, float | None]:
    """Return the total budget and the attempt timeout of the imported policy."""
    policy: Policy = result.defence.policy
    return policy.total_budget, policy.attempt_timeout


@pytest.mark.parametrize(
    "result",
    [import_grpc(timeout="1s"), import_istio(timeout="1s", retries={"attempts": 0})],
    ids=["grpc", "istio"],
)
def test_call_timeout_limits_the_only_attempt(result: Any) -> None:
    """With one attempt, the timeout of a call becomes the attempt timeout: no difference."""
    assert (None, 1.0) == timeouts(result)
    assert () == result.differences


@pytest.mark.parametrize(
    ("result", "path"),
    [
        (import_grpc(timeout="1s", retryPolicy=GRPC_RETRY), "methodConfig[0].timeout"),
        (import_istio(timeout="1s", retries={"attempts": 2}), "spec.http[0].timeout"),
        (
            import_istio(timeout="1s", retries={"attempts": 2, "perTryTimeout": "5s"}),
            "spec.http[0].timeout",
        ),
    ],
    ids=["grpc", "istio", "istio-longer-try"],
)
def test_call_timeout_limits_each_attempt(result: Any, path: str) -> None:
    """With retries, the timeout of a call limits each attempt too, which is a difference."""
    assert (1.0, 1.0) == timeouts(result)
    assert (
        f"{path} = 1: no attempt starts after this time, but tarry lets a running attempt "
        "finish: at most 2 s in total" == difference_text(result, path)
    )


def test_shorter_timeout_of_an_attempt_is_kept() -> None:
    """A perTryTimeout below the timeout is kept as the attempt timeout."""
    result = import_istio(timeout="2s", retries={"attempts": 2, "perTryTimeout": "500ms"})

    assert (2.0, 0.5) == timeouts(result)
    assert difference_text(result, "spec.http[0].timeout").endswith("at most 2.5 s in total")


@pytest.mark.parametrize(
    "result",
    [import_grpc(retryPolicy=GRPC_RETRY), import_istio(timeout="0s", retries={"attempts": 2})],
    ids=["grpc", "istio"],
)
def test_no_timeout(result: Any) -> None:
    """A document without a timeout is imported without timeouts."""
    assert (None, None) == timeouts(result)


def test_attempt_timeout_survives_a_round_trip() -> None:
    """Export and import keep the attempt timeout of a policy with one attempt."""
    defence = Defence(Policy(max_attempts=1, attempt_timeout=0.5))

    imported = (
        from_grpc(to_grpc(defence).documents[0]),
        from_istio(to_istio(defence, host="payments").documents),
    )

    assert [(None, 0.5)] * 2 == [timeouts(result) for result in imported]
