"""Retry budgets for targets with other kinds of budgets: the closest budget of the target."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.core.budget import TokenBudget
from tarry.core.outcome import SUCCESS, TRANSIENT
from tarry.policyfile.defence import BUDGETS
from tarry.policyfile.export.common import with_defaults
from tarry.policyfile.losses import Loss, Severity

if TYPE_CHECKING:
    from tarry.policyfile.defence import Defence

DEFAULT_RETRY_SHARE = 0.2
DEFAULT_MIN_RETRIES_IN_FLIGHT = 3
"""Defaults of Envoy and Istio; the share is also the default of the Gateway API."""


class BudgetSummary(NamedTuple):
    """The properties of a budget that do not depend on its kind."""

    kind: str
    arguments: dict[str, Any]
    earned: float
    """Number of retries that one success pays for."""
    burst: float
    """Number of retries that are possible without any success."""

    @property
    def share(self) -> float:
        """Retries as a fraction of all calls, for targets that support no other budget.

        A token bucket can allow one retry per success and still stop all retries in an outage. A
        fraction does not stop retries in an outage, so it is limited to the targets' default.
        """
        return self.earned if self.kind == "ratio" else min(self.earned, DEFAULT_RETRY_SHARE)


def summarize_budget(defence: Defence) -> BudgetSummary | None:
    """Return the arguments, earnings and burst of a defence's budget, or None without a budget."""
    budget = defence.downstream("export").budget
    if budget is None or defence.budget is None:
        return None
    kind = defence.budget["kind"]
    others = {name: value for name, value in defence.budget.items() if name != "kind"}
    arguments = with_defaults(BUDGETS[kind], others)
    if kind == "token":
        price, gain = token_prices(arguments["preset"])
        return BudgetSummary(kind, arguments, gain / price, budget.balance(0.0) / price)
    earned = arguments["ratio" if kind == "ratio" else "token_ratio"]
    return BudgetSummary(kind, arguments, earned, budget.balance(0.0))


def in_flight_budget(defence: Defence, target: str, losses: list[Loss]) -> tuple[float, int] | None:
    """Return the retries in flight for Envoy and Istio: percentage of requests, and minimum."""
    budget = summarize_budget(defence)
    if budget is None:
        return None
    percent, minimum = round(100 * budget.share, 6), DEFAULT_MIN_RETRIES_IN_FLIGHT
    if budget.kind == "ratio":
        minimum = max(1, ceil(budget.arguments["min_per_second"]))
    instead = (
        f"{target} counts requests in flight: retries are at most {percent:g} % of all requests, "
        f"but {minimum} can always be in flight"
    )
    losses.append(Loss("budget.kind", budget.kind, instead, Severity.LOAD))
    return percent, minimum


def token_prices(preset: str) -> tuple[float, float]:
    """Return the tokens that a retry costs and that a success earns in a TokenBudget preset."""
    bucket = TokenBudget(preset)
    price = bucket.cost(TRANSIENT)
    bucket.withdraw(price, 0.0)
    before = bucket.balance(0.0)
    bucket.record(SUCCESS, 0.0, 0.0)
    return price, bucket.balance(0.0) - before
