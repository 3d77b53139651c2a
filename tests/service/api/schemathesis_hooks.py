"""Extensions of schemathesis, with a check that valid requests are accepted.

The command for a running service is in CONTRIBUTING.md.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlencode

import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance

STATE_DEPENDENT_RULES = [
    r"targetUrl must be an address that is allowed",
    r"callbackUrl must be an address that is allowed",
    r"policyId must be an existing policy",
    r"callbackPolicyId must be an existing policy",
    r"policyVersion must exist",
    r"headers\..*\.secret must be a secret",
    r"headers\..* must be a string, not a secret",
    r"bodyRef must",
    r"all must be true if no filter is given",
    r"idempotencyKey was already used",
    r"idempotencyKey differs from the Idempotency-Key header",
    r"The analysis of this policy needs more than",
    r"lane has \d+ recorded attempts?, but advice needs \d+",
]
"""A request that matches the schema can break only these rules, which no schema can express."""

MAX_QUERY_BYTES = 60_000


@schemathesis.hook
def before_load_schema(_context: Any, raw_schema: dict[str, Any]) -> None:
    """Remove the limit of the length of `urlPrefix`.

    schemathesis would search 12 s for strings of this length that match the pattern of URLs.
    """
    schemas: list[Any] = [raw_schema]
    while schemas:
        schema = schemas.pop()
        if isinstance(schema, list):
            schemas += schema
        elif isinstance(schema, dict):
            schemas += schema.values()
            if schema.get("name") == "urlPrefix":
                del schema["schema"]["maxLength"]
            elif "urlPrefix" in (properties := schema.get("properties", {})):
                for option in properties["urlPrefix"].get("anyOf", ()):
                    option.pop("maxLength", None)


@schemathesis.hook
def filter_query(_context: Any, query: Any) -> bool:
    """Skip invalid queries that get a 431, which schemathesis does not count as a rejection."""
    return not isinstance(query, dict) or len(urlencode(query, doseq=True)) <= MAX_QUERY_BYTES


@schemathesis.check
def valid_request_is_accepted(ctx: Any, response: Any, case: Any) -> bool | None:
    """Check that a request that matches the schema breaks no rule except state-dependent ones."""
    if response.status_code == 422:
        detail = response.json()["detail"]
        if any(re.match(rule, detail) for rule in STATE_DEPENDENT_RULES):
            return None
    return positive_data_acceptance(ctx, response, case)
