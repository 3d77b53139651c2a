"""A retry budget for targets that count in another way: the nearest one that they have."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.core.budget import TokenBudget
from tarry.core.outcome import SUCCESS, TRANSIENT
from tarry.policyfile.defence import BUDGETS
from tarry.policyfile.export.common import filled
from tarry.policyfile.losses import Loss, Rank

if TYPE_CHECKING:
    from tarry.policyfile.defence import Defence

DEFAULT_SHARE = 0.2
DEFAULT_IN_FLIGHT = 3
"""What Envoy and Istio allow by default, and the Gateway API (the share)."""


class Allowance(NamedTuple):
    """What a budget comes to, whichever kind it is of."""

    kind: str
    arguments: dict[str, Any]
    earned: float
    """Retries that a success pays for."""
    burst: float
    """Retries that can be made with no success at all."""

    @property
    def share(self) -> float:
        """Retries as a share of all calls, for targets that know nothing but that.

        A bucket may allow a retry for each success and still end them all in an outage. A share
        does not end them, so it is held to what the targets have by default.
        """
        return self.earned if self.kind == "ratio" else min(self.earned, DEFAULT_SHARE)


def allowance(defence: Defence) -> Allowance | None:
    """Read the budget of a defence: its arguments, and what a fresh one has to spend."""
    budget = defence.downstream("export").budget
    if budget is None or defence.budget is None:
        return None
    kind = defence.budget["kind"]
    rest = {name: value for name, value in defence.budget.items() if name != "kind"}
    given = filled(BUDGETS[kind], rest)
    if kind == "token":
        price, gain = prices(given["preset"])
        return Allowance(kind, given, gain / price, budget.balance(0.0) / price)
    earned = given["ratio" if kind == "ratio" else "token_ratio"]
    return Allowance(kind, given, earned, budget.balance(0.0))


def in_flight(defence: Defence, target: str, losses: list[Loss]) -> tuple[float, int] | None:
    """Return the percentage and the least number of retries in flight, for Envoy and Istio."""
    budget = allowance(defence)
    if budget is None:
        return None
    percent, least = round(100 * budget.share, 6), DEFAULT_IN_FLIGHT
    if budget.kind == "ratio":
        least = max(1, ceil(budget.arguments["min_per_second"]))
    instead = (
        f"{target} counts what is in flight: retries are at most {percent:g} % of all requests, "
        f"and {least} in any case"
    )
    losses.append(Loss("budget.kind", budget.kind, instead, Rank.SENT))
    return percent, least


def prices(preset: str) -> tuple[float, float]:
    """Ask a bucket what a retry costs and what a success gives."""
    bucket = TokenBudget(preset)
    price = bucket.cost(TRANSIENT)
    bucket.withdraw(price, 0.0)
    before = bucket.balance(0.0)
    bucket.record(SUCCESS, 0.0, 0.0)
    return price, bucket.balance(0.0) - before
