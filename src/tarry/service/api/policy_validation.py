"""Validation of the policy fields that a caller sends, as a policy or as overrides of a task."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError
from tarry.service.api.problems import from_configuration_error, invalid, unknown_field
from tarry.wire.policies import JSON_FIELDS, policy_from_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.core.policy import Policy
    from tarry.service.api.context import ApiLimits

_POLICY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_policy_id(policy_id: str) -> str:
    """Return the policy id if it is valid, or raise ApiError."""
    if not _POLICY_ID.fullmatch(policy_id):
        rule = "must have 1 to 100 letters, digits and ._- and begin with a letter or digit"
        raise invalid("policyId", rule, policy_id)
    return policy_id


def describe_missing_version(policy_id: str, newest: int | None) -> str:
    """Describe which versions a policy has; `newest` is None for a built-in policy."""
    if newest is None:
        return f"{policy_id} is built in and has no versions"
    return f"the newest version of {policy_id} is {newest}"


def check_policy(
    document: Mapping[str, Any], base: Policy, limits: ApiLimits, *, parent: str = ""
) -> Policy:
    """Return `base` with the fields of `document`, or raise ApiError for an invalid field.

    `parent` is the path of the document in the request: "policy" for the overrides of a task.
    """
    prefix = f"{parent}." if parent else ""
    for name in document:
        if name not in JSON_FIELDS:
            raise unknown_field(parent, name, JSON_FIELDS)
    try:
        policy = policy_from_json(document, base)
    except ConfigurationError as error:
        field = error.field or ""
        is_known = field.partition("[")[0] in JSON_FIELDS
        path = prefix + field if is_known else parent or "policy"
        raise from_configuration_error(path, error) from None
    if policy.attempt_timeout is None or policy.attempt_timeout > limits.max_attempt_timeout_s:
        max_ms = f"{limits.max_attempt_timeout_s * 1000:.0f}"
        rule = f"must be at most {max_ms} (max_attempt_timeout_ms), so that the lease lasts longer"
        raise invalid(f"{prefix}attemptTimeoutMs", rule)
    return policy
