"""The downstreams and retry configurations of an adapter, by origin, created on first use."""

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
from tarry.runtime.config import RetryConfig, check_instance
from tarry.runtime.downstream import Downstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.outcome import Outcome

Downstreams: TypeAlias = "Downstream | Callable[[str], Downstream] | None"
"""One downstream for all origins, a function that returns one for an origin, or None for a default
downstream for each origin."""

K = TypeVar("K")
V = TypeVar("V")

_MAX_CACHED_ITEMS = 1000
"""The size of a cache. It must be limited, because redirects and users supply the origins."""

_locks = [threading.Lock()]
"""Holds the one lock of the module. A list, so that the fork handler can replace the lock."""


def _reset_after_fork() -> None:
    _locks[0] = threading.Lock()  # the thread that held it does not exist in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


class LRUCache(dict[K, V]):
    """An approximate LRU cache of up to 1,000 items, with the fast `get` of a dict.

    An exact LRU cache writes on each read. Here a hit costs one dict lookup. The dict itself holds
    the recent half of the items. When this half is full, it becomes the old half, and the previous
    old half is dropped. `lookup` copies an item that is used again from the old half to the recent
    half.
    """

    __slots__ = ("_old",)

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[K, V] = {}

    def lookup(self, key: K) -> V | None:
        """Return the value from either half, or None."""
        value = self.get(key)
        if value is None and (value := self._old.get(key)) is not None:
            self.add(key, value)
        return value

    def add(self, key: K, value: V) -> V:
        """Add a value and return it; return the existing value if another thread has added one."""
        with _locks[0]:
            if len(self) >= _MAX_CACHED_ITEMS // 2:
                self._old = dict(self)
                self.clear()
            return self.setdefault(key, value)


def default_downstream(origin: str) -> Downstream:
    """Return a downstream with its own breaker and retry budget."""
    return Downstream(origin, breaker=Breaker(), budget=TokenBudget())


class OriginRegistry:
    """The downstreams of one adapter by origin, and its retry configurations by operation."""

    def __init__(
        self,
        policy: Policy | None,
        downstream: Downstreams,
        classify_error: Callable[[Exception, bool], Outcome],
        classify_response: Callable[[Policy, bool, Any], Outcome],
        release: Callable[[Any], Any],
    ) -> None:
        check_instance("policy", policy, Policy, "a tarry.Policy(...)")
        if not (downstream is None or isinstance(downstream, Downstream) or callable(downstream)):
            rule = (
                'must be a tarry.Downstream("name"), a function that returns one for an origin, or '
                "None for a default one for each origin"
            )
            raise ConfigurationTypeError("downstream", rule, downstream)
        self.policy: Policy = policy or Policy()
        self._downstream = downstream
        self._classify_error = classify_error
        self._classify_response = classify_response
        self._release = release
        # Weak references suffice, because each configuration refers to its downstream. As long as
        # one configuration of an origin exists, new ones for this origin share its downstream.
        self._downstreams: WeakValueDictionary[str, Downstream] = WeakValueDictionary()
        self._configs: LRUCache[tuple[str, str, bool], RetryConfig] = LRUCache()

    def downstream(self, origin: str) -> Downstream:
        """Return the downstream of an origin."""
        if isinstance(self._downstream, Downstream):
            return self._downstream
        downstream = self._downstreams.get(origin)
        if downstream is None:
            new = (self._downstream or default_downstream)(origin)
            if not isinstance(new, Downstream):
                rule = f'must return a tarry.Downstream("name"), got {new!r} for {origin}'
                raise ConfigurationTypeError("downstream", rule)
            with _locks[0]:  # if two threads create one, both use the one that is stored first
                downstream = self._downstreams.setdefault(origin, new)
        return downstream

    def retry_config(
        self, method: str, origin: str, *, repeatable: bool, passes_number: bool = False
    ) -> RetryConfig:
        """Return the retry configuration for an operation, which is a method of an origin."""
        config = self._configs.lookup((method, origin, repeatable))
        if config is None:
            classify_error, policy = self._classify_error, self.policy
            config = RetryConfig(
                on=lambda error: classify_error(error, repeatable),
                classify_result=partial(self._classify_response, policy, repeatable),
                release=self._release,
                policy=policy,
                downstream=self.downstream(origin),
                name=f"{method} {origin}",
                repeatable=repeatable,
                passes_number=passes_number,
            )
            config = self._configs.add((method, origin, repeatable), config)
        return config
