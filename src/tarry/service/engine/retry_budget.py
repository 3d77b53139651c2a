"""The retry budget of a lane, which all processes share and which is kept over a restart.

A budget has a value: each call adds `ratio`, each retry takes 1, which is refunded if the retry
succeeds, and the value decays to 1/e in ten seconds. So the value is the number of retries that are
still allowed for the calls of the last ten seconds. In addition, `min_per_second` retries per
second are admitted.

The value is in the row of the lane. While attempts of the lane fail or are retried, each process
adds its changes to that value once a second, and may then use an equal share of the balance.
"""

from __future__ import annotations

from math import inf

from tarry.core.outcome import Kind, Outcome
from tarry.service.store import BUDGET_DECAY_MS, decay_budget

_SUCCESS = Kind.SUCCESS
_DECAY_INTERVAL_S = 0.5


class SharedBudget:
    """The share of this process in the retry budget of a lane (a `tarry.core.budget.Budget`)."""

    __slots__ = (
        "_change", "_decayed_at", "_min_retries", "_min_retries_share", "_ratio", "_value",
        "is_outdated",
    )  # fmt: skip

    def __init__(self, ratio: float, min_per_second: float) -> None:
        self._ratio = ratio
        self._min_retries = self._min_retries_share = min_per_second * BUDGET_DECAY_MS / 1000
        # Until the value in the store is known, the retries of one second are admitted.
        self._value = min_per_second - self._min_retries
        self._change = 0.0  # of the value, by this process since the last exchange
        self._decayed_at = -inf
        self.is_outdated: bool = False
        """Whether an exchange is needed, because attempts have failed or were retried."""

    def cost(self, outcome: Outcome) -> float:  # noqa: ARG002 - part of the protocol
        """Return 1: every retry has the same cost."""
        return 1.0

    def balance(self, now: float) -> float:
        """Return how many retries this process can start now."""
        self._decay(now)
        return max(0.0, self._min_retries_share + self._value)

    def withdraw(self, cost: float, now: float) -> bool:
        """Charge a retry if the balance allows it."""
        self.is_outdated = True
        if self.balance(now) < cost:
            return False
        self.deposit(-cost, now)
        return True

    def deposit(self, amount: float, now: float) -> None:  # noqa: ARG002 - see `Budget`
        """Refund a retry that never started."""
        self._value += amount
        self._change += amount

    def record(self, outcome: Outcome, paid: float, now: float) -> None:
        """Count a call when its first attempt ends."""
        if now >= self._decayed_at + _DECAY_INTERVAL_S:  # not for each attempt, to save time
            self._decay(now)
        if not paid:
            self.deposit(self._ratio, now)
        elif outcome.kind is _SUCCESS:
            # Retries that succeed are no overload. Without the refund, the tasks of a target that
            # refuses the first attempt of each task are delivered at 10 per second.
            self.deposit(paid, now)
        if outcome.kind is not _SUCCESS:
            self.is_outdated = True

    def take_change(self, now: float) -> float:
        """Return the change of the value since the last call."""
        self._decay(now)
        change, self._change, self.is_outdated = self._change, 0.0, False
        return change

    def adopt(self, value: float, process_count: int) -> None:
        """Continue with `value` from the store, of which each process gets an equal share."""
        self._min_retries_share = self._min_retries / process_count
        self._value = value / process_count + self._change

    def _decay(self, now: float) -> None:
        elapsed_ms = (now - self._decayed_at) * 1000
        self._decayed_at = now
        if 0 < elapsed_ms < inf:
            remaining_share = decay_budget(1.0, elapsed_ms)
            self._value *= remaining_share
            self._change *= remaining_share
