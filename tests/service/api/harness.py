"""A harness that calls the API without a server, with a fake engine and an in-memory store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import count
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from tarry.errors import ConfigurationError
from tarry.service.api.application import Api
from tarry.service.api.context import ApiContext, ApiLimits
from tarry.service.api.messages import IS_ABANDONED, ApiResponse
from tarry.service.api.problems import PROBLEM_TYPES
from tarry.service.delivery.guard import Guard
from tarry.service.encryption import Codec
from tarry.service.engine.context import (
    ADDING,
    BODY_STORE,
    EngineContext,
    EngineLimits,
    HealthCheck,
    ServiceHealth,
    StoreClock,
)
from tarry.service.engine.engine import Engine
from tarry.service.engine.lanes import Lanes, build_downstream
from tarry.service.engine.limits import LimitTable
from tarry.service.engine.metrics import Metrics
from tarry.service.engine.policies import PolicyCache
from tarry.service.engine.rate_limits import TenantRateLimiter
from tarry.service.engine.reporting import EngineEvent, FinishedTask, Reporter
from tarry.service.engine.secrets import Secret, SecretResolver
from tarry.service.engine.series import SeriesRecorder
from tarry.service.engine.signers import SignerCache
from tarry.service.model import (
    AttemptRecord,
    LaneActivity,
    LaneRecord,
    Status,
    Task,
    TaskContent,
    WorkerRecord,
)
from tarry.service.payloads import BodyStore
from tarry.service.records.lane_activity import read_lane_activity
from tarry.service.store import (
    AddResult,
    CancelStatus,
    ConfiguredLimits,
    Ingest,
    LaneWriteStatus,
    LeaseTerms,
    RetryNowStatus,
    StoredTaskFilter,
    TaskResult,
)
from tarry.wire.tasks import DownstreamLimits, LimitsSource, LocalStats, WaitReason
from tests.service.stores.reference_store import ReferenceStore

T = TypeVar("T")

NOW = 1_800_000_000_000
TARGET = "https://example.com/hook"


class FakeTime:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.ms = NOW

    def seconds(self) -> float:
        """Return seconds since 1970."""
        return self.ms / 1000

    def milliseconds(self) -> int:
        """Return epoch milliseconds."""
        return self.ms


class FakeEngine:
    """An engine that applies operations to the store and makes no attempts."""

    def __init__(
        self,
        store: ReferenceStore,
        time: FakeTime,
        limits: EngineLimits,
        payloads: FakePayloads,
        secrets: Sequence[Secret],
    ) -> None:
        self.store = store
        self.clock = StoreClock(time.seconds)
        self.blocked_lanes: dict[str, str] = {}
        self.clock.synchronize(self.clock.local_ms(), time.ms)
        self.lanes = Lanes(partial(build_downstream, max_in_flight=1), max_leased=0)
        self.reporter = Reporter(Metrics(self.lanes), self.clock.now_ms)
        self.process = WorkerRecord(name="worker", host="host", pid=1)
        self.events = self.reporter.events
        self.policies = PolicyCache(store, self.clock.now_ms)
        self.signers = SignerCache(
            store, self.clock.now_ms, Codec().decrypt_secret, self.clock.now_s
        )
        self.secrets = SecretResolver(secrets, time.seconds)
        self.health = ServiceHealth(time.seconds)
        self.store_check = HealthCheck(
            self.health, (ADDING,), store.ping, time.seconds, interval_s=1.0, failing_interval_s=1.0
        )
        self.body_store_check = HealthCheck(
            self.health,
            (BODY_STORE,),
            payloads.check,
            time.seconds,
            interval_s=30.0,
            failing_interval_s=5.0,
        )
        self.limit_table = LimitTable(max_in_flight=8)
        self.limits = limits
        self.rate_limiter: TenantRateLimiter | None = None
        if limits.tenant_tasks_per_s is not None:
            self.rate_limiter = TenantRateLimiter(
                limits.tenant_tasks_per_s, limits.tenant_burst, time.seconds
            )
        self.series = SeriesRecorder(cast("EngineContext", self))
        self.error: Exception | None = None
        """Raised by `submit` when set."""
        self.waited_for: asyncio.Queue[str] = asyncio.Queue()
        """Ids passed to `wait_until_finished`."""

    def submit(self, ingests: Sequence[Ingest]) -> asyncio.Future[Sequence[AddResult]]:
        """Add tasks."""
        return asyncio.ensure_future(self._add(ingests))

    async def _add(self, ingests: Sequence[Ingest]) -> Sequence[AddResult]:
        if self.error is not None:
            raise self.error
        return await self.store.add(
            ingests,
            quota=self.limits.max_tenant_unfinished_tasks,
            lane_quota=self.limits.max_tenant_lanes,
        )

    async def wait_until_finished(self, task_id: str, seconds: float) -> FinishedTask | None:
        """Wait until the test passes the finished task to `reporter`."""
        self.waited_for.put_nowait(task_id)
        return await self.reporter.wait_until_finished(task_id, seconds)

    async def cancel(self, tenant: str, task_id: str) -> CancelStatus | None:
        """Cancel a task."""
        return await self.store.cancel(tenant, task_id)

    async def retry_now(self, tenant: str, task_id: str) -> RetryNowStatus | None:
        """Make a task due."""
        quota = self.limits.max_tenant_unfinished_tasks
        return await self.store.retry_now(tenant, task_id, quota=quota)

    async def pause(self, lane: str) -> LaneWriteStatus:
        """Pause a lane."""
        return await self.store.pause(lane, lane_quota=self.limits.max_tenant_lanes)

    async def resume(self, lane: str) -> None:
        """Resume a lane."""
        await self.store.resume(lane)

    async def reset(self, lane: str) -> None:
        """Resume a lane."""
        await self.store.resume(lane)

    async def set_limits(self, lane: str, limits: DownstreamLimits | None) -> LaneWriteStatus:
        """Set the limits of a lane; two lanes may have limits."""
        status = await self.store.set_limits(
            lane, limits, max_limited=2, lane_quota=self.limits.max_tenant_lanes
        )
        self.limit_table.stored = (
            await self.store.load_limits(ConfiguredLimits(-1)) or ConfiguredLimits()
        )
        return status

    def configured_limits(self, lane: str) -> tuple[DownstreamLimits, LimitsSource]:
        """Return the limits of a lane."""
        return self.limit_table.find(lane)

    def is_running(self, task_id: str) -> bool | None:
        """Return None: this engine leases no tasks."""
        return None

    async def read_activity(self, lanes: Sequence[str]) -> dict[str, LaneActivity]:
        """Return the stored activity of lanes."""
        return await read_lane_activity(self.store, lanes)

    def blocked_reason(self, lane: str) -> str | None:
        """Return a reason if the target of the lane is not allowed."""
        return self.blocked_lanes.get(lane)

    def waiting_for(self, lane: LaneRecord) -> WaitReason | None:
        """Return why the tasks of a lane wait."""
        return "blocked" if lane.name in self.blocked_lanes else lane.waiting_for

    def local_stats(self, lane: str) -> LocalStats | None:
        """Return the same state for every lane."""
        return LocalStats(breaker="closed", budget=9.5, running=1, leased=2, p50_ms=12.0)


class FakePayloads(BodyStore):
    """A body store that keeps bodies in a dict."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.error: Exception | None = None
        """Raised by `check` and `put` when set."""
        self.check_count = 0

    async def check(self) -> None:
        """Count the check."""
        self.check_count += 1
        if self.error is not None:
            raise self.error

    async def put(self, tenant: str, task_id: str, body: bytes) -> tuple[str, bytes]:
        """Store a body."""
        if self.error is not None:
            raise self.error
        self.bodies[f".tarry/{tenant}/{task_id}"] = body
        return f".tarry/{tenant}/{task_id}", sha256(body).digest()

    def check_ref(self, tenant: str, ref: str) -> str:
        """Accept names below the tenant's prefix."""
        if not ref.startswith(f"{tenant}/"):
            raise ConfigurationError("bodyRef", f"must be under {tenant}/", ref)
        return ref

    async def head_object(self, ref: str) -> tuple[int, str | None]:
        """Return the size and the tag; an object named "missing" does not exist."""
        if ref.endswith("missing"):
            raise ConfigurationError("bodyRef", "must name an existing object", ref)
        return 7, "tag"

    async def delete(self, refs: Sequence[str]) -> None:
        """Delete bodies."""
        for ref in refs:
            self.bodies.pop(ref, None)


