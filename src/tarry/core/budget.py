"""Retry budgets: limits on the load that retries add while a dependency fails.

A budget is any object with the five methods of `Budget`. Costs and balances are in a unit that the
budget chooses, such as tokens. A budget belongs to one `Downstream` (the state kept for one
dependency), whose lock is held during every method of the budget. A method that calls the
`Downstream` would deadlock.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tarry.core.checks import (
    Seconds,
    check_at_least,
    check_count,
    check_one_of,
    check_positive,
    check_ratio,
    to_seconds,
)
from tarry.core.outcome import Kind, Outcome
from tarry.core.sliding_window import SlidingWindow
from tarry.errors import ConfigurationError

_SUCCESS, _THROTTLED = Kind.SUCCESS, Kind.THROTTLED
_CALLS, _RETRIES = range(2)
"""The columns of the sliding window of a `RatioBudget`, one for each kind of event."""


class Budget(Protocol):
    """The interface of a retry budget."""

    def cost(self, outcome: Outcome) -> float:
        """Return the cost of a retry after this outcome."""
        ...

    def balance(self, now: float) -> float:
        """Return the amount that can be withdrawn now."""
        ...

    def withdraw(self, cost: float, now: float) -> bool:
        """Withdraw `cost` if the balance is high enough; return whether it was withdrawn."""
        ...

    def deposit(self, amount: float, now: float) -> None:
        """Refund a withdrawal whose retry never started."""
        ...

    def record(self, outcome: Outcome, paid: float, now: float) -> None:
        """Record that an attempt ended; `paid` is its cost, 0 for a first attempt."""
        ...


class TokenPrices(NamedTuple):
    """The tokens that a retry costs and that a success earns."""

    retry: float
    """Cost of a retry after a failure that is neither a throttled attempt nor a time-out."""
    retry_after_throttling: float
    retry_after_timeout: float
    first_attempt_success: float
    """Tokens earned by a success of the first attempt."""
    retry_success: float | None
    """Tokens earned by a success after retries; None if it earns the cost of the last retry."""


PRICES = {
    "classic": TokenPrices(
        retry=5,
        retry_after_throttling=5,
        retry_after_timeout=5,
        first_attempt_success=5,
        retry_success=5,
    ),
    "aws-2020": TokenPrices(
        retry=5,
        retry_after_throttling=5,
        retry_after_timeout=10,
        first_attempt_success=1,
        retry_success=None,
    ),
    "aws-2026": TokenPrices(
        retry=14,
        retry_after_throttling=5,
        retry_after_timeout=14,
        first_attempt_success=1,
        retry_success=None,
    ),
}


class TokenBudget:
    """A token bucket like that of the AWS SDKs: retries cost tokens, successes earn tokens.

    `classic`: a retry costs 5, a success earns 5. `aws-2020`: a retry costs 5, or 10 after a
    timeout; a success of the first attempt earns 1; a success after retries earns the cost of the
    last retry. `aws-2026`: like `aws-2020`, but a retry costs 14, or 5 after throttling.
    """

    __slots__ = ("_capacity", "_prices", "_tokens")

    def __init__(self, preset: str = "classic", *, capacity: float = 500) -> None:
        check_one_of("preset", preset, PRICES)
        self._prices = PRICES[preset]
        self._capacity = self._tokens = check_at_least("capacity", capacity, 0)

    def cost(self, outcome: Outcome) -> float:
        """Return the cost of a retry after this outcome."""
        if outcome.kind is _THROTTLED:
            return self._prices.retry_after_throttling
        return self._prices.retry_after_timeout if outcome.timeout else self._prices.retry

    def balance(self, now: float) -> float:  # noqa: ARG002 - part of the protocol
        """Return the tokens in the bucket."""
        return self._tokens

    def withdraw(self, cost: float, now: float) -> bool:  # noqa: ARG002 - see `Budget`
        """Take `cost` tokens if the bucket has them."""
        if self._tokens < cost:
            return False
        self._tokens -= cost
        return True

    def deposit(self, amount: float, now: float) -> None:  # noqa: ARG002 - see `Budget`
        """Refund tokens, up to the capacity."""
        self._tokens = min(self._capacity, self._tokens + amount)

    def record(self, outcome: Outcome, paid: float, now: float) -> None:  # noqa: ARG002 - see `Budget`
        """Add tokens after a success."""
        if outcome.kind is not _SUCCESS or self._tokens >= self._capacity:
            return
        prices = self._prices
        if not paid:
            earned = prices.first_attempt_success
        else:
            earned = paid if prices.retry_success is None else prices.retry_success
        self._tokens = min(self._capacity, self._tokens + earned)


class RatioBudget:
    """A limit on retries relative to recent calls, like that of Finagle.

    In the last `window` seconds there are at most `ratio` times as many retries as calls. In
    addition, `min_per_second` retries per second are allowed for clients with few calls.
    """

    __slots__ = ("_min_retries_per_window", "_retries_per_call", "_window")

    def __init__(
        self, ratio: float = 0.1, *, window: Seconds = 10.0, min_per_second: float = 1.0
    ) -> None:
        self._retries_per_call = check_ratio("ratio", ratio)
        window_s = check_positive("window", to_seconds(window))
        self._window = SlidingWindow(window_s, 2)
        min_per_second = check_at_least("min_per_second", min_per_second, 0)
        self._min_retries_per_window = min_per_second * window_s

    def cost(self, outcome: Outcome) -> float:  # noqa: ARG002 - part of the protocol
        """Return 1: every retry has the same cost."""
        return 1.0

    def balance(self, now: float) -> float:
        """Return the number of retries that can still start in this window."""
        window = self._window_at(now)
        earned = self._min_retries_per_window + self._retries_per_call * window.total(_CALLS)
        return max(0.0, earned - window.total(_RETRIES))

    def withdraw(self, cost: float, now: float) -> bool:
        """Count one retry in the window if the balance allows it."""
        if self.balance(now) < cost:
            return False
        self._window.current[_RETRIES] += 1
        return True

    def deposit(self, amount: float, now: float) -> None:  # noqa: ARG002 - see `Budget`
        """Remove one retry from the counts, if the window still has one."""
        self._window_at(now).undo(_RETRIES)

    def record(self, outcome: Outcome, paid: float, now: float) -> None:  # noqa: ARG002 - see `Budget`
        """Count a call when its first attempt ends."""
        if not paid:
            window = self._window
            if now >= window.bucket_end:
                window.advance(now)
            window.current[_CALLS] += 1

    def _window_at(self, now: float) -> SlidingWindow:
        window = self._window
        if now >= window.bucket_end:
            window.advance(now)
        return window


class ThrottleBudget:
    """The retry throttle of gRPC (gRFC A6): retries only while more than half the tokens are left.

    Each failure takes one token, each success adds `token_ratio` tokens. Tokens are counted in
    thousandths, as the specification requires.
    """

    __slots__ = ("_capacity", "_millitokens", "_millitokens_per_success")

    _MAX_TOKENS = 1000

    def __init__(self, max_tokens: int = 10, token_ratio: float = 0.1) -> None:
        self._capacity = self._millitokens = check_count("max_tokens", max_tokens) * 1000
        if max_tokens > self._MAX_TOKENS:
            rule = f"must be at most {self._MAX_TOKENS}, got {max_tokens}"
            raise ConfigurationError("max_tokens", rule)
        ratio = min(check_positive("token_ratio", token_ratio), self._MAX_TOKENS)
        # 1.001 * 1000 is slightly below 1001.
        self._millitokens_per_success = int(ratio * 1000 + 1e-9)
        if not self._millitokens_per_success:
            raise ConfigurationError("token_ratio", "must be at least 0.001", token_ratio)

    def cost(self, outcome: Outcome) -> float:  # noqa: ARG002 - part of the protocol
        """Return 0.001, the smallest balance that allows a retry. `withdraw` takes nothing."""
        return 0.001

    def balance(self, now: float) -> float:  # noqa: ARG002 - see `Budget`
        """Return by how many tokens the bucket exceeds half of its capacity."""
        return max(0, self._millitokens - self._capacity // 2) / 1000

    def withdraw(self, cost: float, now: float) -> bool:
        """Return whether a retry can start. Takes no tokens, because failures cost, not retries."""
        return self.balance(now) >= cost

    def deposit(self, amount: float, now: float) -> None:
        """Do nothing, because a withdrawal takes nothing."""

    def record(self, outcome: Outcome, paid: float, now: float) -> None:  # noqa: ARG002 - see `Budget`
        """Take a token after a failure that is not permanent; add `token_ratio` after a success."""
        if outcome.kind is _SUCCESS:
            earned = self._millitokens_per_success
            self._millitokens = min(self._capacity, self._millitokens + earned)
        elif outcome.kind is not Kind.PERMANENT:
            self._millitokens = max(0, self._millitokens - 1000)
