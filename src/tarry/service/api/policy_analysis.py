"""`/policy-simulations`: simulations of policies, which are not stored."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tarry.service.analysis_process import MAX_CPU_S, AnalysisRunner, AnalysisTooLarge
from tarry.service.api import problems
from tarry.service.api.messages import json_response
from tarry.service.api.policies import PolicyFields, read_policy
from tarry.service.api.routing import Operation
from tarry.service.tenant_shares import TenantShares
from tarry.wire.policies import policy_to_json
from tarry.wire.tasks import PolicySimulation

if TYPE_CHECKING:
    from collections.abc import Generator

    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest, ApiResponse

_TOO_MANY_RETRY_AFTER_S = 5.0


class PolicyAnalysisResource:
    """The operations that simulate policies, a limited number at a time."""

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
        with self._limit(request.tenant):
            simulation = await self._runner.simulate_storm(policy_to_json(policy))
        return json_response(200, simulation)

    def close(self) -> None:
        """End all simulations, so that the server can shut down."""
        self._runner.close()

    @contextmanager
    def _limit(self, tenant: str) -> Generator[None]:
        """Use a slot of the tenant, or raise ApiError; convert `AnalysisTooLarge` to ApiError."""
        if not self._slots.is_available(tenant):
            if count := self._slots.used_by(tenant):
                detail = f"The tenant has {count} running simulations. Wait until one has ended."
                retry_after = problems.retry_after(_TOO_MANY_RETRY_AFTER_S)
                raise problems.TENANT_LIMIT.error(detail, headers=[retry_after])
            detail = "Too many simulations are running."
            raise problems.unavailable(detail, _TOO_MANY_RETRY_AFTER_S)
        self._slots.acquire(tenant)
        try:
            yield
        except AnalysisTooLarge:
            detail = (
                f"The simulation of this policy needs more than {MAX_CPU_S} s of processor time. "
                "Use fewer attempts or longer delays."
            )
            raise problems.INVALID.error(detail) from None
        finally:
            self._slots.release(tenant)
