"""One dependency for each server that a client talks to, made when it is first called.

Adapters share this: which loop a request runs in depends on its origin, its method and whether it
may be repeated.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from tarry.core.breaker import Breaker
from tarry.core.budget import TokenBudget
from tarry.core.policy import Policy
from tarry.errors import ConfigurationTypeError
from tarry.runtime.config import Spec, instance
from tarry.runtime.downstream import Downstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.outcome import Outcome

Downstreams: TypeAlias = "Downstream | Callable[[str], Downstream] | None"
"""One for all, a function that makes one for an origin, or None: a breaker and a budget each."""

K = TypeVar("K")
V = TypeVar("V")

_MOST = 1000
"""Origins are given from outside (redirects, user's URLs): those not used are forgotten."""

_locks = [threading.Lock()]


def _after_fork() -> None:
    _locks[0] = threading.Lock()  # whoever held it is not in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Recent(dict[K, V]):
    """What was used last, at most 1,000 in two halves, so that to look costs no more than a dict.

    When the half that is looked at is full, it becomes the old one. What is used again comes back
    from there with `keep`; the rest is forgotten when the next half is full.
    """

    __slots__ = ("_old",)

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[K, V] = {}

    def recall(self, key: K) -> V | None:
        """Return what is there, in either half."""
        found = self.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.keep(key, found)
        return found

    def keep(self, key: K, value: V) -> V:
        """Add something; of two threads, the first one's is what both get."""
        with _locks[0]:
            if len(self) >= _MOST // 2:
                self._old = dict(self)
                self.clear()
            return self.setdefault(key, value)


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
        judge: Callable[[Policy, bool, Any], Outcome],
        release: Callable[[Any], Any],
    ) -> None:
        instance("policy", policy, Policy, "a tarry.Policy(...)")
        if not (downstream is None or isinstance(downstream, Downstream) or callable(downstream)):
            rule = (
                'must be a tarry.Downstream("name"), a function that makes one for an origin, or '
                "None for one each"
            )
            raise ConfigurationTypeError("downstream", rule, downstream)
        self.policy: Policy = policy or Policy()
        self._downstream = downstream
        self._outcome_of = outcome_of
        self._judge = judge
        self._release = release
        self._downstreams: WeakValueDictionary[str, Downstream] = WeakValueDictionary()
        """Held by the loops: as long as one of an origin is known, no other loop gets another."""
        self._specs: Recent[tuple[str, str, bool], Spec] = Recent()

    def downstream(self, origin: str) -> Downstream:
        """Return the dependency of an origin."""
        if isinstance(self._downstream, Downstream):
            return self._downstream
        known = self._downstreams.get(origin)
        if known is None:
            made = (self._downstream or protected)(origin)
            if not isinstance(made, Downstream):
                rule = f'must make a tarry.Downstream("name"), got {made!r} for {origin}'
                raise ConfigurationTypeError("downstream", rule)
            with _locks[0]:
                known = self._downstreams.setdefault(origin, made)  # the first of two threads wins
        return known

    def spec(self, method: str, origin: str, *, repeatable: bool, numbered: bool = False) -> Spec:
        """Return the loop for a request."""
        found = self._specs.recall((method, origin, repeatable))
        if found is None:
            outcome_of, judge, policy = self._outcome_of, self._judge, self.policy
            found = Spec(
                on=lambda error: outcome_of(error, repeatable),
                judge=partial(judge, policy, repeatable),
                release=self._release,
                policy=policy,
                downstream=self.downstream(origin),
                name=f"{method} {origin}",
                safe=repeatable,
                numbered=numbered,
            )
            found = self._specs.keep((method, origin, repeatable), found)
        return found
