"""The time that a source gives a call, in a policy that must be bounded by it."""

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


def grpc(**entry: Any) -> Any:
    """Import an entry for all calls."""
    return from_grpc({"methodConfig": [{"name": [{}], **entry}]})


def istio(**route: Any) -> Any:
    """Import the only route of a VirtualService."""
    return from_istio([virtual_service(route)])


def times(made: Any) -> tuple[float | None, float | None]:
    """Return the two bounds of the imported policy."""
    policy: Policy = made.defence.policy
    return policy.total_budget, policy.attempt_timeout


@pytest.mark.parametrize(
    "made",
    [grpc(timeout="1s"), istio(timeout="1s", retries={"attempts": 0})],
    ids=["grpc", "istio"],
)
def test_timeout_of_one_attempt_is_that_of_the_attempt(made: Any) -> None:
    """A total budget would let the only attempt run without end; nothing is lost."""
    assert (None, 1.0) == times(made)
    assert () == made.differences


@pytest.mark.parametrize(
    ("made", "path"),
    [
        (grpc(timeout="1s", retryPolicy=GRPC_RETRY), "methodConfig[0].timeout"),
        (istio(timeout="1s", retries={"attempts": 2}), "spec.http[0].timeout"),
        (
            istio(timeout="1s", retries={"attempts": 2, "perTryTimeout": "5s"}),
            "spec.http[0].timeout",
        ),
    ],
    ids=["grpc", "istio", "istio-longer"],
)
def test_timeout_of_several_attempts_bounds_each(made: Any, path: str) -> None:
    """No attempt starts after the timeout and none takes longer; the rest is reported."""
    assert (1.0, 1.0) == times(made)
    assert (
        f"{path} = 1: no attempt starts after this time, but tarry lets a running attempt "
        "finish: at most 2 s in total" == difference_text(made, path)
    )


def test_shorter_timeout_of_an_attempt_is_kept() -> None:
    """What Istio says of one attempt holds, and makes the worst case shorter."""
    made = istio(timeout="2s", retries={"attempts": 2, "perTryTimeout": "500ms"})

    assert (2.0, 0.5) == times(made)
    assert difference_text(made, "spec.http[0].timeout").endswith("at most 2.5 s in total")


@pytest.mark.parametrize(
    "made",
    [grpc(retryPolicy=GRPC_RETRY), istio(timeout="0s", retries={"attempts": 2})],
    ids=["grpc", "istio"],
)
def test_no_timeout_is_none(made: Any) -> None:
    """Where the source has no bound, none is made up."""
    assert (None, None) == times(made)


def test_timeouts_come_back_as_they_were() -> None:
    """The only attempt of a policy keeps its timeout on the way there and back."""
    defence = Defence(Policy(max_attempts=1, attempt_timeout=0.5))

    there_and_back = (
        from_grpc(to_grpc(defence).documents[0]),
        from_istio(to_istio(defence, host="payments").documents),
    )

    assert [(None, 0.5)] * 2 == [times(made) for made in there_and_back]