@dataclass
class Response:
    """The ASGI messages of one response."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def status(self) -> int:
        """The HTTP status."""
        return cast("int", self.messages[0]["status"])

    @property
    def body(self) -> bytes:
        """The complete body."""
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def json(self) -> Any:
        """The decoded body, which must be declared as JSON."""
        assert "application/json" == self.header("content-type"), self.body
        return json.loads(self.body)

    @property
    def problem(self) -> dict[str, Any]:
        """The decoded body, which must be a problem of a known type."""
        assert "application/problem+json" == self.header("content-type"), self.body
        problem = cast("dict[str, Any]", json.loads(self.body))
        [problem_type] = [known for known in PROBLEM_TYPES if known.type == problem["type"]]
        assert problem_type.title == problem["title"]
        assert self.status == problem["status"]
        assert self.status in problem_type.statuses
        return problem

    def header(self, name: str) -> str | None:
        """Return the value of a header that occurs at most once."""
        values = [value for key, value in self.messages[0]["headers"] if key == name.encode()]
        assert len(values) <= 1
        return values[0].decode() if values else None


class ApiHarness:
    """The API with its fake dependencies."""

    def __init__(
        self,
        *,
        keys: bool = False,
        quota: int | None = None,
        lane_quota: int | None = None,
        rate: float | None = None,
        burst: float = 1_000.0,
        limits: ApiLimits | None = None,
        grpc: bool = True,
        operator: str = "",
        hosts: frozenset[str] | None = None,
        role: str = "all",
        secrets: Sequence[Secret] = (),
        compatibility: tuple[str, ...] = (),
        allowed_methods: tuple[str, ...] = (),
    ) -> None:
        self.time = FakeTime()
        self.store = ReferenceStore(self.time.milliseconds)
        engine_limits = EngineLimits(
            max_tenant_unfinished_tasks=quota,
            max_tenant_lanes=lane_quota,
            tenant_tasks_per_s=rate,
            tenant_burst=burst,
        )
        self.payloads = FakePayloads()
        self.engine = FakeEngine(self.store, self.time, engine_limits, self.payloads, secrets)
        self.codec = Codec()
        numbers = count(1)
        self.context = ApiContext(
            engine=cast("Engine", self.engine),
            store=self.store,
            body_store=self.payloads,
            codec=self.codec,
            target_guard=Guard(),
            new_id=lambda: f"01890000-0000-7000-8000-{next(numbers):012x}",
            monotonic=self.time.seconds,
            render_metrics=_metrics,
            require_api_keys=keys,
            operator_tenant=operator,
            accepted_host_names=hosts,
            role=role,
            compatibility=compatibility,
            allowed_methods=allowed_methods,
            has_grpc=grpc,
            limits=limits or ApiLimits(),
        )
        self.api = Api(self.context, version="1.2.3")

    async def request(
        self,
        method: str,
        path: str,
        document: object = None,
        *,
        body: bytes | Sequence[bytes] | None = None,
        headers: dict[str, str] | None = None,
        lines: Sequence[tuple[bytes, bytes]] = (),
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> Response:
        """Send one request: a document as JSON, or a body in one or more chunks.

        A body in one chunk takes the fast path, as in the server. `lines` are further headers.
        """
        header_values = {name.lower(): value for name, value in (headers or {}).items()}
        if document is not None:
            body = json.dumps(document).encode()
        if body is not None:
            header_values.setdefault("content-type", "application/json")
        chunks = [body or b""] if isinstance(body, bytes) or body is None else list(body)
        split = urlsplit(path)
        scope = {
            "type": "http",
            "method": method,
            "path": split.path,
            "raw_path": split.path.encode(),
            "query_string": split.query.encode(),
            "root_path": "",
            IS_ABANDONED: is_abandoned,
            "headers": [
                *([] if b"host" in dict(lines) else [(b"host", b"tarry.test")]),
                *(
                    (name.encode(), value.encode("latin-1"))
                    for name, value in header_values.items()
                ),
                *lines,
            ],
        }
        response = Response()

        async def receive() -> dict[str, Any]:
            if chunks:
                part = chunks.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(chunks)}
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            response.messages.append(dict(message))

        handle = self.api.fast_routes.get(path.encode()) if method == "POST" else None
        if (
            handle is None or len(chunks) != 1 or "content-length" in header_values
        ):  # the fast path does not check Content-Length, which a test may have set wrong
            await self.api(scope, receive, send)
        else:
            responded: asyncio.Future[ApiResponse] = asyncio.get_running_loop().create_future()
            task = handle(scope, chunks[0], responded.set_result)
            complete = await responded
            assert task is None or task.done()
            await complete.send(scope, send)
        return response

    async def create(self, **fields: Any) -> dict[str, Any]:
        """Create a task and return its JSON."""
        response = await self.request("POST", "/retry-tasks", {"targetUrl": TARGET, **fields})
        assert 201 == response.status, response.body
        return cast("dict[str, Any]", response.json)

    async def stored_task(self, task_id: str, tenant: str = "default") -> tuple[Task, TaskContent]:
        """Return a stored task and its content."""
        task = await self.store.get_task(tenant, task_id)
        assert task is not None
        return task, self.codec.unpack(task.packed_content)

    async def count_tasks(self, tenant: str | None = None) -> int:
        """Return the number of stored tasks."""
        return sum((await self.store.counters(tenant)).task_counts.values())

    async def lease_due_tasks(self) -> list[Task]:
        """Lease all due tasks."""
        lease = LeaseTerms("w", 60_000, 1_000)
        return (await self.store.claim(lease, limit=1000, per_lane=1000)).tasks

    async def exhaust_due_tasks(
        self, reason: str = "attempts", excerpt: str | None = None
    ) -> list[str]:
        """Finish all due tasks as dead letters after one attempt."""
        tasks = await self.lease_due_tasks()
        attempts = [
            AttemptRecord(
                attempt_number=task.attempts + 1,
                scheduled_at=task.next_attempt_at,
                started_at=self.time.ms,
                response_status=503,
                outcome="transient",
                response_excerpt=excerpt,
            )
            for task in tasks
        ]
        await self.store.finish([
            TaskResult(task=task, attempt=attempt, status=Status.EXHAUSTED, reason=reason)
            for task, attempt in zip(tasks, attempts, strict=True)
        ])  # fmt: skip
        return [task.id for task in tasks]


def run_with_api(test: Callable[[ApiHarness], Coroutine[Any, Any, T]], **options: Any) -> T:
    """Run a test coroutine with a new harness."""

    async def run() -> T:
        return await test(ApiHarness(**options))

    return asyncio.run(run())


__all__ = [
    "NOW",
    "TARGET",
    "ApiHarness",
    "EngineEvent",
    "Response",
    "StoredTaskFilter",
    "run_with_api",
]


async def _metrics(tenant: str | None, accept: str) -> tuple[bytes, str]:
    content_type = accept if accept not in {"", "*/*"} else "text/plain; version=0.0.4"
    return f"of {tenant or 'all'}\n".encode(), content_type
