"""An engine with fake dependencies: virtual time, a fake target, and the in-memory store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import msgspec

from tarry.core.breaker import Breaker
from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.delivery.signing import Signer
from tarry.service.delivery.targets import lane_name, parse_target
from tarry.service.encryption import Codec
from tarry.service.engine.claim_turns import ClaimTurns
from tarry.service.engine.context import (
    ADDING,
    BODY_STORE,
    DATA,
    EngineContext,
    EngineLimits,
    HealthCheck,
    ServiceHealth,
    StoreClock,
)
from tarry.service.engine.engine import Engine
from tarry.service.engine.lanes import Lanes
from tarry.service.engine.limits import LimitPattern, LimitTable
from tarry.service.engine.metrics import Metrics
from tarry.service.engine.policies import PolicyCache
from tarry.service.engine.reporting import EngineEvent, Reporter
from tarry.service.engine.result_writer import build_callback_task
from tarry.service.engine.secrets import Secret, SecretResolver
from tarry.service.engine.signers import SignerCache
from tarry.service.engine.tracing import AttemptTracer
from tarry.service.model import AttemptRecord, Task, TaskContent, WorkerRecord
from tarry.service.store import AddResult, Ingest, LeaseTerms, Retention, Store
from tarry.service.task_search import TaskFinder
from tarry.testing import VirtualClock
from tests.service.stores.reference_store import ReferenceStore

EPOCH_S = 1_800_000_000.0
LEASE = LeaseTerms("worker", 70_000, 1_000)
DAY_MS = 86_400_000
OK = DeliveryResult(status=200, duration_ms=1.0)
BUSY = DeliveryResult(status=503, duration_ms=1.0)

Responder = Callable[[DeliveryRequest], Awaitable[DeliveryResult]]


class FakeTarget:
    """A target that returns scripted responses in order, and then repeats the last one."""

    def __init__(self, *responses: DeliveryResult | Responder) -> None:
        self.responses = list(responses) or [OK]
        self.requests: list[DeliveryRequest] = []
        self.times: list[float] = []

    async def send(self, request: DeliveryRequest) -> DeliveryResult:
        """Return the next response."""
        self.requests.append(request)
        self.times.append(asyncio.get_running_loop().time())
        response = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        return response if isinstance(response, DeliveryResult) else await response(request)

    async def close(self) -> None:
        """Do nothing: no connection is open."""


def new_breaker(**arguments: Any) -> Breaker:
    """Return a breaker that counts each attempt, as those of the service, and opens for 30 s."""
    return Breaker(**{"min_span": 0.0, "count_retries": True, "open_for": 30.0} | arguments)


class EngineHarness:
    """One engine and its store, which use the clock of the running event loop."""

    def __init__(
        self,
        target: Any,
        *,
        store: Store | None = None,
        limits: EngineLimits | None = None,
        seed: int = 1,
        lease: LeaseTerms = LEASE,
        build_breaker: Callable[[], Breaker] = new_breaker,
        patterns: Sequence[LimitPattern] = (),
        monotonic: Callable[[], float] | None = None,
        unix_time: Callable[[], float] | None = None,
        signing_secrets: Sequence[str] = (),
        codec: Codec | None = None,
        read_body: Callable[[TaskContent], Awaitable[bytes]] | None = None,
        check_body_store: Callable[[], Awaitable[None]] | None = None,
        delete_bodies: Callable[[list[str]], Awaitable[None]] | None = None,
        blocked_pause_s: float | None = None,
        secrets: Sequence[Secret] = (),
        role: str = "all",
        tracer: AttemptTracer | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.store: Store = store or ReferenceStore(lambda: int((EPOCH_S + loop.time()) * 1000))
        limits = limits or EngineLimits()
        rng = Random(seed)
        self.ids = (f"0190a000-0000-7000-8000-{i:012x}" for i in range(seed << 24, 1 << 47))
        codec = codec or Codec()
        clock = StoreClock(monotonic or loop.time)
        limit_table = LimitTable(
            patterns, max_in_flight=limits.max_lane_running_attempts, build_breaker=build_breaker
        )
        self.lanes = Lanes(
            limit_table.build_downstream,
            max_leased=limits.max_leased,
            max_lane_leased=limits.max_lane_leased,
        )
        self.metrics = Metrics(self.lanes)
        reporter = Reporter(self.metrics, clock.now_ms)
        self.events = reporter.events
        self.published: list[EngineEvent] = []
        self.events.listen(self.published.append)
        health = ServiceHealth(loop.time)
        self.context = EngineContext(
            store=self.store,
            delivery_client=target,
            policies=PolicyCache(self.store, clock.now_ms),
            lanes=self.lanes,
            limit_table=limit_table,
            claim_turns=ClaimTurns(),
            clock=clock,
            reporter=reporter,
            health=health,
            store_check=HealthCheck(
                health,
                (ADDING, DATA),
                self.store.ping,
                loop.time,
                interval_s=1.0,
                failing_interval_s=1.0,
            ),
            body_store_check=HealthCheck(
                health,
                (BODY_STORE,),
                check_body_store or _check_no_body_store,
                loop.time,
                interval_s=30.0,
                failing_interval_s=5.0,
            ),
            process=WorkerRecord(name=lease.worker, host="host", pid=seed, role=role),
            lease_terms=lease,
            limits=limits,
            retention=Retention(7 * DAY_MS, 30 * DAY_MS),
            task_finder=TaskFinder(self.store, codec),
            draw=rng.random,
            unix_time=unix_time or (lambda: EPOCH_S + loop.time()),
            unpack=codec.unpack,
            read_body=read_body or _fail_to_read_body,
            delete_bodies=delete_bodies or _delete_no_bodies,
            delete_unreferenced_bodies=_delete_no_unreferenced_bodies,
            signers=SignerCache(
                self.store,
                clock.now_ms,
                codec.decrypt_secret,
                lambda: EPOCH_S + loop.time(),
                fallback=Signer(signing_secrets) if signing_secrets else None,
                fallback_tenant="default",
            ),
            secrets=SecretResolver(secrets, loop.time),
            blocked_pause_s=blocked_pause_s,
            tracer=tracer,
            build_callback_task=partial(
                build_callback_task, new_id=lambda: next(self.ids), pack=codec.pack
            ),
        )
        self.engine = Engine(self.context)

    def new_task(self, url: str = "http://a.example:80/", **changes: Any) -> Ingest:
        """Return a task to add; `changes` are fields of `Task` or `TaskContent`, or `lane_key`."""
        fields = {
            name: changes.pop(name)
            for name in tuple(changes)
            if name in TaskContent.__struct_fields__
        }
        content = TaskContent(url=url, **fields)
        delay_ms = changes.pop("delay_ms", 0)
        tenant = changes.pop("tenant", "default")
        lane_key = changes.pop("lane_key", None)
        task_id = next(self.ids)
        task = Task(
            id=task_id,
            tenant=tenant,
            lane=lane_name(tenant, parse_target(url), lane_key),
            key=changes.pop("key", task_id),
            fingerprint=b"fingerprint",
            packed_content=Codec().pack(content),
            **changes,
        )
        return Ingest(task, delay_ms, content=content)

    async def add(self, *new_tasks: Ingest) -> list[Task]:
        """Add tasks and return them as they were stored; the attempts of due tasks start."""
        clock = self.context.clock
        clock.synchronize(clock.local_ms(), await self.store.ping())
        added: Sequence[AddResult] = await self.engine.submit(list(new_tasks))
        for _ in range(2):  # attempts start in the second next iteration of the event loop
            await asyncio.sleep(0)
        return [result.task for result in added]

    async def get_task(self, task: Task) -> Task:
        """Return the current state of a task in the store."""
        found = await self.store.get_task(task.tenant, task.id)
        assert found is not None
        return found

    async def list_attempts(self, task: Task) -> list[AttemptRecord]:
        """Return the attempt log of a task."""
        return await self.store.list_attempts(task.tenant, task.id)

    def event_kinds(self) -> list[str]:
        """Return the kinds of the published events, in order."""
        return [event.kind for event in self.published]


def run(main: Callable[[], Awaitable[None]], *, start: float = 1000.0) -> None:
    """Run a test on virtual time.

    It starts at a fixed time: rounding to milliseconds would differ with the time of the machine.
    """
    with VirtualClock(start=start) as clock:
        clock.run(main)


async def _fail_to_read_body(_content: TaskContent) -> bytes:
    msg = "this test has no body in the payload store"
    raise AssertionError(msg)


async def _check_no_body_store() -> None:
    pass


async def _delete_no_unreferenced_bodies() -> int:
    return 0


async def _delete_no_bodies(_refs: list[str]) -> None:
    pass


def decision_fields(attempt: AttemptRecord) -> dict[str, Any]:
    """Return the decision of an attempt as a dict."""
    decision: dict[str, Any] = msgspec.to_builtins(attempt.decision)
    return decision
