"""The arguments of `retry`, `call`, `acall` and `attempts`: checked once, and shared by calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.checks import check_count, check_positive
from tarry.core.outcome import SUCCESS
from tarry.core.policy import Policy
from tarry.errors import ConfigurationTypeError
from tarry.runtime.callables import check_not_async
from tarry.runtime.classify import Classifier
from tarry.runtime.clocks import CancelToken

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.call import Call
    from tarry.core.outcome import Outcome
    from tarry.core.policy import Random
    from tarry.runtime.classify import On
    from tarry.runtime.downstream import Downstream

RETRY_AND_HEDGE_MESSAGE = (
    "a call can have a retry policy or a hedging policy, but not both (gRFC A6): "
    "use tarry.retry(...) or tarry.hedge(...)"
)
CANCEL_IN_COROUTINE_MESSAGE = (
    "cancel is for plain functions; cancel the task of a coroutine instead"
)

_DEFAULT_POLICY = Policy()


class RetryConfig:
    """The configuration of one retry loop. It is not modified, because all calls share it."""

    __slots__ = (
        "after_one_attempt",
        "cancel",
        "classify_error",
        "classify_result",
        "deadline",
        "downstream",
        "draw",
        "operation",
        "passes_number",
        "policy",
        "release",
        "until",
    )

    def __init__(
        self,
        *,
        on: On | None = None,
        until: Callable[[Any], bool] | None = None,
        attempts: int | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        policy: Policy | None = None,
        downstream: Downstream | None = None,
        name: str | None = None,
        cancel: CancelToken | None = None,
        random: Random | None = None,
        classify_result: Callable[[Any], Outcome] | None = None,
        release: Callable[[Any], Any] | None = None,
        repeatable: bool = True,
        passes_number: bool = False,
    ) -> None:
        if on is None and until is None:
            msg = (
                "on is missing: choose which errors are worth another attempt, as in "
                "@tarry.retry(on=ConnectionError). There is no default, because retrying every "
                "error repeats bugs and hides them; write on=Exception if you mean that"
            )
            raise ConfigurationTypeError(msg)
        check_instance("policy", policy, Policy, "a tarry.Policy(...)")
        check_instance("cancel", cancel, CancelToken, "a tarry.CancelToken()")
        check_instance("name", name, str, "a string")
        if downstream is not None:
            from tarry.runtime.downstream import Downstream

            check_instance("downstream", downstream, Downstream, 'a tarry.Downstream("name")')
        if random is not None and not hasattr(random, "random"):
            rule = "must be a source such as random.Random(7)"
            raise ConfigurationTypeError("random", rule, random)
        if until is not None and not callable(until):
            raise ConfigurationTypeError("until", "must be a predicate over the result", until)
        if until is not None:
            check_not_async("until", until)
        changes: dict[str, Any] = {}
        if attempts is not None:
            changes["max_attempts"] = check_count("attempts", attempts)
        if timeout is not None:
            changes["attempt_timeout"] = check_positive("timeout", timeout)
        base = policy or _DEFAULT_POLICY
        self.policy: Policy = base.replace(**changes) if changes else base
        classifier = Classifier(on, repeatable=repeatable)
        self.classify_error: Callable[[Exception, int], Outcome] = classifier.classify_error
        self.until: Callable[[Any], bool] | None = until
        self.classify_result: Callable[[Any], Outcome] | None = classify_result
        """Classifies results. Set by HTTP adapters, because a failed request returns a response."""
        self.release: Callable[[Any], Any] | None = release
        """Releases the connection of a result that is not accepted, before the wait for the next
        attempt. Returns whether the result can still be returned to the caller."""
        self.passes_number: bool = passes_number
        """Whether the function takes the number of the attempt as the argument `number`."""
        self.deadline: float | None = (
            None if deadline is None else check_positive("deadline", deadline)
        )
        self.downstream: Downstream | None = downstream
        self.operation: str = name or ""
        self.cancel: CancelToken | None = cancel
        self.after_one_attempt: Call | None = None
        """The state of any call after one attempt; see `decide_after_first_failure`."""
        self.draw: Callable[[], float] | None = None if random is None else random.random

    def success_test(self) -> Callable[[Any], bool] | None:
        """Return a predicate that is true for successes, or None if every result is a success."""
        classify_result = self.classify_result
        if classify_result is None:
            return None
        return lambda result: classify_result(result) is SUCCESS

    @property
    def needs_full_driver(self) -> bool:
        """Whether a `RunningCall` must be created before the first attempt of each call."""
        return (
            self.until is not None
            or (self.classify_result is not None and self.downstream is None)
            or self.deadline is not None
            or self.policy.attempt_timeout is not None
            or self.policy.total_budget is not None
            or (self.downstream is not None and self.downstream.has_limiters)
        )

    def with_default_name(self, operation: str) -> RetryConfig:
        """Return a copy whose operation has this name; return self if the user gave a name."""
        if self.operation:
            return self
        copy = RetryConfig.__new__(RetryConfig)
        for field in self.__slots__:
            setattr(copy, field, getattr(self, field))
        copy.operation = operation
        return copy


def check_instance(field: str, value: object, expected: type, description: str) -> None:
    """Raise unless `value` is None or an instance of `expected`."""
    if value is not None and not isinstance(value, expected):
        raise ConfigurationTypeError(field, f"must be {description}", value)
