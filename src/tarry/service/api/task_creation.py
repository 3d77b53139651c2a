"""`POST /retry-tasks`, the hot route, and batches."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.errors import StoreUnavailable
from tarry.idempotency.key import MalformedKey, parse_key
from tarry.service.api import problems
from tarry.service.api.prefer import WAIT_HEADER, wait_applied
from tarry.service.api.rate_limit import TenantRateLimiter
from tarry.service.api.request import decode_json
from tarry.service.api.response import PendingResponse, json_response
from tarry.service.api.routing import Operation
from tarry.service.api.task_validation import TaskValidator
from tarry.service.api.views import stored_task_view, task_view
from tarry.service.model import Status
from tarry.service.store import AddResult, AddStatus
from tarry.wire.tasks import (
    MOST_IN_BATCH,
    BatchResult,
    BatchResults,
    NewBatch,
    RetryTask,
    RetryTaskRequest,
    TaskEnd,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from tarry.service.api.context import ApiContext
    from tarry.service.api.prefer import ResultWaiter
    from tarry.service.api.request import ApiRequest
    from tarry.service.api.response import ApiResponse
    from tarry.service.model import TaskContent
    from tarry.service.store import NewTask

_logger = logging.getLogger("tarry.service")
_one = msgspec.json.Decoder(RetryTaskRequest)
_many = msgspec.json.Decoder(NewBatch)
_NOT_READ = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TRACE = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_RETURN = re.compile(rb'(?:^|,)\s*return\s*=\s*"?([a-z]+)"?\s*(?=$|[;,])', re.IGNORECASE)
_MINIMAL = (b"preference-applied", b"return=minimal")
_BREATH = 50
"""Tasks of a batch that are checked before others get their turn."""
_TRY_AGAIN = 10.0
"""Seconds: a tenant with too many live tasks has fewer when some have ended."""
_GIVE_UP = 3
"""Tasks of a batch in a row that the store fails; it is asked about no more of them."""


class _Keyed(msgspec.Struct, rename="camel"):
    """As much of a task as says whether it has a key."""

    idempotency_key: Any = None


class _WellFormed(msgspec.Struct, forbid_unknown_fields=True):
    """A batch of which every task has the right form."""

    tasks: list[RetryTaskRequest]


_keyed = msgspec.json.Decoder(_Keyed)
_all = msgspec.json.Decoder(_WellFormed)


class TaskCreation:
    """Takes tasks in: what it has answered with 201 is durable."""

    def __init__(self, around: ApiContext, waiting: ResultWaiter) -> None:
        self._around = around
        self._waiting = waiting
        self._intake = TaskValidator(around)
        limits = around.limits
        self._rates = (
            None
            if limits.tenant_tasks_per_s is None
            else TenantRateLimiter(limits.tenant_tasks_per_s, limits.tenant_burst, around.monotonic)
        )

    def operations(self) -> list[Operation]:
        """Return the rows of the API that make tasks."""
        return [
            Operation(
                method="POST",
                path="/retry-tasks",
                name="createTask",
                does="Enqueue a task. The same idempotencyKey with the same content answers the "
                "first task.",
                handler=self.create,
                takes=RetryTaskRequest,
                calls_back=TaskEnd,
                answers={201: RetryTask, 200: RetryTask},
                refuses=(400, 413, 415, 422, 429, 503),
                more_headers={
                    **WAIT_HEADER,
                    "Idempotency-Key": "The idempotencyKey, when the body has none.",
                },
            ),
            Operation(
                method="POST",
                path="/retry-tasks/batch",
                name="createTasks",
                does="Enqueue up to 1,000 tasks; each gets a verdict of its own.",
                handler=self.create_many,
                takes=NewBatch,
                answers={200: BatchResults},
                refuses=(400, 413, 415, 422, 429, 503),
                more_headers={
                    "Prefer": "return=minimal answers with the taskId of each alone (RFC 7240)."
                },
            ),
        ]

    def create(self, asked: ApiRequest) -> Awaitable[ApiResponse]:
        """Make one task. Where the whole request is at hand, most wait for the store alone."""
        if asked.whole is None:
            return self._receive(asked)
        asked.check_json(self._around.limits.max_request_bytes)
        return self._begin(asked, asked.whole)

    async def _receive(self, asked: ApiRequest) -> ApiResponse:
        return await self._begin(asked, await asked.json(self._around.limits.max_request_bytes))

    def _begin(self, asked: ApiRequest, body: bytes) -> Awaitable[ApiResponse]:
        form = decode_json(_one, body)
        fields = asked.fields
        key = _header_key(asked) if b"idempotency-key" in fields else None
        trace = _trace(fields[b"traceparent"]) if b"traceparent" in fields else None
        self._charge(asked.tenant, 1)
        new, content = self._intake.accept(asked.tenant, form, key, trace)
        if not new.task.content or b"prefer" in fields:
            return self._go_on(asked, new, content)
        added = self._around.engine.submit([new], [content])
        return PendingResponse(added, partial(self._created, content))

    async def _go_on(self, asked: ApiRequest, new: NewTask, content: TaskContent) -> ApiResponse:
        """Make a task about which others are asked, or whose end is waited for."""
        if not new.task.content:
            await self._intake.complete(new.task, content)
        added = (await self._around.engine.submit([new], [content]))[0]
        if content.owned and added.status is not AddStatus.ADDED:
            await self._intake.drop(content)
        status, view = self._verdict(added, content)
        wait = self._waiting.asked_for(asked)
        if wait is None:
            return _made(status, view)
        view = await self._waiting.outcome(added.task, view, wait)
        return _made(status, view, wait_applied(wait))

    def _created(self, content: TaskContent, added: Sequence[AddResult]) -> ApiResponse:
        return _made(*self._verdict(added[0], content))

    async def create_many(self, asked: ApiRequest) -> ApiResponse:
        """Make many tasks, each in its own right."""
        limits = self._around.limits
        tasks = self._tasks_in(await asked.json(limits.max_batch_bytes))
        if b"idempotency-key" in asked.fields and not all(map(_has_key, tasks)):
            detail = "Idempotency-Key is for one task: give each task its own idempotencyKey."
            raise problems.invalid("Idempotency-Key", detail, 400)
        if len(tasks) > MOST_IN_BATCH:
            detail = f"tasks may have {MOST_IN_BATCH} entries, got {len(tasks)}."
            raise problems.invalid("tasks", detail)
        self._charge(asked.tenant, len(tasks))
        results: list[BatchResult | None] = []
        news: list[NewTask] = []
        contents: list[TaskContent] = []
        failed = 0
        for i, task in enumerate(tasks, 1):
            try:
                one = task if isinstance(task, RetryTaskRequest) else self._read(task)
                new, content = self._intake.accept(asked.tenant, one, None, None)
                if not new.task.content:
                    if failed == _GIVE_UP:
                        raise _not_kept()
                    await self._intake.complete(new.task, content)
                    failed = 0
            except problems.ApiError as refused:
                results.append(_refused(refused))
            except RecursionError:
                results.append(_refused(problems.nested_too_deeply()))
            except StoreUnavailable as error:
                _logger.info("task %d of a batch: %s", i, error)
                failed += 1
                results.append(_refused(_not_kept()))
            else:
                results.append(None)
                news.append(new)
                contents.append(content)
            if not i % _BREATH:
                await asyncio.sleep(0)
        is_minimal = _prefers_minimal(asked)
        answers = iter(await self._around.engine.submit(news, contents) if news else ())
        told_by = iter(contents)
        for i, result in enumerate(results):
            if result is None:
                added, content = next(answers), next(told_by)
                if content.owned and added.status is not AddStatus.ADDED:
                    await self._intake.drop(content)
                try:
                    results[i] = self._result(added, content, is_minimal=is_minimal)
                except problems.ApiError as refused:
                    results[i] = _refused(refused)
        made = BatchResults(results=[one for one in results if one is not None])
        return json_response(200, made, *((_MINIMAL,) if is_minimal else ()))

    def _result(self, added: AddResult, content: TaskContent, *, is_minimal: bool) -> BatchResult:
        if is_minimal:
            return BatchResult(status=_status_of(added), task_id=added.task.id)
        status, view = self._verdict(added, content)
        return BatchResult(status=status, task=view)

    def _tasks_in(self, body: bytes) -> Sequence[RetryTaskRequest | msgspec.Raw]:
        """Return the tasks of a batch; where one may be wrong, they are read one by one later."""
        if len(body) <= self._around.limits.max_request_bytes:
            with suppress(*_NOT_READ):
                return _all.decode(body).tasks
        return decode_json(_many, body).tasks

    def _read(self, task: msgspec.Raw) -> RetryTaskRequest:
        if len(bytes(task)) > self._around.limits.max_request_bytes:
            raise problems.too_large(self._around.limits.max_request_bytes)
        return decode_json(_one, task)

    def _charge(self, tenant: str, tasks: int) -> None:
        if self._rates is not None and (wait := self._rates.take(tenant, tasks)):
            rate = self._around.limits.tenant_tasks_per_s
            detail = f"A tenant may add {rate:g} tasks a second (tenant_rate)."
            raise problems.too_many_requests(detail, wait)

    def _verdict(self, added: AddResult, content: TaskContent) -> tuple[int, RetryTask]:
        status = _status_of(added)
        if added.status is AddStatus.ADDED:
            return status, task_view(added.task, content, Status.PENDING)
        return status, stored_task_view(self._around, added.task)


def _status_of(added: AddResult) -> int:
    status = added.status
    if status is AddStatus.ADDED:
        return 201
    if status is AddStatus.EXISTING:
        return 200
    if status is AddStatus.CONFLICT:
        raise problems.idempotency_key_reused()
    detail = "The tenant has as many live tasks as it may have (tenant_pending)."
    raise problems.too_many_requests(detail, _TRY_AGAIN)


def _prefers_minimal(asked: ApiRequest) -> bool:
    found = _RETURN.search(b",".join(asked.lines(b"prefer")))  # the first counts (RFC 7240, 2)
    return found is not None and found[1].lower() == b"minimal"


def _made(status: int, task: RetryTask, *headers: tuple[bytes, bytes]) -> ApiResponse:
    return json_response(
        status, task, (b"location", b"/retry-tasks/%b" % task.task_id.encode()), *headers
    )


def _has_key(task: RetryTaskRequest | msgspec.Raw) -> bool:
    if isinstance(task, RetryTaskRequest):
        return task.idempotency_key is not None
    try:
        return _keyed.decode(task).idempotency_key is not None
    except _NOT_READ:
        return True  # it is no task, and its verdict says so


def _header_key(asked: ApiRequest) -> str:
    try:
        return parse_key(asked.lines(b"idempotency-key"))
    except MalformedKey as error:
        raise problems.invalid("Idempotency-Key", str(error), 400) from None


def _trace(line: bytes) -> str | None:
    """Return a `traceparent` that others can read; by its standard any other is ignored."""
    return line.decode() if _TRACE.fullmatch(line) else None


def _not_kept() -> problems.ApiError:
    return problems.unavailable("The store is out of order. This task was not kept: send it again.")


def _refused(refused: problems.ApiError) -> BatchResult:
    return BatchResult(status=refused.problem.status, problem=refused.problem.to_dict())
