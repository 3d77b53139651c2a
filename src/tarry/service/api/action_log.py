"""The log of operators' actions: one line for each change, with the key, the object and the values.

A handler reports what it has changed with `ApiRequest.report_change`. The line is written when the
request ends, also if it fails after the change.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tarry.service.api.messages import ApiRequest, Change
    from tarry.service.api.routing import Handler

_logger = logging.getLogger("tarry.service")
_MAX_VALUE_CHARS = 2_000
_NO_FIELD = object()


def log_changes(
    action: str, handler: Handler, describe_key: Callable[[ApiRequest], str]
) -> Handler:
    """Return a handler that also logs the changes that `handler` reports.

    `describe_key` returns the name and the id of the request's API key.
    """
    return partial(_handle_and_log, action, handler, describe_key)


async def _handle_and_log(
    action: str, handler: Handler, describe_key: Callable[[ApiRequest], str], request: ApiRequest
) -> Any:
    try:
        return await handler(request)
    finally:
        for change in request.changes:
            key = describe_key(request)
            _logger.info("%s", format_action(action, request.tenant, key, change))


def format_action(action: str, tenant: str, key: str, change: Change) -> str:
    """Return the line of one action. All values are JSON, so they cannot start another line."""
    return (
        f"operator action, action={action} tenant={_to_json(tenant)} key={_to_json(key)} "
        f"object={_to_json(change.target)} before={_to_json(change.before)} "
        f"after={_to_json(change.after)}"
    )


def changed_fields(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the fields of both that differ; None stays None, with all fields of the other."""
    if before is None or after is None:
        return (
            None if before is None else dict(before),
            None if after is None else dict(after),
        )
    names = [
        name
        for name in (*before, *(name for name in after if name not in before))
        if before.get(name, _NO_FIELD) != after.get(name, _NO_FIELD)
    ]
    return (
        {name: before[name] for name in names if name in before},
        {name: after[name] for name in names if name in after},
    )


def _to_json(value: object) -> str:
    text = json.dumps(value, separators=(",", ":"), default=str).replace("\x7f", "\\u007f")
    if len(text) > _MAX_VALUE_CHARS:
        return json.dumps(text[:_MAX_VALUE_CHARS] + "...")
    return text
