"""From the arguments of `enqueue` to the JSON that the service takes. Pure but for new keys."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
from msgspec import UNSET, Raw

from tarry.client.options import check_names
from tarry.core.checks import at_least
from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr
from tarry.wire import http
from tarry.wire.tasks import LAST_TIME, MOST_IN_BATCH, NewBatch, RetryTaskRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tarry.client.options import Duration, Instant, NewTask

BATCH_BYTES = 8 << 20
"""Of JSON in a batch: half of what the service takes unless it is told otherwise."""

_encode = msgspec.json.Encoder().encode


def new_task(
    url: str,
    body: Any = None,
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    body_ref: str | None = None,
    policy: str = "default",
    policy_version: int | None = None,
    key: str | None = None,
    delay: Duration | None = None,
    at: Instant | None = None,
    overrides: Mapping[str, Any] | None = None,
    callback: str | None = None,
) -> RetryTaskRequest:
    """Return the form of a task. It has a key, so that sending it twice makes one task."""
    if not isinstance(policy, str):
        rule = (
            f"must be the name of a policy, got {short_repr(policy)}: put_policy() gives one a "
            "name, and overrides= changes fields for one task"
        )
        raise ConfigurationTypeError("policy", rule)
    if delay is not None and at is not None:
        msg = "delay and at both say when a task begins: leave one of them out"
        raise ConfigurationError(msg)
    key = str(uuid4()) if key is None else key
    http.key_text(key)
    is_bytes = isinstance(body, (bytes, bytearray))
    return RetryTaskRequest(
        target_url=url,
        method=method,
        headers=_dict("headers", headers),
        body=UNSET if body is None or is_bytes else Raw(_json("body", body)),
        body_base64=b64encode(body).decode() if is_bytes else None,
        body_ref=body_ref,
        policy_id=policy,
        policy_version=policy_version,
        idempotency_key=key,
        delay_ms=None if delay is None else round(seconds_of("delay", delay) * 1000),
        next_attempt_at=None if at is None else epoch_ms("at", at),
        policy=_dict("overrides", overrides),
        callback_url=callback,
    )


def content_of(task: RetryTaskRequest) -> bytes:
    """Return the body of a request for one task."""
    return _written("a task", task)


def batches(tasks: Iterable[NewTask]) -> Iterator[bytes]:
    """Return the bodies of the requests for many tasks, none of them too large."""
    batch: list[Raw] = []
    size = 0
    for place, task in enumerate(tasks):
        raw = _one_of_many(place, task)
        if batch and (len(batch) == MOST_IN_BATCH or size + len(raw) > BATCH_BYTES):
            yield _encode(NewBatch(tasks=batch))
            batch, size = [], 0
        batch.append(Raw(raw))
        size += len(raw)
    if batch:
        yield _encode(NewBatch(tasks=batch))


def epoch_ms(field: str, at: Instant) -> int:
    """Return an instant as the API writes it."""
    if isinstance(at, datetime):
        if at.utcoffset() is None:
            raise ConfigurationError(field, "must have a time zone, as datetime.now(UTC) has", at)
        at = at.timestamp()
    ms = round(at_least(field, at, 0) * 1000)
    if ms > LAST_TIME:
        rule = f"must be in seconds since 1970, got {at!r}: are these milliseconds?"
        raise ConfigurationError(field, rule)
    return ms


def seconds_of(field: str, duration: Duration) -> float:
    """Return a length of time in seconds."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    return at_least(field, seconds, 0)


def written(field: str, value: Mapping[str, Any]) -> bytes:
    """Return a document of the user's as JSON."""
    return _json(field, _dict(field, value))


def _one_of_many(place: int, task: NewTask) -> bytes:
    where = f"tasks[{place}]"
    if not isinstance(task, Mapping):
        raise ConfigurationTypeError(where, 'must be the arguments of enqueue, {"url": ...}', task)
    if "url" not in task:
        raise ConfigurationTypeError(where, "must have a url")
    try:
        check_names("enqueue", task)
        return _written(where, new_task(**task))
    except ConfigurationError as error:
        raise type(error)(f"{where}: {error}") from None


def _written(what: str, task: RetryTaskRequest) -> bytes:
    try:
        return _encode(task)
    except (TypeError, ValueError) as error:
        msg = f"{what} has something that JSON cannot hold: {error}"
        raise ConfigurationTypeError(msg) from None


def _dict(field: str, value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigurationTypeError(field, "must be a dict", value)
    return dict(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _json(field: str, value: object) -> bytes:
    # The standard library's, for msgspec makes null of what JSON has no word for.
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        rule = f"must be text, bytes or a value that JSON can hold: {error}"
        raise ConfigurationTypeError(field, rule) from None
