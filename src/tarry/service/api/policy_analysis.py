"""`/policy-simulations` and `/policy-advice`: analyses of a policy. Nothing is stored."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tarry.core.text import format_count
from tarry.service.analysis_process import (
    MAX_CPU_S,
    AdviceJob,
    AnalysisRunner,
    AnalysisTooLarge,
    RecordedAttempt,
)
from tarry.service.api import problems
from tarry.service.api.messages import Disconnected, decode_json, json_response
from tarry.service.api.policies import PolicyFields, read_policy
from tarry.service.api.routing import Operation
from tarry.service.delivery.targets import stored_lane_name
from tarry.service.model import LOST
from tarry.service.shutdown import cancel_and_wait
from tarry.service.store import StoredTaskFilter
from tarry.service.tenant_shares import TenantShares
from tarry.wire.policies import policy_to_json
from tarry.wire.tasks import PolicyAdvice, PolicyAdviceRequest, PolicySimulation

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator
    from typing import Any

    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest, ApiResponse

MAX_ADVICE_ATTEMPTS = 20_000
"""Maximum number of attempts that an analysis reads: 1.3 MB, and 0.6 s of processor time."""
MIN_ADVICE_ATTEMPTS = 200
"""Equal to `MIN_ATTEMPTS` of `tarry.tuning.rules`, which the service does not import."""
_ATTEMPTS_PER_PAGE = 500
_MAX_PAGES = 100
"""Limits the number of reads if most tasks of a lane have no attempts yet."""
_NO_SLOT_RETRY_AFTER_S = 5.0
_DISCONNECT_CHECK_INTERVAL_S = 0.5
T = TypeVar("T")
_advice_decoder = msgspec.json.Decoder(PolicyAdviceRequest)


class PolicyAnalysisResource:
    """The operations that analyse policies, a limited number at a time."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._runner = AnalysisRunner()
        self._slots = TenantShares(context.limits.max_policy_analyses)

    @Operation(
        "POST",
        "/policy-simulations",
        "simulatePolicy",
        PolicySimulation,
        errors=(429,),
        body=PolicyFields,
    )
    async def simulate(self, request: ApiRequest) -> ApiResponse:
        """Simulate an outage of a server whose clients have this policy, without storing it.

        The simulation is the scenario `storm` of `tarry simulate`, without breaker and budget.
        """
        policy = await read_policy(request, self._context.limits)
        with self._analysis_slot(request.tenant, "Use fewer attempts or longer delays."):
            analysis = self._runner.simulate_storm(policy_to_json(policy))
            simulation = await _run_while_connected(request, analysis)
        return json_response(200, simulation)

    @Operation(
        "POST",
        "/policy-advice",
        "advisePolicy",
        PolicyAdvice,
        errors=(404, 429),
        body=PolicyAdviceRequest,
    )
    async def advise(self, request: ApiRequest) -> ApiResponse:
        """Propose values for a policy from the newest attempts of a downstream, with reasons.

        The proposal is that of `tarry tune`. It is not stored.
        """
        body = await request.read_body(self._context.limits.max_request_bytes)
        advice_request = decode_json(_advice_decoder, body)
        tenant, lane, policy_id = request.tenant, advice_request.lane, advice_request.policy_id
        effective_policy = await self._context.engine.policies.load(tenant, policy_id)
        if effective_policy is None:
            raise problems.no_such("policy")
        with self._analysis_slot(tenant, "Use `tarry tune --service`, which has no limit."):
            attempts = await self._read_attempts(tenant, lane)
            policy = policy_to_json(effective_policy.policy)
            analysis = self._runner.advise(AdviceJob(lane, policy_id, policy, attempts))
            advice = await _run_while_connected(request, analysis)
        return json_response(200, advice)

    def close(self) -> None:
        """End all analyses, so that the server can shut down."""
        self._runner.close()

    async def _read_attempts(self, tenant: str, lane: str) -> list[RecordedAttempt]:
        """Return the attempts of the newest tasks of a lane; raise ApiError if there are too few.

        Attempts without a duration or an outcome are skipped.
        """
        store, stored_name = self._context.store, stored_lane_name(tenant, lane)
        attempts: list[RecordedAttempt] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await store.list_attempts_of_tasks(
                tenant, StoredTaskFilter(lane=stored_name), cursor=cursor, limit=_ATTEMPTS_PER_PAGE
            )
            attempts += [
                RecordedAttempt(
                    task_id,
                    attempt.attempt_number,
                    attempt.started_at,
                    attempt.duration_ms,
                    attempt.outcome,
                )
                for task_id, attempt in page.items
                if attempt.duration_ms is not None and attempt.outcome != LOST
            ]
            cursor = page.cursor
            if cursor is None or len(attempts) >= MAX_ADVICE_ATTEMPTS:
                break
        if len(attempts) >= MIN_ADVICE_ATTEMPTS:
            return attempts[:MAX_ADVICE_ATTEMPTS]
        if not attempts and await store.get_lane(stored_name) is None:
            raise problems.no_such("downstream")
        count = format_count(len(attempts), "recorded attempt")
        rule = f"has {count}, but advice needs {MIN_ADVICE_ATTEMPTS}"
        if cursor is not None:  # many newer tasks have no attempts yet
            rule = (
                f"has {count} among the newest tasks, but advice needs {MIN_ADVICE_ATTEMPTS}. Use "
                "`tarry tune --service`, which reads all tasks"
            )
        raise problems.invalid("lane", rule)

    @contextmanager
    def _analysis_slot(self, tenant: str, remedy: str) -> Generator[None]:
        """Occupy a slot while an analysis runs; raise ApiError if the tenant may not have one.

        `AnalysisTooLarge` is converted to ApiError, whose message ends with `remedy`.
        """
        if not self._slots.is_available(tenant):
            if count := self._slots.used_by(tenant):
                detail = (
                    f"The tenant may not start another analysis now (running: {count}). Wait until "
                    "one ends."
                )
                retry_after = problems.retry_after(_NO_SLOT_RETRY_AFTER_S)
                raise problems.TENANT_LIMIT.error(detail, headers=[retry_after])
            detail = "Other tenants use all slots for policy analyses. Try again later."
            raise problems.unavailable(detail, _NO_SLOT_RETRY_AFTER_S)
        self._slots.acquire(tenant)
        try:
            yield
        except AnalysisTooLarge:
            detail = (
                "The analysis of this policy needs too much memory, or more than "
                f"{MAX_CPU_S} s of processor time. {remedy}"
            )
            raise problems.INVALID.error(detail) from None
        finally:
            self._slots.release(tenant)


async def _run_while_connected(request: ApiRequest, analysis: Coroutine[Any, Any, T]) -> T:
    """Return the result of an analysis; cancel it, and raise, if the client disconnects."""
    task = asyncio.ensure_future(analysis)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_DISCONNECT_CHECK_INTERVAL_S)
            if request.is_abandoned and not task.done():
                raise Disconnected
        return task.result()
    finally:
        await cancel_and_wait([task])
