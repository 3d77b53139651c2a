"""Send the requests of an adapter with retries or hedging.

Each origin (scheme, host and port) has a downstream: its breaker, budget and latency. Requests with
the same `CacheKey` share a retry configuration and a function that sends them.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from tarry.adapters.http.hand_off import HandOffSender
from tarry.adapters.http.messages import check_idempotency_key
from tarry.core.breaker import Breaker
from tarry.core.budget import TokenBudget
from tarry.core.checks import check_flag, check_instance
from tarry.core.hedging import Hedging
from tarry.core.policy import OTHER_FIELD_NAMES, POLICY_FIELDS, Policy
from tarry.core.text import did_you_mean
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.runtime import drivers
from tarry.runtime.config import RetryConfig, check_policy
from tarry.runtime.downstream import Downstream
from tarry.runtime.forks import PerProcess
from tarry.wire import http

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tarry.adapters.http.hand_off import AsyncHandOff, SyncHandOff
    from tarry.adapters.http.messages import HttpClientFunctions, KeyOption
    from tarry.core.outcome import Outcome

CacheKey: TypeAlias = "tuple[str, str, str, int | None, bool]"
"""Method, scheme, host and port of requests, and whether they are repeatable, which means that they
may be sent again after the server has read them."""
DownstreamArgument: TypeAlias = "Downstream | Callable[[str], Downstream] | None"
"""An adapter's `downstream`: one downstream for all origins, a function that returns one for an
origin, or None for a default downstream for each origin."""

K = TypeVar("K")
V = TypeVar("V")

_COMMON_ARGUMENTS = ("policy", "downstream", "idempotency_key", "hand_off")  # of all adapters

_MAX_CACHED_ITEMS = 1000
"""How many items a cache keeps. Redirects may lead to any number of origins."""

_caches_lock = PerProcess(threading.Lock)  # of all caches


def reject_unknown_arguments(adapter: object, arguments: Mapping[str, Any]) -> None:
    """Raise an error that says what to use instead if an adapter got unknown arguments."""
    for name in arguments:
        field = OTHER_FIELD_NAMES.get(name, name)
        if any(field == known.name for known in POLICY_FIELDS):
            advice = f"use policy=tarry.Policy({field}=...)"
        elif name == "allowed_methods":
            advice = 'idempotent methods are retried, others with idempotency_key="auto"'
        else:
            advice = did_you_mean(name, _COMMON_ARGUMENTS, otherwise="it has, for example,")
        msg = f"{type(adapter).__name__} has no argument {name}=; {advice}"
        raise ConfigurationTypeError(msg)


class LRUCache(dict[K, V]):
    """An approximate LRU cache of up to `_MAX_CACHED_ITEMS`, with the fast `get` of a dict.

    An exact LRU cache writes on each read. Here a hit costs one dict lookup. The dict itself holds
    the recent half of the items. When the recent half is full, it replaces the old half, whose
    items are dropped. `lookup` copies an item from the old half to the recent half.
    """

    __slots__ = ("_old_half",)

    def __init__(self) -> None:
        super().__init__()
        self._old_half: dict[K, V] = {}

    def lookup(self, key: K) -> V | None:
        """Return the value of `key` from either half; None if the key is in neither."""
        value = self.get(key)
        if value is None and (value := self._old_half.get(key)) is not None:
            self.add(key, value)
        return value

    def add(self, key: K, value: V) -> V:
        """Add a value and return it; return the existing value if the recent half has one."""
        with _caches_lock.value:
            if len(self) >= _MAX_CACHED_ITEMS // 2:
                self._old_half = dict(self)
                self.clear()
            return self.setdefault(key, value)


def default_downstream(origin: str) -> Downstream:
    """Return a new downstream with a breaker and a retry budget."""
    return Downstream(origin, breaker=Breaker(), budget=TokenBudget())


class OriginRegistry:
    """The downstreams of one adapter by origin, and its retry configurations."""

    def __init__(
        self,
        policy: Policy | None,
        downstream: DownstreamArgument,
        classify_error: Callable[[Exception, bool], Outcome],
        classify_response: Callable[[Policy, bool, Any], Outcome],
        release_connection: Callable[[Any], Any],
        async_client: str = "",
    ) -> None:
        """Check the arguments; `async_client` names the client for coroutines, for errors."""
        check_policy(policy)
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
        self._release_connection = release_connection
        self._async_client = async_client
        # Weak references suffice, because each configuration refers to its downstream. As long as
        # a configuration of an origin exists, new configurations of the origin get its downstream.
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
            # If two threads create a downstream, both use the first one that is stored.
            with _caches_lock.value:
                downstream = self._downstreams.setdefault(origin, new)
        return downstream

    def retry_config(
        self, method: str, origin: str, *, repeatable: bool, passes_attempt_number: bool = False
    ) -> RetryConfig:
        """Return the retry configuration for requests with this method and origin."""
        config = self._configs.lookup((method, origin, repeatable))
        if config is None:
            classify_error = self._classify_error
            config = RetryConfig(
                on=lambda error: classify_error(error, repeatable),
                classify_result=partial(self._classify_response, self.policy, repeatable),
                release_connection=self._release_connection,
                policy=self.policy,
                downstream=self.downstream(origin),
                name=f"{method} {origin}",
                repeatable=repeatable,
                passes_attempt_number=passes_attempt_number,
            )
            if self._async_client:
                config.blocking_wait_advice = f"use {self._async_client}, or a thread"
            config = self._configs.add((method, origin, repeatable), config)
        return config


class RequestSender:
    """Sends the requests of one adapter.

    Args:
        http_functions: the functions that are specific to the HTTP client.
        send: sends one attempt; a coroutine function if the client is async. Takes the
            arguments of the function that `send_function` returns, and the keywords
            `attempt_timeout` (the policy's, in seconds) and `attempt_number` (1 by default).
        send_unchanged: sends a first attempt that has no time limit. Takes only the request. Faster
            than `send`, because it adds no headers or timeouts to the request.
        hand_off: hands failed requests off to the service.
        mark_given_up: whether a response that was given up gets the header `x-should-retry: false`.
    """

    def __init__(
        self,
        http_functions: HttpClientFunctions,
        send: Callable[..., Any],
        send_unchanged: Callable[..., Any] | None = None,
        *,
        policy: Policy | None,
        hedging: Hedging | None,
        downstream: DownstreamArgument,
        idempotency_key: KeyOption,
        hand_off: SyncHandOff | AsyncHandOff | None,
        mark_given_up: bool = True,
    ) -> None:
        check_policy(policy)
        self.mark_given_up: bool = check_flag("mark_given_up", mark_given_up)
        check_instance("hedging", hedging, Hedging, 'a tarry.Hedging(after="p95")')
        if policy is not None and hedging is not None:
            raise ConfigurationError(
                "a request can have a retry policy or a hedging policy, not both (gRFC A6): use "
                "policy= to send it again after a failure, or hedging= to send a copy when it "
                "takes too long"
            )
        self.idempotency_key: KeyOption = check_idempotency_key(idempotency_key)
        self.hedging: Hedging | None = hedging
        policy = policy or Policy()
        self.policy: Policy = policy
        attempt_timeout = policy.attempt_timeout
        if not http_functions.is_async:
            # A blocking client enforces the attempt timeout with its own timeouts. If the policy
            # had one, `drivers` would start a thread for each attempt.
            policy = policy.replace(attempt_timeout=None)
        if hedging is not None:
            # This policy is only for requests that are not repeatable, and so not hedged.
            policy = policy.replace(max_attempts=1)
        self._origins = OriginRegistry(
            policy,
            downstream,
            http_functions.classify_error,
            http_functions.classify_response,
            http_functions.release_connection,
            http_functions.async_client,
        )
        self.hand_off: HandOffSender = HandOffSender(hand_off, policy, http_functions)
        self._send = partial(send, attempt_timeout=attempt_timeout)
        self._send_unchanged = send_unchanged if attempt_timeout is None else None
        self._is_async = http_functions.is_async
        self.cached_functions: LRUCache[CacheKey, Callable[..., Any]] = LRUCache()
        """The functions that `send_function` has created. Adapters look here before they call
        `send_function`, because a dict lookup is cheaper than a function call."""

    def send_function(self, cache_key: CacheKey) -> Callable[..., Any]:
        """Return the function that sends requests with this cache key; create it if needed."""
        send_with_retries = self.cached_functions.lookup(cache_key)
        if send_with_retries is not None:
            return send_with_retries
        method, scheme, host, port, repeatable = cache_key
        origin, is_async = http.origin_of(scheme, host, port), self._is_async
        config = self._origins.retry_config(
            method, origin, repeatable=repeatable, passes_attempt_number=True
        )
        if self.hedging is not None and repeatable:
            send_with_retries = _wrap_hedged(self._send, config, self.hedging, is_async=is_async)
        else:
            wrap: Callable[..., Any] = drivers.wrap_async if is_async else drivers.wrap
            send_with_retries = wrap(self._send, config, self._send_unchanged)
        return self.cached_functions.add(cache_key, send_with_retries)


def _wrap_hedged(
    send: Callable[..., Any], config: RetryConfig, hedging: Hedging, *, is_async: bool
) -> Callable[..., Any]:
    from tarry.runtime import hedge

    drive: Callable[[Any, Callable[[int], Any], Any], Any]
    drive = hedge.drive_async if is_async else hedge.drive
    downstream = config.downstream or Downstream(config.operation)

    def call(*args: Any) -> Any:
        hedged_call = hedge.RunningHedgedCall(
            config.operation, hedging, config.classify_error, downstream, config.classify_result
        )
        return drive(
            hedged_call, lambda n: send(*args, attempt_number=n), config.release_connection
        )

    return call
