"""What the sources have in common: their clocks end a call, ours does not start an attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.explain import duration
from tarry.wire.losses import Loss

if TYPE_CHECKING:
    from tarry.core.policy import Policy


def within(policy: Policy, timeout: float | None, path: str, losses: list[Loss]) -> Policy:
    """Bound a policy by the time that its source gives the call, all attempts together.

    A total budget alone bounds no attempt that has started, so each has a timeout, too.
    """
    if timeout is None:
        return policy
    attempt = min(timeout, policy.attempt_timeout or timeout)
    if policy.max_attempts == 1:
        return policy.replace(attempt_timeout=attempt)
    instead = (
        "no attempt starts after it, but tarry lets the one that runs end: "
        f"{duration(timeout + attempt)} in all at most"
    )
    losses.append(Loss(path, timeout, instead))
    return policy.replace(total_budget=timeout, attempt_timeout=attempt)


def hinted(path: str, name: str, source: str, max_hint: float) -> Loss:
    """Say that the source does something else when a server asks for a wait."""
    return Loss(path, name, f"{source}; tarry waits for up to {duration(max_hint)}, or gives up")
