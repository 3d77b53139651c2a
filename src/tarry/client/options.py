"""What the client's methods take: names and types, in one place for both clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Literal, Required, TypeAlias, TypedDict

from tarry.core.suggest import did_you_mean
from tarry.errors import ConfigurationTypeError

Duration: TypeAlias = float | timedelta
"""Seconds, or a timedelta."""
Instant: TypeAlias = float | datetime
"""Seconds since 1970, as `time.time()` gives them, or a datetime with a time zone."""
Status: TypeAlias = Literal["PENDING", "IN_FLIGHT", "SUCCEEDED", "EXHAUSTED", "CANCELLED"]


class TaskOptions(TypedDict, total=False):
    """How a task is sent.

    `body` is text, bytes, or any JSON value; None is no body. `key` is the idempotency key, of
    all attempts and of this request; without one the client makes it. `overrides` has fields of
    a policy as the API names them: `{"maxAttempts": 3, "totalBudgetMs": 60_000}`.
    """

    method: str
    headers: Mapping[str, str] | None
    body_ref: str | None
    policy: str
    policy_version: int | None
    key: str | None
    delay: Duration | None
    at: Instant | None
    overrides: Mapping[str, Any] | None
    callback: str | None


class NewTask(TaskOptions, total=False):
    """One task of `enqueue_many`: the arguments of `enqueue`."""

    url: Required[str]
    body: Any


NewTasks: TypeAlias = Iterable[NewTask]


class TaskFilter(TypedDict, total=False):
    """Which tasks to list; what is left out asks for all."""

    status: Status | None
    policy: str | None
    lane: str | None
    reason: str | None


class LetterFilter(TypedDict, total=False):
    """Which dead letters to list or to purge; what is left out asks for all."""

    policy: str | None
    lane: str | None
    reason: str | None


class ReplayOptions(LetterFilter, total=False):
    """Which dead letters to bring back, and how many a second; without a rate, at once.

    `before`: those that died then or earlier. A dry run counts them and changes nothing.
    """

    before: Instant | None
    rate: float | None
    dry_run: bool


_TAKES: dict[str, tuple[str, ...]] = {
    "enqueue": ("url", "body", *TaskOptions.__annotations__),
    "tasks": tuple(TaskFilter.__annotations__),
    "dead_letters": tuple(LetterFilter.__annotations__),
    "purge": tuple(LetterFilter.__annotations__),
    "replay": tuple(ReplayOptions.__annotations__),
}


def check_names(method: str, arguments: Iterable[str]) -> None:
    """Refuse arguments that a method of the client does not have."""
    names = _TAKES[method]
    for name in arguments:
        if name not in names:
            msg = f"{method} has no argument {name!r}; {did_you_mean(name, names)}"
            raise ConfigurationTypeError(msg)
