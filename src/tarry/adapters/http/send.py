"""Send the requests of an adapter with retries or hedging, and manage downstreams by origin.

All requests with the same method, origin and repeatability are sent by one function. These
functions, downstreams and retry configurations are created on first use and cached.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from tarry.adapters.http.hand_off import HandOff
from tarry.adapters.http.messages import check_idempotency_key
from tarry.core.breaker import Breaker
from tarry.core.budget import TokenBudget
from tarry.core.hedging import Hedging
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.runtime import deadlines, drivers
from tarry.runtime.call import RunningCall
from tarry.runtime.clocks import after_fork, environment
from tarry.runtime.config import RetryConfig, check_instance
from tarry.runtime.downstream import Downstream
from tarry.runtime.events import bus
from tarry.wire import http

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from tarry.adapters.http.hand_off import AsyncTaskClient, SyncTaskClient
    from tarry.adapters.http.messages import HttpClientFunctions, IdempotencyKey
    from tarry.core.outcome import Outcome

RequestKey: TypeAlias = "tuple[str, str, str, int | None, bool]"
"""Method, scheme, host, port, and whether the request is repeatable."""
DownstreamArgument: TypeAlias = "Downstream | Callable[[str], Downstream] | None"
"""An adapter's `downstream`: one downstream for all origins, a function that returns one for an
origin, or None for a default downstream for each origin."""

K = TypeVar("K")
V = TypeVar("V")

_MAX_CACHED_ITEMS = 1000
"""The size of a cache. It must be limited, because redirects and users supply the origins."""
_NOT_ERROR_STATUSES = frozenset(range(100, 400))

_get_deadline_scope = deadlines.scope.get

_locks = [threading.Lock()]
"""Holds the one lock of the module. A list, so that the fork handler can replace the lock."""


@after_fork
def _reset_after_fork() -> None:
    _locks[0] = threading.Lock()  # the thread that held the lock does not exist in the child


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
        downstream: DownstreamArgument,
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
            classify_error = self._classify_error
            config = RetryConfig(
                on=lambda error: classify_error(error, repeatable),
                classify_result=partial(self._classify_response, self.policy, repeatable),
                release=self._release,
                policy=self.policy,
                downstream=self.downstream(origin),
                name=f"{method} {origin}",
                repeatable=repeatable,
                passes_number=passes_number,
            )
            config = self._configs.add((method, origin, repeatable), config)
        return config


class RequestSender:
    """Sends the requests of one adapter.

    Args:
        functions: the functions that are specific to the HTTP client.
        send: sends one attempt. Called with the arguments of the function that `send_function`
            returns and the keywords `limit`, the time limit of the attempt in seconds, and `number`
            (1 by default). A coroutine function if the client is async.
        send_first: sends a first attempt without a time limit. Cheaper than `send`, because it
            does not check the limit and the number.
    """

    def __init__(
        self,
        functions: HttpClientFunctions,
        send: Callable[..., Any],
        send_first: Callable[..., Any] | None = None,
        *,
        policy: Policy | None,
        hedging: Hedging | None,
        downstream: DownstreamArgument,
        idempotency_key: IdempotencyKey,
        hand_off: SyncTaskClient | AsyncTaskClient | None,
    ) -> None:
        check_instance("policy", policy, Policy, "a tarry.Policy(...)")
        check_instance("hedging", hedging, Hedging, 'a tarry.Hedging(after="p95")')
        if policy is not None and hedging is not None:
            raise ConfigurationError(
                "a request can have a retry policy or a hedging policy, not both (gRFC A6): use "
                "policy= to send it again after a failure, or hedging= to send a copy when it "
                "takes too long"
            )
        self.idempotency_key: IdempotencyKey = check_idempotency_key(idempotency_key)
        self.hedging: Hedging | None = hedging
        policy = policy or Policy()
        limit = policy.attempt_timeout
        if not functions.is_async:
            # A blocking client enforces the limit with its own timeouts. The driver would need a
            # thread for each attempt, which costs more than the attempt.
            policy = policy.replace(attempt_timeout=None)
        if hedging is not None:
            # For requests that are not repeatable: they are neither hedged nor retried.
            policy = policy.replace(max_attempts=1)
        _, classify_error, classify_response, release, _ = functions
        self._origins = OriginRegistry(
            policy, downstream, classify_error, classify_response, release
        )
        self.hand_off: HandOff = HandOff(hand_off, policy, functions)
        self._send = partial(send, limit=limit)
        self._send_first = send_first if limit is None else None
        self._is_async = functions.is_async
        self.send_functions: LRUCache[RequestKey, Callable[..., Any]] = LRUCache()
        """The functions created so far. Adapters look here before they call `send_function`,
        because on the hot path a dict lookup is cheaper than a function call."""

    def send_function(self, key: RequestKey) -> Callable[..., Any]:
        """Return the function that sends requests of this key; create it if needed."""
        send = self.send_functions.lookup(key)
        if send is not None:
            return send
        method, scheme, host, port, repeatable = key
        origin, is_async = http.origin_of(scheme, host, port), self._is_async
        config = self._origins.retry_config(
            method, origin, repeatable=repeatable, passes_number=True
        )
        if self.hedging is not None and repeatable:
            send = _wrap_hedged(self._send, config, self.hedging, is_async=is_async)
        elif self._send_first is None or config.needs_full_driver:
            send = (drivers.wrap_async if is_async else drivers.wrap)(self._send, config)
        else:
            wrap_first = _wrap_first_async if is_async else _wrap_first
            send = wrap_first(self._send_first, self._send, config)
        return self.send_functions.add(key, send)


# The inner functions below must be named `call`: `runtime.error_record` looks for this name in the
# traceback of an error, to find out whether the error was raised through tarry.
def _wrap_first(
    send_first: Callable[[Any], Any], send: Callable[..., Any], config: RetryConfig
) -> Callable[[Any], Any]:
    """Return a function that sends a request with as little code as possible if nothing fails.

    The code is that of `drivers.wrap`, with only one argument, and with a test for success that
    calls no function. This saves 0.3 of 2.1 us per request (CPython 3.11). If the breaker has seen
    a failure, or a deadline or a listener exists, the driver makes the call.
    """
    downstream = config.downstream or Downstream(config.operation)
    successes = downstream.uncounted_successes
    success_statuses = _NOT_ERROR_STATUSES - config.policy.retryable_statuses
    max_uncounted = downstream.max_uncounted_successes
    send_with_retries = drivers.wrap(send, config)

    def call(request: Any) -> Any:
        breaker = downstream.breaker
        if (
            breaker is None
            or not breaker.is_fault_free
            or bus.listeners
            or _get_deadline_scope() is not None
        ):
            return send_with_retries(request)
        record_count, permit, clock = bus.record_count, breaker.generation, environment.now
        started = clock()
        try:
            response = send_first(request)
        except Exception as error:
            running = RunningCall.after_first_attempt(config, started, record_count, permit)
            if not running.try_continue(error):
                raise
        else:
            if response.status_code in success_statuses:
                successes.append((permit, started, clock()))
                if len(successes) > max_uncounted:
                    downstream.count_successes()
                return response
            running = RunningCall.after_first_attempt(config, started, record_count, permit)
            if running.try_finish(response):
                return response
            drivers.release_result(running, response)
        running.wait()
        return drivers.drive(running, send, (request,), {})

    return call


def _wrap_first_async(
    send_first: Callable[[Any], Awaitable[Any]],
    send: Callable[..., Awaitable[Any]],
    config: RetryConfig,
) -> Callable[[Any], Coroutine[Any, Any, Any]]:
    """Do the same as `_wrap_first`, for coroutine functions."""
    downstream = config.downstream or Downstream(config.operation)
    successes = downstream.uncounted_successes
    success_statuses = _NOT_ERROR_STATUSES - config.policy.retryable_statuses
    max_uncounted = downstream.max_uncounted_successes
    send_with_retries = drivers.wrap_async(send, config)

    async def call(request: Any) -> Any:
        breaker = downstream.breaker
        if (
            breaker is None
            or not breaker.is_fault_free
            or bus.listeners
            or _get_deadline_scope() is not None
        ):
            return await send_with_retries(request)
        record_count, permit, clock = bus.record_count, breaker.generation, environment.now
        started = clock()
        try:
            response = await send_first(request)
        except Exception as error:
            running = RunningCall.after_first_attempt(config, started, record_count, permit)
            if not running.try_continue(error):
                raise
        else:
            if response.status_code in success_statuses:
                successes.append((permit, started, clock()))
                if len(successes) > max_uncounted:
                    downstream.count_successes()
                return response
            running = RunningCall.after_first_attempt(config, started, record_count, permit)
            if running.try_finish(response):
                return response
            await drivers.release_result_async(running, response)
        await running.async_wait()
        return await drivers.drive_async(running, send, (request,), {})

    return call


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
        return drive(hedged_call, lambda number: send(*args, number=number), config.release)

    return call
