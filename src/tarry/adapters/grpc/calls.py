"""What the interceptors have in common: everything but the waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from tarry.adapters.grpc.library import grpc
from tarry.adapters.http.origins import Origins
from tarry.core.outcome import PERMANENT, SUCCESS, Kind, Outcome, outcome_of_code
from tarry.core.verdict import Attempt
from tarry.errors import ConfigurationTypeError
from tarry.runtime.call import BlockRun
from tarry.runtime.callables import plain_function
from tarry.runtime.clocks import system

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.adapters.http.origins import Downstreams
    from tarry.core.policy import Policy
    from tarry.runtime.config import Spec

Repeatable: TypeAlias = "bool | Callable[[str], bool]"
"""Whether calls may be repeated although the server has read them; perhaps by their method."""

_PREVIOUS = "grpc-previous-rpc-attempts"
_GRACE = 0.01
"""Seconds by which the clock of gRPC may be ahead of ours."""


class GrpcCall(BlockRun):
    """One call. gRPC cuts its attempts off by itself, so that the error is one of gRPC's.

    Its errors are raised again, by gRPC and in other threads, so that no frame of ours is on their
    way to the user. That is what a `BlockRun` is for.
    """

    __slots__ = ("_ahead", "_ends")

    def __init__(
        self, spec: Spec, started: float | None, deadline: float | None, serial: int
    ) -> None:
        super().__init__(spec, started, deadline, serial)
        self._ahead: Attempt | None = None
        self._ends: float | None = None
        """When the time of the running attempt is up."""

    def go_ahead(self) -> None:
        """Begin the first attempt now; the loop that comes later goes on from there."""
        attempt = self.begin()
        if attempt.delay:
            self.wait(attempt.delay)
        self._ahead = Attempt(attempt.number)

    def begin(self) -> Attempt:
        """Begin the next attempt, without a limit that a driver would keep."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return ahead
        attempt = super().begin()
        return Attempt(attempt.number, None, attempt.delay)

    def limit(self, attempt_timeout: float | None) -> float | None:
        """Return the seconds that the attempt has, from now on."""
        now = system.now()
        left = None if self.deadline is None else self.deadline - now
        limits = [limit for limit in (left, attempt_timeout) if limit is not None]
        self._ends = now + min(limits) if limits else None
        return min(limits, default=None)

    def survives(self, error: Exception, outcome: Outcome | None = None) -> bool:
        """Say whether the call goes on after this error."""
        judged = outcome or self.spec.outcome_of(error, self._serial)
        if judged.timeout and judged.kind is Kind.PERMANENT and self._is_over():
            # Not the server's word but our own: it took too long, which is worth a retry.
            judged = judged.replace(kind=Kind.TRANSIENT)
        return super().survives(error, judged)

    def _is_over(self) -> bool:
        return self._ends is not None and system.now() >= self._ends - _GRACE


class Calls:
    """The calls of one channel, or of several."""

    def __init__(
        self,
        policy: Policy | None,
        downstream: Downstreams,
        repeatable: Repeatable,
        target: str | None,
    ) -> None:
        if not isinstance(repeatable, bool):
            if not callable(repeatable):
                rule = "must be True, False or a function of the method's name"
                raise ConfigurationTypeError("repeatable", rule, repeatable)
            plain_function("repeatable", repeatable)
        if not (target is None or (isinstance(target, str) and target)):
            rule = "must be the address that the channel is made with"
            raise ConfigurationTypeError("target", rule, target)
        self._repeatable = repeatable
        self._target = target
        self._origins = Origins(policy, downstream, self._outcome_of, _judge, _release)
        self.attempt_timeout: float | None = self._origins.policy.attempt_timeout

    def new(self, details: Any) -> GrpcCall:
        """Prepare a call. Its own timeout covers all attempts (gRFC A6)."""
        path = details.method
        method = (path.decode() if isinstance(path, bytes) else str(path)).lstrip("/")
        service, _, name = method.rpartition("/")
        repeatable = self._repeatable
        if not isinstance(repeatable, bool):
            repeatable = bool(repeatable(method))
        if self._target is None:
            spec = self._origins.spec(name, service or method, repeatable=repeatable)
        else:
            spec = self._origins.spec(method, self._target, repeatable=repeatable)
        call = GrpcCall.new(spec)
        if details.timeout is not None:
            deadline = system.now() + details.timeout
            call.deadline = deadline if call.deadline is None else min(deadline, call.deadline)
        return call

    def _outcome_of(self, error: Exception, repeatable: bool) -> Outcome:  # noqa: FBT001
        if not isinstance(error, grpc.RpcError) or not hasattr(error, "code"):
            return PERMANENT
        failed: Any = error
        return outcome_of_code(
            failed.code().name,
            failed.trailing_metadata() or (),
            retryable=self._origins.policy.retryable_codes,
            safe=repeatable,
        )


def metadata_of(call: GrpcCall, details: Any) -> list[Any]:
    """Return the metadata of an attempt, which says how many there were before."""
    # Metadata that a server passes on from its own caller may hold one.
    given = [pair for pair in details.metadata or () if pair[0] != _PREVIOUS]
    before = call.attempts - 1
    return [*given, (_PREVIOUS, str(before))] if before else given


def has_no_time(details: Any) -> bool:
    """Say whether the caller left the call no time at all: gRPC has its own error for that."""
    return details.timeout is not None and details.timeout <= 0


def _judge(_policy: Policy, _repeatable: bool, _answer: Any) -> Outcome:  # noqa: FBT001
    return SUCCESS  # gRPC raises its failures


def _release(_answer: Any) -> None:
    """Do nothing: a call that failed holds nothing."""
