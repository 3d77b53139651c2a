"""One dependency for each server that a client talks to, made when it is first called.

Adapters share this: which loop a request runs in depends on its origin, its method and whether it
may be repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from tarry.core.breaker import Breaker
from tarry.core.budget import TokenBudget
from tarry.core.policy import Policy
from tarry.errors import ConfigurationTypeError
from tarry.runtime.downstream import Downstream
from tarry.runtime.spec import Spec, instance

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.outcome import Outcome

Downstreams: TypeAlias = "Downstream | Callable[[str], Downstream] | None"
"""One for all, a function that makes one for an origin, or None: a breaker and a budget each."""

_MOST = 1000
"""Origins are given from outside (redirects, user's URLs): the oldest are forgotten."""


def protected(origin: str) -> Downstream:
    """Return a dependency with a breaker and a retry budget of its own."""
    return Downstream(origin, breaker=Breaker(), budget=TokenBudget())


class Origins:
    """The loops of one adapter, by operation and by whether it may be repeated."""

    def __init__(
        self,
        policy: Policy | None,
        downstream: Downstreams,
        outcome_of: Callable[[Exception, bool], Outcome],
        judge: Callable[[Any, Policy, bool], Outcome],
        release: Callable[[Any], Any],
    ) -> None:
        instance("policy", policy, Policy, "a tarry.Policy(...)")
        if not (downstream is None or isinstance(downstream, Downstream) or callable(downstream)):
            msg = (
                'downstream must be a tarry.Downstream("name"), a function that makes one for an '
                f"origin, or None for one each, got {downstream!r}"
            )
            raise ConfigurationTypeError(msg)
        self.policy: Policy = policy or Policy()
        self._downstream = downstream
        self._outcome_of = outcome_of
        self._judge = judge
        self._release = release
        self._downstreams: dict[str, Downstream] = {}
        self._specs: dict[tuple[str, str, bool], Spec] = {}

    def downstream(self, origin: str) -> Downstream:
        """Return the dependency of an origin."""
        if isinstance(self._downstream, Downstream):
            return self._downstream
        known = self._downstreams.get(origin)
        if known is None:
            known = (self._downstream or protected)(origin)
            _forget_oldest(self._downstreams)
            self._downstreams[origin] = known
        return known

    def spec(self, method: str, origin: str, *, repeatable: bool) -> Spec:
        """Return the loop for a request."""
        found = self._specs.get((method, origin, repeatable))
        if found is None:
            outcome_of, judge, policy = self._outcome_of, self._judge, self.policy
            found = Spec(
                on=lambda error: outcome_of(error, repeatable),
                judge=lambda answer: judge(answer, policy, repeatable),
                release=self._release,
                policy=policy,
                downstream=self.downstream(origin),
                name=f"{method} {origin}",
                safe=repeatable,
            )
            _forget_oldest(self._specs)
            self._specs[method, origin, repeatable] = found
        return found


def _forget_oldest(known: dict[Any, Any]) -> None:
    if len(known) >= _MOST:
        del known[next(iter(known))]
