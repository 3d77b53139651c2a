"""`POST /retry-tasks`, which is optimised for speed, and `POST /retry-tasks/batch`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.errors import StoreUnavailable
from tarry.idempotency.request import MalformedKey, parse_key
from tarry.service.api import problems
from tarry.service.api.messages import PendingResponse, decode_json, json_response
from tarry.service.api.problems import ApiError
from tarry.service.api.quotas import (
    charge_rate_limit,
    too_many_lanes,
    too_many_unfinished_tasks,
)
from tarry.service.api.routing import Operation
from tarry.service.api.task_validation import TaskBuilder
from tarry.service.api.tasks import WAIT_HEADER, prefers_minimal
from tarry.service.api.trace_context import trace_context_of
from tarry.service.api.views import stored_task_view, task_view
from tarry.service.model import Status
from tarry.service.payloads import BodyStoreUnavailable
from tarry.service.store import AddResult, AddStatus
from tarry.wire import tasks as wire
from tarry.wire.tasks import BatchResult, RetryTask, RetryTaskRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest, ApiResponse
    from tarry.service.api.tasks import ResultWaiter
    from tarry.service.api.trace_context import TraceContext
    from tarry.service.engine.context import EngineLimits
    from tarry.service.model import TaskContent
    from tarry.service.store import Ingest

_logger = logging.getLogger("tarry.service")
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_YIELD_EVERY_TASKS = 50
"""Number of tasks after which `create_batch` yields to the event loop."""
_MINIMAL_APPLIED = (b"preference-applied", b"return=minimal")
_MAX_CONSECUTIVE_STORE_FAILURES = 3
"""After this many failures of the store in a row, the remaining tasks of a batch that need
`finish_building` are rejected."""


class _IdempotencyKeyOnly(msgspec.Struct, rename="camel"):
    """A task of which only the idempotency key is decoded."""

    idempotency_key: Any = None


class _TypedBatch(msgspec.Struct, forbid_unknown_fields=True):
    """A `wire.BatchRequest` with decoded tasks instead of raw JSON."""

    tasks: list[RetryTaskRequest]


_task_decoder = msgspec.json.Decoder(RetryTaskRequest)
_raw_batch_decoder = msgspec.json.Decoder(wire.BatchRequest)
_typed_batch_decoder = msgspec.json.Decoder(_TypedBatch)
_key_decoder = msgspec.json.Decoder(_IdempotencyKeyOnly)

# To read a member of an enum takes 0.27 us in Python 3.11, a constant 0.01 us.
_ADDED, _PENDING = AddStatus.ADDED, Status.PENDING


class TaskCreation:
    """Creates tasks. A task is stored durably before the response 201 is sent."""

    def __init__(self, context: ApiContext, result_waiter: ResultWaiter) -> None:
        self._context = context
        self._result_waiter = result_waiter
        self._task_builder = TaskBuilder(context)
        self._rate_limiter = context.engine.rate_limiter

    @Operation(
        "POST",
        "/retry-tasks",
        "createTask",
        RetryTask,
        statuses=(200, 201),
        errors=(429,),
        body=RetryTaskRequest,
        headers={**WAIT_HEADER, "Idempotency-Key": "The idempotencyKey, if the body has none."},
        callback=wire.CallbackBody,
    )
    def create(self, request: ApiRequest) -> Awaitable[ApiResponse]:
        """Create a task. 200: a task with the same idempotencyKey and content already exists."""
        # A plain function: if the body is complete and only the insert has to be awaited, it
        # returns a PendingResponse, for which `Endpoint.handle_buffered` needs no asyncio task.
        if request.body is None:
            return self._read_and_create(request)
        request.check_json_body(self._context.limits.max_request_bytes)
        return self._create(request, request.body)

    async def _read_and_create(self, request: ApiRequest) -> ApiResponse:
        body = await request.read_body(self._context.limits.max_request_bytes)
        return await self._create(request, body)

    def _create(self, request: ApiRequest, body: bytes) -> Awaitable[ApiResponse]:
        task_request = decode_json(_task_decoder, body)
        headers = request.headers
        idempotency_key = trace = None
        if b"idempotency-key" in headers:
            try:
                idempotency_key = parse_key(request.header_values(b"idempotency-key"))
            except MalformedKey as error:
                detail = str(error)
                raise problems.INVALID.error(detail, status=400, field="Idempotency-Key") from None
        if b"traceparent" in headers:
            trace = trace_context_of(request)
        charge_rate_limit(self._rate_limiter, request.tenant, 1)
        ingest = self._task_builder.build_task(request.tenant, task_request, idempotency_key, trace)
        # If `packed_content` is empty, the policy or the body needs I/O: see `finish_building`.
        if not ingest.task.packed_content or b"prefer" in headers:
            return self._create_with_more_io(request, ingest)
        future = self._context.engine.submit([ingest])
        return PendingResponse(future, partial(self._build_response, ingest))

    async def _create_with_more_io(self, request: ApiRequest, ingest: Ingest) -> ApiResponse:
        """Create a task, and await more than the insert: its policy, its body, `Prefer: wait`."""
        await self._finish_building(ingest)
        (add_result,) = await self.submit([ingest])
        status, view = self._status_and_view(add_result, ingest.content)
        view, headers = await self._result_waiter.wait(request, add_result.task, view)
        return _task_response(status, view, *headers)

    async def build(
        self,
        tenant: str,
        task_request: RetryTaskRequest,
        trace: TraceContext | None,
        *,
        hide_body: bool = False,
        vendor: str | None = None,
    ) -> Ingest:
        """Build a task for `submit`, or raise ApiError. `trace` is that of the request's headers.

        The caller must pass the task to `submit` or `discard`, because its body may be stored.
        """
        ingest = self._task_builder.build_task(
            tenant, task_request, None, trace, hide_body=hide_body, vendor=vendor
        )
        await self._finish_building(ingest)
        return ingest

    async def submit(self, ingests: Sequence[Ingest]) -> Sequence[AddResult]:
        """Add tasks in one write, and delete the stored bodies of tasks that were not added."""
        results = await self._context.engine.submit(ingests)
        for result, ingest in zip(results, ingests, strict=True):
            if ingest.content.body_stored_by_service and result.status is not _ADDED:
                await self._task_builder.delete_body(ingest.content)
        return results

    async def discard(self, ingests: Sequence[Ingest]) -> None:
        """Delete the stored bodies of tasks that will not be submitted."""
        for ingest in ingests:
            await self._task_builder.delete_body(ingest.content)

    async def _finish_building(self, ingest: Ingest) -> None:
        if not ingest.task.packed_content:
            try:
                await self._task_builder.finish_building(ingest)
            except StoreUnavailable as error:
                _logger.info("store unavailable before a task was stored: %s", error)
                raise _not_stored_error(error) from error

    def _build_response(self, ingest: Ingest, results: Sequence[AddResult]) -> ApiResponse:
        status, view = self._status_and_view(results[0], ingest.content)
        return _task_response(status, view)

    @Operation(
        "POST",
        "/retry-tasks/batch",
        "createTasks",
        wire.BatchResults,
        errors=(429,),
        body=wire.BatchRequest,
        headers={"Prefer": "return=minimal returns only the taskId of each task (RFC 7240)."},
    )
    async def create_batch(self, request: ApiRequest) -> ApiResponse:
        """Create up to 1,000 tasks. Each has its own result."""
        body = await request.read_body(self._context.limits.max_batch_bytes)
        tasks = self._decode_batch(body)
        if b"idempotency-key" in request.headers and not all(map(_has_idempotency_key, tasks)):
            rule = "applies to one task: give each task of a batch its own idempotencyKey"
            raise problems.invalid("Idempotency-Key", rule, status=400)
        if len(tasks) > wire.MAX_BATCH_SIZE:
            rule = f"must have at most {wire.MAX_BATCH_SIZE} entries"
            raise problems.invalid("tasks", rule, len(tasks))
        charge_rate_limit(self._rate_limiter, request.tenant, len(tasks))
        tenant, build_task = request.tenant, self._task_builder.build_task
        ingests: list[Ingest] = []
        rejections: dict[int, BatchResult] = {}  # by index, of tasks that are not submitted
        consecutive_failures = 0
        last_error: StoreUnavailable | None = None
        for index, task in enumerate(tasks):
            try:
                task_request = (
                    task if isinstance(task, RetryTaskRequest) else self._decode_task(task)
                )
                ingest = build_task(tenant, task_request, None, None)
                if not ingest.task.packed_content:
                    if consecutive_failures == _MAX_CONSECUTIVE_STORE_FAILURES:
                        raise _not_stored_error(last_error)
                    await self._task_builder.finish_building(ingest)
                    consecutive_failures = 0
            except ApiError as error:
                rejections[index] = _error_result(error)
            except RecursionError:
                rejections[index] = _error_result(problems.nested_too_deeply())
            except StoreUnavailable as error:
                _logger.info("store unavailable for a task of a batch, index=%d: %s", index, error)
                consecutive_failures += 1
                last_error = error
                rejections[index] = _error_result(_not_stored_error(error))
            else:
                ingests.append(ingest)
            if not (index + 1) % _YIELD_EVERY_TASKS:
                await asyncio.sleep(0)
        is_minimal = prefers_minimal(request)
        add_results = await self._context.engine.submit(ingests) if ingests else ()
        results = await self._batch_results(add_results, ingests, is_minimal=is_minimal)
        for index, result in rejections.items():  # ascending, so that no result moves later
            results.insert(index, result)
        document = wire.BatchResults(results=results)
        return json_response(200, document, *((_MINIMAL_APPLIED,) if is_minimal else ()))

    async def _batch_results(
        self, add_results: Sequence[AddResult], ingests: Sequence[Ingest], *, is_minimal: bool
    ) -> list[BatchResult]:
        results: list[BatchResult] = []
        for number, (add_result, ingest) in enumerate(zip(add_results, ingests, strict=True), 1):
            if not number % _YIELD_EVERY_TASKS:
                await asyncio.sleep(0)
            is_added = add_result.status is _ADDED
            if is_added and is_minimal:  # without a call, because most large batches are minimal
                results.append(BatchResult(status=201, task_id=add_result.task.id))
                continue
            content = ingest.content
            if not is_added and content.body_stored_by_service:
                await self._task_builder.delete_body(content)
            try:
                results.append(self._batch_result(add_result, content, is_minimal=is_minimal))
            except ApiError as error:
                results.append(_error_result(error))
        return results

    def _batch_result(
        self, add_result: AddResult, content: TaskContent, *, is_minimal: bool
    ) -> BatchResult:
        if is_minimal:
            status = _http_status(add_result, self._context.engine.limits)
            return BatchResult(status=status, task_id=add_result.task.id)
        status, view = self._status_and_view(add_result, content)
        return BatchResult(status=status, task=view)

    def _decode_batch(self, body: bytes) -> Sequence[RetryTaskRequest | msgspec.Raw]:
        """Return the tasks of a batch: decoded all at once if possible (faster), else as raw JSON.

        The caller decodes raw tasks one by one. A task that is invalid, or larger than
        `max_request_bytes`, then fails alone.
        """
        if len(body) <= self._context.limits.max_request_bytes:
            with suppress(*_DECODE_ERRORS):
                return _typed_batch_decoder.decode(body).tasks
        return decode_json(_raw_batch_decoder, body).tasks

    def _decode_task(self, task: msgspec.Raw) -> RetryTaskRequest:
        max_bytes = self._context.limits.max_request_bytes
        if len(bytes(task)) > max_bytes:
            raise problems.too_large(max_bytes)
        return decode_json(_task_decoder, task)

    def _status_and_view(self, result: AddResult, content: TaskContent) -> tuple[int, RetryTask]:
        if result.status is _ADDED:
            return 201, task_view(result.task, content, _PENDING)
        status = _http_status(result, self._context.engine.limits)
        return status, stored_task_view(self._context, result.task)


def _http_status(add_result: AddResult, limits: EngineLimits) -> int:
    """Return the HTTP status for an added or existing task; raise ApiError for a rejected one."""
    status = add_result.status
    if status is _ADDED:
        return 201
    if status is AddStatus.EXISTING:
        return 200
    if status is AddStatus.CONFLICT:
        detail = (
            "idempotencyKey was already used with a different task. Resend the original task, or "
            "use a new key."
        )
        raise problems.IDEMPOTENCY_KEY_REUSED.error(detail, field="idempotencyKey")
    if status is AddStatus.TOO_MANY_LANES:
        raise too_many_lanes(limits)
    raise too_many_unfinished_tasks(limits)


def _task_response(status: int, task: RetryTask, *headers: tuple[bytes, bytes]) -> ApiResponse:
    location = (b"location", b"/retry-tasks/%b" % task.task_id.encode())
    return json_response(status, task, location, *headers)


def _has_idempotency_key(task: RetryTaskRequest | msgspec.Raw) -> bool:
    if isinstance(task, RetryTaskRequest):
        return task.idempotency_key is not None
    try:
        return _key_decoder.decode(task).idempotency_key is not None
    except _DECODE_ERRORS:
        return True  # an invalid task: `create_batch` returns an error for this task only


def _not_stored_error(error: StoreUnavailable | None) -> ApiError:
    is_body_store = isinstance(error, BodyStoreUnavailable)
    component = "The storage of large bodies" if is_body_store else "The store"
    detail = f"{component} is unavailable. This task was not stored: send it again."
    return problems.unavailable(detail)


def _error_result(error: ApiError) -> BatchResult:
    return BatchResult(status=error.problem.status, problem=error.problem.to_dict())
