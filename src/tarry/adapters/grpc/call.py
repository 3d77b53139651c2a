"""The state of one retried gRPC call, which all client interceptors share."""

from __future__ import annotations

from contextvars import copy_context
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias

from tarry.adapters.grpc.library import grpc
from tarry.adapters.http.origins import OriginRegistry
from tarry.core.outcome import PERMANENT, SUCCESS, Kind, Outcome, outcome_of_code
from tarry.core.verdict import Attempt
from tarry.errors import ConfigurationTypeError
from tarry.runtime import drivers
from tarry.runtime.call import RunningBlock
from tarry.runtime.clocks import CancelToken, system
from tarry.runtime.config import check_not_async

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.adapters.http.origins import Downstreams
    from tarry.core.policy import Policy
    from tarry.runtime.config import RetryConfig

Repeatable: TypeAlias = "bool | Callable[[str], bool]"
"""Whether calls may be repeated after the server may have read them: for all methods, or a function
of the method."""

CANCELLED_DURING_BACKOFF = "cancelled while waiting for the next attempt"

_PREVIOUS_ATTEMPTS = "grpc-previous-rpc-attempts"
_CLOCK_TOLERANCE_S = 0.01
"""gRPC measures deadlines with its own clock, which may be ahead of tarry's by this much."""


class GrpcCall(RunningBlock):
    """The state of one gRPC call with all its attempts.

    The time limit of an attempt is enforced by gRPC and not by the driver, so that the user gets a
    gRPC error.

    This is a `RunningBlock` because gRPC raises the final error again, possibly in another thread.
    The traceback then contains no frame of a driver, which an outer retry loop would look for to
    recognise that the call was given up.
    """

    __slots__ = ("_attempt_ends_at", "_started_attempt")

    def __init__(
        self, config: RetryConfig, started: float | None, deadline: float | None, serial: int
    ) -> None:
        super().__init__(config, started, deadline, serial)
        self._started_attempt: Attempt | None = None
        """The first attempt, until the driver calls `begin_attempt` for it."""
        self._attempt_ends_at: float | None = None
        """The time at which the running attempt reaches its time limit."""

    def start_first_attempt(self) -> None:
        """Begin the first attempt before a driver runs the call.

        When the driver calls `begin_attempt`, it gets this attempt.
        """
        attempt = self.begin_attempt()
        if attempt.delay:
            self.wait(attempt.delay)
        self._started_attempt = Attempt(attempt.number)

    def begin_attempt(self) -> Attempt:
        """Begin the next attempt. It has no timeout for the driver, because gRPC enforces it."""
        started, self._started_attempt = self._started_attempt, None
        if started is not None:
            return started
        attempt = super().begin_attempt()
        return Attempt(attempt.number, None, attempt.delay)

    def time_limit(self, attempt_timeout: float | None) -> float | None:
        """Return the time limit in seconds of an attempt that starts now, and remember its end."""
        now = system.now()
        remaining = None if self.deadline is None else self.deadline - now
        limits = [limit for limit in (remaining, attempt_timeout) if limit is not None]
        self._attempt_ends_at = now + min(limits) if limits else None
        return min(limits, default=None)

    def should_retry(self, error: Exception, outcome: Outcome | None = None) -> bool:
        """Record a failed attempt and return whether another attempt follows."""
        classified = outcome or self.config.classify_error(error, self._serial)
        if classified.timeout and classified.kind is Kind.PERMANENT and self._has_timed_out():
            # DEADLINE_EXCEEDED was caused by the attempt's time limit, not by the server: retry.
            classified = classified.replace(kind=Kind.TRANSIENT)
        return super().should_retry(error, classified)

    def _has_timed_out(self) -> bool:
        ends_at = self._attempt_ends_at
        return ends_at is not None and system.now() >= ends_at - _CLOCK_TOLERANCE_S


