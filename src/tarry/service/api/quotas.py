"""The limits of a tenant: tasks per second, unfinished tasks, and lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.api import problems

if TYPE_CHECKING:
    from tarry.service.api.problems import ApiError
    from tarry.service.engine.context import EngineLimits
    from tarry.service.engine.rate_limits import TenantRateLimiter

_QUOTA_RETRY_AFTER_S = 10.0


def charge_rate_limit(limiter: TenantRateLimiter | None, tenant: str, task_count: int) -> None:
    """Take one token per task from the tenant's bucket, or raise ApiError (429)."""
    if limiter is not None and (wait_s := limiter.take(tenant, task_count)):
        detail = (
            f"A tenant may add or retry {limiter.rate:g} tasks per second (setting tenant_rate)."
        )
        raise problems.TENANT_LIMIT.error(detail, headers=[problems.retry_after(wait_s)])


def too_many_unfinished_tasks(limits: EngineLimits) -> ApiError:
    """Return the error (429) for a tenant at its quota of tasks that are PENDING or IN_FLIGHT."""
    detail = (
        f"The tenant has reached its limit of {limits.max_tenant_unfinished_tasks:,} unfinished "
        "tasks (setting tenant_pending). Wait until tasks are finished, or cancel some."
    )
    return _over_quota(detail)


def too_many_lanes(limits: EngineLimits) -> ApiError:
    """Return the error (429) for a task that needs a new lane, when the tenant is at its quota."""
    detail = (
        f"The tenant has reached its limit of {limits.max_tenant_lanes:,} lanes (setting "
        "tenant_lanes). Each target host and each laneKey has a lane. Use existing ones."
    )
    return _over_quota(detail)


def _over_quota(detail: str) -> ApiError:
    retry_after = problems.retry_after(_QUOTA_RETRY_AFTER_S)
    return problems.TENANT_LIMIT.error(detail, headers=[retry_after])
