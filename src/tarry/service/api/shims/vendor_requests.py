"""What the shims have in common: the conversion of fields, errors and lookups."""

from __future__ import annotations

import re
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tarry.service.api.problems import ApiError, from_decode_error, invalid
from tarry.service.task_search import TaskFinder
from tarry.wire.http import Problem
from tarry.wire.tasks import RetryTaskRequest, Search

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiResponse
    from tarry.service.api.problems import Headers
    from tarry.service.api.routing import Handler
    from tarry.service.model import Task

DOCS_PAGE = "docs/moving-from-qstash-and-cloud-tasks.md"
BAD_REQUEST, INVALID = 400, 422
_TASK_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Shim(Protocol):
    """The routes of one vendor's API."""

    @property
    def handlers(self) -> dict[str, dict[str, Handler]]:
        """Handlers by path and method. The first path that matches is used."""
        ...

    def render_error(self, error: ApiError) -> ApiResponse:
        """Return the response for an error, in the format of the vendor."""
        ...


def vendor_error(status: int, detail: str, headers: Headers = ()) -> ApiError:
    """Return an error that the API of tarry does not have."""
    return ApiError(Problem(status, HTTPStatus(status).phrase, detail), headers)


def build_task_request(fields: Mapping[str, Any]) -> RetryTaskRequest:
    """Return the request for the JSON fields of `POST /retry-tasks`, or raise ApiError."""
    try:
        return msgspec.convert(fields, RetryTaskRequest)
    except msgspec.ValidationError as error:
        raise from_decode_error(error, RetryTaskRequest) from None


@contextmanager
def rename_fields(rename: Callable[[str], str], prefix: str = "") -> Generator[None]:
    """Replace the invalid field in an ApiError of the `with` block by the vendor's name for it.

    `prefix` is the place of the field, such as the index of a message in a batch.
    """
    try:
        yield
    except ApiError as error:
        problem = error.problem
        field, detail = problem.extensions.get("field"), problem.detail or ""
        if not field or not detail.startswith(field):
            raise
        vendor_field = prefix + rename(field)
        renamed = vendor_field + detail.removeprefix(field)
        extensions = {**problem.extensions, "field": vendor_field}
        raise ApiError(
            Problem(problem.status, problem.title, renamed, problem.type, extensions=extensions),
            error.headers,
        ) from None


def check_attempt_timeout(field: str, timeout_ms: int, value: str, context: ApiContext) -> None:
    """Raise ApiError if an attempt timeout is zero, or longer than the service allows."""
    max_s = context.limits.max_attempt_timeout_s
    if not 0 < timeout_ms <= max_s * 1000:
        rule = f"must be more than 0 s and at most {max_s:g} s (setting max_attempt_timeout_ms)"
        raise invalid(field, rule, value)


class TaskLookup:
    """Finds tasks by id or idempotency key."""

    def __init__(self, context: ApiContext) -> None:
        self._store = context.store
        self._finder = TaskFinder(context.store, context.codec)

    async def find_by_id(self, tenant: str, task_id: str) -> Task | None:
        """Return a task; None if there is no such task, or the id is not a UUID."""
        if not _TASK_ID.fullmatch(task_id):
            return None
        return await self._store.get_task(tenant, task_id)

    async def find_by_key(self, tenant: str, key: str) -> Task | None:
        """Return the newest task with an idempotency key."""
        search = Search(idempotency_key=key)
        page = await self._finder.find_page(tenant, search, cursor=None, limit=1)
        return page.items[0].task if page.items else None
