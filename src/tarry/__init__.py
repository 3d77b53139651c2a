"""tarry: retries with backoff, jitter, budgets, circuit breakers and deadlines.

    @tarry.retry(on=ConnectionError, attempts=4)
    def load(): ...

Names are imported on first use, so that `import tarry` alone is fast.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; importing `typing` for it costs 10 ms
if TYPE_CHECKING:
    from tarry import client as client
    from tarry import idempotency as idempotency
    from tarry import simulator as simulator
    from tarry import telemetry as telemetry
    from tarry import testing as testing
    from tarry import tuning as tuning
    from tarry.adapters.http.hand_off import HandOff
    from tarry.client.async_client import AsyncClient
    from tarry.client.client import Client
    from tarry.core.adaptive_limit import AdaptiveLimit
    from tarry.core.backoff import Schedule
    from tarry.core.breaker import Breaker, BreakerState
    from tarry.core.budget import Budget, RatioBudget, ThrottleBudget, TokenBudget
    from tarry.core.checks import Seconds
    from tarry.core.decide import decide
    from tarry.core.events import (
        AttemptFailed,
        AttemptStarted,
        BreakerStateChanged,
        BudgetEmpty,
        Event,
        GaveUp,
        HedgeFired,
        HedgeWon,
        Succeeded,
        Waited,
        WillWait,
    )
    from tarry.core.hedging import Hedging
    from tarry.core.hints import Hint, hint_from_grpc, hint_from_headers, parse_retry_after
    from tarry.core.limiter import AIMD, AdaptiveRate, InFlight, Limiter
    from tarry.core.outcome import (
        Kind,
        Outcome,
        outcome_of_code,
        outcome_of_exception,
        outcome_of_status,
    )
    from tarry.core.policy import Policy
    from tarry.core.verdict import CallRecord, CallState, Progress, Reason, Step, Stop, Wait
    from tarry.errors import (
        AttemptTimeout,
        BlockingWait,
        BreakerOpen,
        Cancelled,
        ConfigurationError,
        ConfigurationTypeError,
        DeadlineExceeded,
        HandedOff,
        LimitReached,
        MissingExtra,
        Overloaded,
        Rejected,
        ResultNotAccepted,
        StoreUnavailable,
        TarryError,
    )
    from tarry.runtime.attempt_number import current_attempt
    from tarry.runtime.call_records import record_calls
    from tarry.runtime.deadlines import deadline, remaining
    from tarry.runtime.downstream import Downstream
    from tarry.runtime.effects import CancelToken
    from tarry.runtime.error_record import record_of
    from tarry.runtime.events import Listener, listen
    from tarry.runtime.hedge import hedge, hedge_sync
    from tarry.runtime.options import AsyncOn, On, OnRetry
    from tarry.runtime.policy_files import load_policy
    from tarry.runtime.process_settings import configure, set_active
    from tarry.runtime.retry import (
        AttemptContext,
        Attempts,
        Decorator,
        acall,
        attempts,
        call,
        retry,
        retrying,
    )

_NAMES_BY_MODULE = {
    "tarry.adapters.http.hand_off": "HandOff",
    "tarry.client.async_client": "AsyncClient",
    "tarry.client.client": "Client",
    "tarry.core.adaptive_limit": "AdaptiveLimit",
    "tarry.core.backoff": "Schedule",
    "tarry.core.breaker": "Breaker BreakerState",
    "tarry.core.budget": "Budget RatioBudget ThrottleBudget TokenBudget",
    "tarry.core.checks": "Seconds",
    "tarry.core.events": (
        "AttemptFailed AttemptStarted BreakerStateChanged BudgetEmpty Event GaveUp HedgeFired "
        "HedgeWon Succeeded Waited WillWait"
    ),
    "tarry.core.decide": "decide",
    "tarry.core.hedging": "Hedging",
    "tarry.core.hints": "Hint hint_from_grpc hint_from_headers parse_retry_after",
    "tarry.core.limiter": "AIMD AdaptiveRate InFlight Limiter",
    "tarry.core.outcome": "Kind Outcome outcome_of_code outcome_of_exception outcome_of_status",
    "tarry.core.policy": "Policy",
    "tarry.core.verdict": "CallRecord CallState Progress Reason Step Stop Wait",
    "tarry.errors": (
        "AttemptTimeout BlockingWait BreakerOpen Cancelled ConfigurationError "
        "ConfigurationTypeError DeadlineExceeded HandedOff LimitReached MissingExtra "
        "Overloaded Rejected ResultNotAccepted StoreUnavailable TarryError"
    ),
    "tarry.runtime.attempt_number": "current_attempt",
    "tarry.runtime.events": "Listener listen",
    "tarry.runtime.call_records": "record_calls",
    "tarry.runtime.deadlines": "deadline remaining",
    "tarry.runtime.downstream": "Downstream",
    "tarry.runtime.effects": "CancelToken",
    "tarry.runtime.hedge": "hedge hedge_sync",
    "tarry.runtime.error_record": "record_of",
    "tarry.runtime.options": "AsyncOn On OnRetry",
    "tarry.runtime.policy_files": "load_policy",
    "tarry.runtime.process_settings": "configure set_active",
    "tarry.runtime.retry": ("AttemptContext Attempts Decorator acall attempts call retry retrying"),
}
_PACKAGES = ("client", "idempotency", "simulator", "telemetry", "testing", "tuning")
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

__all__ = [
    "AIMD", "AdaptiveLimit", "AdaptiveRate", "AsyncClient", "AsyncOn", "AttemptContext",
    "AttemptFailed", "AttemptStarted", "AttemptTimeout", "Attempts", "BlockingWait", "Breaker",
    "BreakerOpen", "BreakerState", "BreakerStateChanged", "Budget", "BudgetEmpty", "CallRecord",
    "CallState", "CancelToken", "Cancelled", "Client", "ConfigurationError",
    "ConfigurationTypeError", "DeadlineExceeded", "Decorator", "Downstream", "Event", "GaveUp",
    "HandOff", "HandedOff", "HedgeFired", "HedgeWon", "Hedging", "Hint", "InFlight", "Kind",
    "LimitReached", "Limiter", "Listener", "MissingExtra", "On", "OnRetry", "Outcome", "Overloaded",
    "Policy", "Progress", "RatioBudget", "Reason", "Rejected", "ResultNotAccepted", "Schedule",
    "Seconds", "Step", "Stop", "StoreUnavailable", "Succeeded", "TarryError", "ThrottleBudget",
    "TokenBudget", "Wait", "Waited", "WillWait", "acall", "attempts", "call", "configure",
    "current_attempt",
    "deadline", "decide", "hedge", "hedge_sync", "hint_from_grpc", "hint_from_headers", "listen",
    "load_policy", "outcome_of_code", "outcome_of_exception", "outcome_of_status",
    "parse_retry_after", "record_calls", "record_of", "remaining", "retry", "retrying",
    "set_active",
]  # fmt: skip


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _PACKAGES:
        return import_module(f"tarry.{name}")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'tarry' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES]