class CallFactory:
    """Creates the calls of one interceptor, which may serve several channels."""

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
            check_not_async("repeatable", repeatable)
        if not (target is None or (isinstance(target, str) and target)):
            rule = "must be the address for which the channel was created"
            raise ConfigurationTypeError("target", rule, target)
        self._repeatable = repeatable
        self._target = target
        self._origins = OriginRegistry(
            policy, downstream, self._classify_error, _classify_response, _release
        )
        self.attempt_timeout: float | None = self._origins.policy.attempt_timeout

    def new_call(self, details: Any) -> GrpcCall:
        """Return a new call. The timeout that the user gave it covers all attempts (gRFC A6)."""
        path = details.method
        method = (path.decode() if isinstance(path, bytes) else str(path)).lstrip("/")
        service, _, name = method.rpartition("/")
        repeatable = self._repeatable
        if not isinstance(repeatable, bool):
            repeatable = bool(repeatable(method))
        if self._target is None:
            config = self._origins.retry_config(name, service or method, repeatable=repeatable)
        else:
            config = self._origins.retry_config(method, self._target, repeatable=repeatable)
        call = GrpcCall.new(config)
        if details.timeout is not None:
            deadline = system.now() + details.timeout
            call.deadline = deadline if call.deadline is None else min(deadline, call.deadline)
        return call

    def _classify_error(self, error: Exception, repeatable: bool) -> Outcome:  # noqa: FBT001
        if not isinstance(error, grpc.RpcError) or not hasattr(error, "code"):
            return PERMANENT
        rpc_error: Any = error
        return outcome_of_code(
            rpc_error.code().name,
            rpc_error.trailing_metadata() or (),
            retryable=self._origins.policy.retryable_codes,
            safe=repeatable,
        )


class RetriedCall:
    """The call object that the user gets. It makes the attempts and delegates to the last one.

    The first attempt is already running when the user gets this object.
    """

    def __init__(self, call: GrpcCall, send: Callable[[], Any], first_attempt: Any) -> None:
        self._cancel_token = CancelToken()
        call.config = copy(call.config)  # the original is shared by all calls of the method
        call.config.cancel = self._cancel_token
        self._call = call
        self._send = send
        self._last_attempt = first_attempt
        self._is_first_attempt = True
        # Later attempts run with the context variables of the first attempt, in any thread.
        self._context = copy_context()

    def cancel(self) -> bool:
        """Cancel the running attempt, or the wait for the next one."""
        self._cancel_token.cancel()
        return bool(self._last_attempt.cancel())

    def _drive(self, result_of: Callable[[Any], Any]) -> Any:
        """Make attempts in this thread until the call succeeds or is given up."""

        def attempt() -> Any:
            return self._attempt_result(result_of, self._next_attempt())

        try:
            return self._context.run(drivers.drive, self._call, attempt, (), {})
        except CancelledAttempt as cancelled:
            raise cancelled.error from None

    def _attempt_result(self, result_of: Callable[[Any], Any], attempt: Any) -> Any:
        """Return the result of an attempt, or raise its error."""
        try:
            return result_of(attempt)
        except Exception as error:
            if self._cancel_token.cancelled:
                raise CancelledAttempt(error) from None
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._last_attempt, name)

    def _next_attempt(self) -> Any:
        """Return the first attempt, which is already running, or start a new one."""
        if self._is_first_attempt:
            self._is_first_attempt = False
        else:
            self._last_attempt = self._send()
            if self._cancel_token.cancelled:  # `cancel` came before the new attempt was stored
                self._last_attempt.cancel()
        return self._last_attempt


class CancelledAttempt(BaseException):
    """Wraps the error of a cancelled attempt, so that the driver does not classify and retry it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def attempt_metadata(call: GrpcCall, details: Any) -> list[Any]:
    """Return the metadata of an attempt, with the number of previous attempts."""
    # A server may forward its own client's metadata, with the number of that client's attempts.
    metadata = [pair for pair in details.metadata or () if pair[0] != _PREVIOUS_ATTEMPTS]
    previous = call.attempts - 1
    return [*metadata, (_PREVIOUS_ATTEMPTS, str(previous))] if previous else metadata


def is_timeout_over(details: Any) -> bool:
    """Return whether the user's timeout has no time left; gRPC then raises its own error."""
    return details.timeout is not None and details.timeout <= 0


def _classify_response(_policy: Policy, _repeatable: bool, _result: Any) -> Outcome:  # noqa: FBT001
    return SUCCESS  # gRPC raises its failures


def _release(_result: Any) -> None:
    """Do nothing: a failed call holds no resources."""
