"""The fields of a policy as a caller gives them, checked by name."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError, short_repr
from tarry.service.api.problems import invalid, unknown_field
from tarry.wire.policies import JSON_FIELDS, policy_from_wire

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.core.policy import Policy
    from tarry.service.api.context import ApiLimits

_POLICY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_policy_id(policy_id: str) -> str:
    """Return the name of a policy."""
    if not _POLICY_ID.fullmatch(policy_id):
        detail = (
            "policyId must have 1 to 100 letters, digits and ._- and begin with a letter or digit, "
            f"got {short_repr(policy_id)}."
        )
        raise invalid("policyId", detail)
    return policy_id


def unknown_version(policy_id: str, version: int | None, newest: int | None) -> str:
    """Say which versions a policy has instead of the one that was asked for."""
    if newest is None:
        has = "it comes with the service, which keeps none: leave it out"
    else:
        has = f"its newest is version {newest}"
    return f"Policy {short_repr(policy_id)} has no version {version}: {has}."


def check_policy(
    document: Mapping[str, Any], base: Policy, limits: ApiLimits, within: str = ""
) -> Policy:
    """Return `base` with the fields of a document, or reject one by its path.

    `within` is the path of the document in the request, with a dot at its end.
    """
    for name in document:
        if name not in JSON_FIELDS:
            raise unknown_field(within.rstrip("."), name, JSON_FIELDS)
    try:
        policy = policy_from_wire(document, base)
    except ConfigurationError as error:
        field = error.field or ""
        is_known = field.partition("[")[0] in JSON_FIELDS
        path = within + field if is_known else within.rstrip(".") or "policy"
        raise invalid(path, f"{_message(error)}.") from None
    if policy.attempt_timeout is None or policy.attempt_timeout > limits.max_attempt_timeout_s:
        most = f"{limits.max_attempt_timeout_s * 1000:.0f}"
        detail = f"attemptTimeoutMs must be at most {most}: a lease has to outlast an attempt."
        raise invalid(f"{within}attemptTimeoutMs", detail)
    return policy


def _message(error: ConfigurationError) -> str:
    """Return the message of an error, with a rejected null, true or false as JSON writes it."""
    if error.has_value and (error.value is None or isinstance(error.value, bool)):
        return f"{error.field} {error.rule}, got {json.dumps(error.value)}"
    return str(error)
