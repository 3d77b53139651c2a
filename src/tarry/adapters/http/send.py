"""How an HTTP adapter sends: one function for each kind of request, made when it is first needed.

The kind is what decides which loop a request runs in: its method, its origin, and whether it may
be repeated. A call has a retry policy or a hedging policy, never both.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from tarry.adapters.http.headers import check_idempotency_key
from tarry.adapters.http.origins import Origins, Recent
from tarry.core.hedging import Hedging
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError
from tarry.runtime import async_driver, hedge, sync_driver
from tarry.runtime.config import instance
from tarry.runtime.downstream import Downstream
from tarry.runtime.hedge import HedgedRun
from tarry.wire import http

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from tarry.adapters.http.headers import IdempotencyKey
    from tarry.adapters.http.origins import Downstreams
    from tarry.core.outcome import Outcome
    from tarry.runtime.config import Spec

Kind: TypeAlias = "tuple[str, str, str, int | None, bool]"
"""Method, scheme, host, port, and whether it may be repeated."""

_BOTH = (
    "a request has a retry policy or a hedging policy, never both (gRFC A6): give policy= to send "
    "it again after a failure, or hedging= to send a copy when it takes too long"
)


class Sending:
    """The requests of one adapter.

    `send` takes by name the `limit` of an attempt in seconds, and its `number`, which is 1 unless
    given. `first` is how a first attempt goes that has no limit: `send` without looking.
    """

    def __init__(
        self,
        send: Callable[..., Any],
        first: Callable[..., Any] | None = None,
        *,
        looped: bool,
        policy: Policy | None,
        hedging: Hedging | None,
        downstream: Downstreams,
        idempotency_key: IdempotencyKey,
        outcome_of: Callable[[Exception, bool], Outcome],
        judge: Callable[[Policy, bool, Any], Outcome],
        release: Callable[[Any], Any],
    ) -> None:
        instance("policy", policy, Policy, "a tarry.Policy(...)")
        instance("hedging", hedging, Hedging, 'a tarry.Hedging(after="p95")')
        if policy is not None and hedging is not None:
            raise ConfigurationError(_BOTH)
        self.key: IdempotencyKey = check_idempotency_key(idempotency_key)
        self.hedging: Hedging | None = hedging
        policy = policy or Policy()
        limit = policy.attempt_timeout
        if not looped:  # a client that blocks cuts an attempt off with its own timeouts: a thread
            # for each would cost more than the attempt
            policy = policy.replace(attempt_timeout=None)
        if hedging is not None:
            policy = policy.replace(max_attempts=1)  # for what may not be sent twice
        self._origins = Origins(policy, downstream, outcome_of, judge, release)
        self._send = partial(send, limit=limit)
        self._first = first if limit is None else None
        self._looped = looped
        self.known: Recent[Kind, Callable[..., Any]] = Recent()
        """The functions that were made. Adapters look here first: it is on the path of every
        request, where each call costs more than a look."""

    def made(self, kind: Kind) -> Callable[..., Any]:
        """Make the function for a new kind of request. It takes what `send` takes."""
        return self.known.recall(kind) or self.known.keep(kind, self._wrapped(kind))

    def _wrapped(self, kind: Kind) -> Callable[..., Any]:
        method, scheme, host, port, repeatable = kind
        origin = http.origin_of(scheme, host, port)
        spec = self._origins.spec(method, origin, repeatable=repeatable, numbered=True)
        if self.hedging is not None and repeatable:
            hedged = _ahedged if self._looped else _hedged
            return hedged(self._send, spec, self.hedging)
        wrap = async_driver.wrap if self._looped else sync_driver.wrap
        return wrap(self._send, spec, self._first, _success_test(spec.policy))


def _success_test(policy: Policy) -> Callable[[Any], bool]:
    """Return a quick test for responses that are successes whatever their headers say."""
    statuses = frozenset(range(100, 400)) - policy.retryable_statuses
    return lambda response: response.status_code in statuses


def _hedged(fn: Callable[..., Any], spec: Spec, hedging: Hedging) -> Callable[..., Any]:
    """Hedge a function that takes the `number` of the copy by name."""

    def call(*args: Any) -> Any:
        return hedge.drive(
            _run(spec, hedging), lambda number: fn(*args, number=number), spec.release
        )

    return call


def _ahedged(
    fn: Callable[..., Awaitable[Any]], spec: Spec, hedging: Hedging
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Do what `_hedged` does, for a coroutine function."""

    async def call(*args: Any) -> Any:
        run = _run(spec, hedging)
        return await hedge.adrive(run, lambda number: fn(*args, number=number), spec.release)

    return call


def _run(spec: Spec, hedging: Hedging) -> HedgedRun:
    downstream = spec.downstream or Downstream(spec.operation)
    return HedgedRun(spec.operation, hedging, spec.outcome_of, downstream, spec.judge)
