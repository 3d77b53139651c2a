"""Rules of the requests that the Python types do not express, as JSON Schema for OpenAPI.

The schemas are as exact as JSON Schema allows: a request that matches them is rejected only for
reasons that depend on the state of the service, such as an unknown policy.
"""

from __future__ import annotations

from typing import Any

from tarry.wire.tasks import (
    MAX_BATCH_SIZE,
    SECRET_NAME_PATTERN,
    BatchRequest,
    BatchResult,
    BulkCancelRequest,
    ReplayFilter,
    ReplayRequest,
    RetryTaskRequest,
    SearchFilter,
    SecretReference,
    SigningSecretRequest,
)

REF_TEMPLATE = "#/components/schemas/{name}"

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_LAST_LABEL = r"[A-Za-z](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    (
        rf"(?:{_GROUP}:){{7}}{_GROUP}",
        *(rf"(?:{_GROUP}:){{1,{7 - n}}}(?::{_GROUP}){{1,{n}}}" for n in range(1, 7)),
        rf"(?:{_GROUP}:){{1,7}}:",
    )
)
_HOST = rf"(?:(?:{_LABEL}\.)*{_LAST_LABEL}|{_BYTE}(?:\.{_BYTE}){{3}}|\[(?:{_IPV6})\])"
_PORT = r"(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_URL = {
    "pattern": rf"^(?:https?://{_HOST}(?::{_PORT})?|grpcs?://{_HOST}:{_PORT})(?:[/?#][!-\[\]-~]*)?$",
    "description": "A host name in another script than Latin is written in Punycode (xn--). The "
    "service also accepts it in Unicode.",
}
_HEADERS = {
    "propertyNames": {"pattern": r"^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}$"},
    "additionalProperties": {
        "anyOf": [
            {"type": "string", "pattern": r"^(?:[!-~]+(?:[\t ]+[!-~]+)*)?$"},
            {"$ref": REF_TEMPLATE.format(name=SecretReference.__name__)},
        ]
    },
    "description": "The headers to send. Headers that the service sets itself, such as Host and "
    "Idempotency-Key, and headers of one connection are rejected. A name must not be repeated in "
    'different case. `{"secret": NAME}` is replaced by the value of a secret at each attempt. The '
    "operator of the service defines secrets.",
}
_GRPC_METHOD = r"^grpcs?://[^/?#]+:[0-9]+/[A-Za-z_][A-Za-z0-9_.]*/[A-Za-z_][A-Za-z0-9_]*$"
_HTTP = {"pattern": "^http"}
_NULL = {"type": "null"}
_NOT_NULL = {"not": _NULL}
_METHOD = {"pattern": "^[A-Z][A-Z0-9_-]*$", "not": {"enum": ["CONNECT", "TRACE"]}}
_BASE64 = r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_BASE64_4 = r"[A-Za-z0-9+/]{4}"
_SECRET = {  # of 24 to 64 bytes; ed25519: of 32 bytes
    "pattern": rf"^(?:whsec_(?:{_BASE64_4}){{8,20}}(?:[A-Za-z0-9+/]{{2}}==|[A-Za-z0-9+/]{{3}}=|"
    rf"{_BASE64_4}(?:[A-Za-z0-9+/]{{2}}==)?)?|whsk_[A-Za-z0-9+/]{{43}}=)$"
}

_LANE_KEY = r"[A-Za-z0-9][A-Za-z0-9._~-]{0,63}"
_LANE = {
    "pattern": rf"^(?:https?|grpcs?):{_HOST}:{_PORT}(?:@{_LANE_KEY})?$",
    "maxLength": 255,
}

PARAMETER_RULES: dict[str, dict[str, Any]] = {
    "lane": _LANE,
    "policyId": {"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$", "maxLength": 100},
    "Idempotency-Key": {
        "pattern": r"^(?:[!#-'*+\--Z\\^-z|~](?:[ !#-'*+\--Z\\^-z|~]*[!#-'*+\--Z\\^-z|~])?"
        r'|"(?:[ !#-\[\]-~]|\\["\\])+")$',
        "maxLength": 255,
    },
}
"""Rules for the parameters of paths and headers, by name."""


