"""Retry budgets: what bounds the load that retries add while a dependency fails.

A budget is anything with the five methods of `Budget`. Amounts are the budget's own unit. It
belongs to one downstream, whose lock is held while it works: it must not call back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from tarry.core.checks import check_at_least, check_count, check_one_of, check_positive, check_share
from tarry.core.outcome import Kind
from tarry.core.sliding_window import SlidingWindow
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from tarry.core.outcome import Outcome

_SUCCESS, _THROTTLED = Kind.SUCCESS, Kind.THROTTLED
_CALLS, _RETRIES = range(2)


class Budget(Protocol):
    """What a downstream needs of its retry budget."""

    def cost(self, outcome: Outcome) -> float:
        """Return the price of a retry after this outcome."""
        ...

    def balance(self, now: float) -> float:
        """Return what could be withdrawn now."""
        ...

    def withdraw(self, cost: float, now: float) -> bool:
        """Take `cost` if the balance covers it, and say whether it did."""
        ...

    def deposit(self, amount: float, now: float) -> None:
        """Give back a withdrawal whose retry never started."""
        ...

    def record(self, outcome: Outcome, paid: float, now: float) -> None:
        """Learn that an attempt ended; `paid` is what it had cost, 0 for a first attempt."""
        ...


class _Prices(NamedTuple):
    retry: float
    throttled: float
    timeout: float
    clean_success: float
    refund: float | None
    """What a success after retries gives: None stands for the cost of its last retry."""


_PRICES = {
    "classic": _Prices(retry=5, throttled=5, timeout=5, clean_success=5, refund=5),
    "aws-2020": _Prices(retry=5, throttled=5, timeout=10, clean_success=1, refund=None),
    "aws-2026": _Prices(retry=14, throttled=5, timeout=14, clean_success=1, refund=None),
}


class TokenBudget:
    """A bucket of tokens, after the AWS SDKs: retries take, successes give.

    `classic`: a retry costs 5, a success gives 5. `aws-2020`: a retry costs 5, after a timeout
    10; a clean success gives 1, a success after retries gives the last cost back. `aws-2026`:
    the same with 14 for a retry and 5 after throttling.
    """

    __slots__ = ("_capacity", "_prices", "_tokens")

    def __init__(self, preset: str = "classic", *, capacity: float = 500) -> None:
        check_one_of("preset", preset, _PRICES)
        self._prices = _PRICES[preset]
        self._capacity = self._tokens = check_positive("capacity", capacity)

    def cost(self, outcome: Outcome) -> float:
        """Return the price of a retry after this outcome."""
        if outcome.kind is _THROTTLED:
            return self._prices.throttled
        return self._prices.timeout if outcome.timeout else self._prices.retry

    def balance(self, now: float) -> float:  # noqa: ARG002 - part of the protocol
        """Return the tokens in the bucket."""
        return self._tokens

    def withdraw(self, cost: float, now: float) -> bool:  # noqa: ARG002
        """Take `cost` tokens if they are there."""
        if self._tokens < cost:
            return False
        self._tokens -= cost
        return True

    def deposit(self, amount: float, now: float) -> None:  # noqa: ARG002
        """Put tokens back, up to the capacity."""
        self._tokens = min(self._capacity, self._tokens + amount)

    def record(self, outcome: Outcome, paid: float, now: float) -> None:
        """Refill on success."""
        if outcome.kind is not _SUCCESS or self._tokens >= self._capacity:
            return
        if not paid:
            self.deposit(self._prices.clean_success, now)
        else:
            self.deposit(paid if self._prices.refund is None else self._prices.refund, now)


class RatioBudget:
    """Retries at most a share of the calls of the last seconds, after Finagle.

    `ratio` of the calls in `window` seconds may be retried, plus `min_per_second`, so that a
    quiet client can retry at all.
    """

    __slots__ = ("_floor", "_ratio", "_window")

    def __init__(
        self, ratio: float = 0.1, *, window: float = 10.0, min_per_second: float = 1.0
    ) -> None:
        self._ratio = check_share("ratio", ratio)
        self._window = SlidingWindow(check_positive("window", window), 2)
        self._floor = check_at_least("min_per_second", min_per_second, 0) * window

    def cost(self, outcome: Outcome) -> float:  # noqa: ARG002 - part of the protocol
        """Return 1: a retry is a retry."""
        return 1.0

    def balance(self, now: float) -> float:
        """Return the retries that may still start in this window."""
        window = self._window_at(now)
        earned = self._floor + self._ratio * window.total(_CALLS)
        return max(0.0, earned - window.total(_RETRIES))

    def withdraw(self, cost: float, now: float) -> bool:
        """Take one retry from the window."""
        if self.balance(now) < cost:
            return False
        self._window.current[_RETRIES] += 1
        return True

    def deposit(self, amount: float, now: float) -> None:  # noqa: ARG002
        """Take back one retry, unless its window has passed."""
        self._window_at(now).undo(_RETRIES)

    def record(self, outcome: Outcome, paid: float, now: float) -> None:  # noqa: ARG002
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
    """The retry throttle of gRPC (gRFC A6): a retry only while more than half the tokens are left.

    Each failure takes one token, each success gives `token_ratio`; both are kept as whole
    thousandths, as the specification counts them.
    """

    __slots__ = ("_capacity", "_milli", "_ratio")

    _MOST_TOKENS = 1000

    def __init__(self, max_tokens: int = 10, token_ratio: float = 0.1) -> None:
        self._capacity = self._milli = check_count("max_tokens", max_tokens) * 1000
        if max_tokens > self._MOST_TOKENS:
            rule = f"must be at most {self._MOST_TOKENS}, got {max_tokens}"
            raise ConfigurationError("max_tokens", rule)
        ratio = min(check_positive("token_ratio", token_ratio), self._MOST_TOKENS)
        self._ratio = int(ratio * 1000 + 1e-9)  # 1.001 * 1000 is a hair below 1001
        if not self._ratio:
            raise ConfigurationError("token_ratio", "must be at least 0.001", token_ratio)

    def cost(self, outcome: Outcome) -> float:  # noqa: ARG002 - part of the protocol
        """Return the least amount there is: more than half must be left, and nothing is taken."""
        return 0.001

    def balance(self, now: float) -> float:  # noqa: ARG002
        """Return the tokens above half."""
        return max(0, self._milli - self._capacity // 2) / 1000

    def withdraw(self, cost: float, now: float) -> bool:
        """Say whether a retry may go; it is the failures that cost."""
        return self.balance(now) >= cost

    def deposit(self, amount: float, now: float) -> None:
        """Do nothing: a withdrawal took nothing."""

    def record(self, outcome: Outcome, paid: float, now: float) -> None:  # noqa: ARG002
        """Pay for a failure that was retryable or pushed back, earn from a success."""
        if outcome.kind is _SUCCESS:
            self._milli = min(self._capacity, self._milli + self._ratio)
        elif outcome.kind is not Kind.PERMANENT:
            self._milli = max(0, self._milli - 1000)
