"""The limits of a tenant: tasks per second, unfinished tasks, and lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.api import problems

if TYPE_CHECKING:
    from tarry.service.api.problems import ApiError
    from tarry.service.engine.context import EngineLimits
    from tarry.service.engine.rate_limits import TenantRateLimiter

_QUOTA_RETRY_AFTER_S = 10.0
_RETENTION_RETRY_AFTER_S = 60.0
"""For rows that retention removes, after days. The next row may be removed at any time, and an
operator may raise the limit, so it is not longer."""


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
    """Return the error (429) for a request that needs a lane, when the tenant is at its quota."""
    detail = (
        f"The tenant has reached its limit of {limits.max_tenant_lanes:,} lanes (setting "
        "tenant_lanes). Each target host and each laneKey has a lane. Use existing ones. A lane is "
        "removed with its last task, unless it is paused or has limits."
    )
    return _over_quota(detail, _RETENTION_RETRY_AFTER_S)


def too_many_policy_versions(limit: int | None) -> ApiError:
    """Return the error (429) for a new version of a policy, when the tenant is at its quota."""
    detail = (
        f"The tenant has reached its limit of {limit:,} policy versions (setting "
        "tenant_policy_versions). Replaced versions are removed after a day if no task uses them. "
        "Wait, or delete policies."
    )
    return _over_quota(detail, _RETENTION_RETRY_AFTER_S)


def _over_quota(detail: str, retry_after_s: float = _QUOTA_RETRY_AFTER_S) -> ApiError:
    retry_after = problems.retry_after(retry_after_s)
    return problems.TENANT_LIMIT.error(detail, headers=[retry_after])