def add_rules(schemas: dict[str, Any], *, max_headers: int, max_attempt_timeout_ms: float) -> None:
    """Add rules that the Python types of the fields do not express."""
    tasks = schemas[BatchRequest.__name__]["properties"]["tasks"]
    # Any JSON value is accepted as a task: an invalid task does not fail the whole batch.
    task = {"$ref": REF_TEMPLATE.format(name=RetryTaskRequest.__name__)}
    tasks.update(items={"anyOf": [task, {}]}, maxItems=MAX_BATCH_SIZE)
    problem = _first_type(schemas[BatchResult.__name__]["properties"]["problem"])
    problem.clear()
    problem["$ref"] = REF_TEMPLATE.format(name="Problem")
    secret_fields = schemas[SigningSecretRequest.__name__]["properties"]
    _first_type(secret_fields["secret"]).update(_SECRET)
    _first_type(secret_fields["lane"]).update(_LANE)
    for schema in schemas.values():
        if url_prefix := schema.get("properties", {}).get("urlPrefix"):
            _first_type(url_prefix).update(_URL)
    for request, search_filter in (
        (BulkCancelRequest, SearchFilter),
        (ReplayRequest, ReplayFilter),
    ):
        # Without a filter, only a dry run and a request for all tasks are accepted.
        filters = [_is_set(name) for name in search_filter.__struct_encode_fields__]
        schemas[request.__name__]["anyOf"] = [
            _is_set("filter", {"type": "object", "anyOf": filters}),
            _is_set("all", {"const": True}),
            _is_set("dryRun", {"const": True}),
        ]
    secret_reference = schemas[SecretReference.__name__]
    secret_reference["additionalProperties"] = False
    secret_reference["properties"]["secret"]["pattern"] = SECRET_NAME_PATTERN
    for name in ("PolicyFields", "NewPolicy"):
        _add_policy_rules(schemas[name], max_attempt_timeout_ms)
    _add_task_rules(schemas[RetryTaskRequest.__name__], schemas["PolicyFields"], max_headers)


def _add_policy_rules(schema: dict[str, Any], max_attempt_timeout_ms: float) -> None:
    schema["additionalProperties"] = False
    schema["properties"]["attemptTimeoutMs"]["maximum"] = max_attempt_timeout_ms
    backoff_types = schema["properties"]["backoffType"]["enum"]
    other_types = [name for name in backoff_types if name != "SCHEDULE"]
    schema["anyOf"] = [
        {"properties": {"backoffType": {"enum": other_types}, "scheduleMs": False}},
        {"properties": {"backoffType": {"const": "SCHEDULE"}}, "required": ["scheduleMs"]},
    ]


def _add_task_rules(
    schema: dict[str, Any], policy_schema: dict[str, Any], max_headers: int
) -> None:
    fields = schema["properties"]
    fields["body"] = {"description": "Text, or any other JSON value. null means no body."}
    _first_type(fields["headers"]).update(_HEADERS, maxProperties=max_headers)
    fields["method"].update(_METHOD)
    fields["targetUrl"].update(_URL)
    _first_type(fields["callbackUrl"]).update(_URL)
    _first_type(fields["bodyBase64"]).update(contentEncoding="base64", pattern=_BASE64)
    overrides = {
        name: policy_schema[name]
        for name in ("type", "properties", "additionalProperties", "anyOf")
    }
    fields["policy"] = {"anyOf": [overrides, _NULL], "default": None}
    schema["allOf"] = [
        _not_together("body", "bodyBase64"),
        _not_together("body", "bodyRef"),
        _not_together("bodyBase64", "bodyRef"),
        _not_together("delayMs", "nextAttemptAt"),
        {  # a HEAD request has no body
            "anyOf": [
                {"properties": {"method": {"not": {"const": "HEAD"}}}},
                {"properties": dict.fromkeys(("body", "bodyBase64", "bodyRef"), _NULL)},
            ]
        },
        {  # a callbackPolicyId needs a callbackUrl
            "anyOf": [
                {"properties": {"callbackPolicyId": _NULL}},
                {"properties": {"callbackUrl": {"type": "string"}}, "required": ["callbackUrl"]},
            ]
        },
        {"properties": {"callbackUrl": {"anyOf": [_NULL, _HTTP, {"pattern": _GRPC_METHOD}]}}},
        {
            "anyOf": [
                {"properties": {"targetUrl": _HTTP}},
                {
                    "properties": {
                        "targetUrl": {"pattern": _GRPC_METHOD},
                        "method": {"const": "POST"},
                    }
                },
            ]
        },
    ]


def _first_type(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the first type of a field that can also be null."""
    first_type: dict[str, Any] = schema["anyOf"][0]
    return first_type


def _is_set(name: str, rule: dict[str, Any] = _NOT_NULL) -> dict[str, Any]:
    """Return the rule that a field is required, and matches `rule`."""
    return {"properties": {name: rule}, "required": [name]}


def _not_together(first: str, second: str) -> dict[str, Any]:
    """Return the rule that one of two fields must be null or omitted."""
    return {"anyOf": [{"properties": {first: _NULL}}, {"properties": {second: _NULL}}]}
