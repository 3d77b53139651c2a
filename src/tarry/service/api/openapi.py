"""The OpenAPI document, built from the operations and their types."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import msgspec

from tarry.service.api.examples import EXAMPLES
from tarry.service.api.openapi_rules import PARAMETER_RULES, REF_TEMPLATE, add_rules
from tarry.service.api.problems import PROBLEM_TYPES
from tarry.wire.http import PROBLEM_MEDIA_TYPE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.api.context import ApiLimits
    from tarry.service.api.routing import Handler, Operation

_GENERIC_PAGE = re.compile(rb"\bPage_(\w+?)_(?=\")")
_PATH_PARAMETER = re.compile(r"{(\w+)}")
_PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "Problem",
    "description": "Problem details (RFC 9457). `field`, `rule` and `value` describe an invalid "
    "field.",
    "properties": {
        "type": {
            "type": "string",
            "format": "uri-reference",
            "enum": [problem_type.type for problem_type in PROBLEM_TYPES],
        },
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "field": {"type": "string"},
        "rule": {"type": "string"},
        "value": {"type": "string"},
    },
    "required": ["type", "title", "status"],
}
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer KEY"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
"""The two ways to send an API key; without `require_api_keys`, no operation refers to them."""
_TAGS = {
    "retry-tasks": "Tasks",
    "attempts": "Tasks",
    "retry-policies": "Policies",
    "policy-schedules": "Policies",
    "policy-simulations": "Policies",
    "policy-advice": "Policies",
    "events": "Monitoring",
    "workers": "Monitoring",
    "healthz": "Monitoring",
    "readyz": "Monitoring",
    "metrics": "Monitoring",
}
"""Groups of operations by the first segment of their paths; other groups have its name."""


def build_openapi(
    operations: Sequence[tuple[Operation, Handler]],
    *,
    version: str,
    require_api_keys: bool,
    limits: ApiLimits,
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the API."""
    types: dict[str, Any] = {}
    query_names: set[str] = set()
    for operation, _ in operations:
        for json_type in (operation.response, operation.body, operation.callback):
            if json_type is not None and not isinstance(json_type, tuple):
                types[str(json_type)] = json_type
        if operation.query is not None:
            types[str(operation.query)] = operation.query
            query_names.add(operation.query.__name__)
    type_schemas, schemas = msgspec.json.schema_components(
        types.values(), ref_template=REF_TEMPLATE
    )
    schema_by_type = dict(zip(types, type_schemas, strict=True))
    add_rules(
        schemas,
        max_headers=limits.max_headers,
        max_attempt_timeout_ms=limits.max_attempt_timeout_s * 1000,
    )
    schemas["Problem"] = _PROBLEM_SCHEMA
    paths: dict[str, Any] = {}
    for operation, handler in operations:
        operation_object: dict[str, Any] = {
            "operationId": operation.operation_id,
            "tags": [_tag_of(operation.path)],
            "summary": " ".join((handler.__doc__ or "").split()),
            **_describe_messages(operation, schema_by_type, schemas),
        }
        if require_api_keys and not operation.is_public:
            operation_object["responses"]["401"] = _describe_problem(401)
            operation_object["responses"]["403"] = _describe_problem(403)
            label = operation.required_role.label
            operation_object["description"] = f"Needs an API key with the role `{label}`."
            operation_object["security"] = [{name: []} for name in _SECURITY_SCHEMES]
        paths.setdefault(operation.path, {})[operation.method.lower()] = operation_object
    # Query types are not listed: their fields appear as parameters of the operations.
    listed_schemas = {name: schema for name, schema in schemas.items() if name not in query_names}
    components = {"schemas": listed_schemas, "securitySchemes": _SECURITY_SCHEMES}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "tarry",
            "version": version,
            "description": "Durable HTTP and gRPC calls: delivered at least once, with backoff. "
            "Times are epoch milliseconds, durations are milliseconds, errors are problem details "
            "(RFC 9457).",
        },
        "paths": paths,
        "components": components,
    }
    # msgspec names the type Page[RetryTask] "Page_RetryTask_"; it is renamed to "RetryTaskPage".
    text = _GENERIC_PAGE.sub(rb"\1Page", msgspec.json.encode(document))
    renamed_document: dict[str, Any] = msgspec.json.decode(text)
    return renamed_document


def _tag_of(path: str) -> str:
    segment = path.split("/")[1]
    return _TAGS.get(segment, segment.replace("-", " ").capitalize())


def _describe_messages(
    operation: Operation, schema_by_type: dict[str, Any], schemas: dict[str, Any]
) -> dict[str, Any]:
    """Return the part of an OpenAPI operation about its requests, responses and callbacks."""
    response, response_body = operation.response, {}
    if isinstance(response, tuple):
        media_types = cast("tuple[str, ...]", response)
        text = {"schema": {"type": "string"}}
        response_body = {"content": dict.fromkeys(media_types, text)}
    elif response is not None:
        response_body = {"content": _json_content(response, schema_by_type)}
    responses = {
        str(status): {"description": HTTPStatus(status).phrase, **response_body}
        for status in operation.statuses
    }
    for status in operation.all_error_statuses:
        responses[str(status)] = _describe_problem(status)
    fields: dict[str, Any] = {"responses": responses}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": _parameter_schema(name)}
        for name in _PATH_PARAMETER.findall(operation.path)
    ]
    if operation.query is not None:
        properties = schemas[operation.query.__name__].get("properties", {})
        parameters += [
            {"name": name, "in": "query", "required": False, "schema": _without_null(schema)}
            for name, schema in properties.items()
        ]
    parameters += [
        {
            "name": name,
            "in": "header",
            "description": description,
            "schema": _parameter_schema(name),
        }
        for name, description in operation.headers.items()
    ]
    if parameters:
        fields["parameters"] = parameters
    if operation.body is not None:
        content = _json_content(operation.body, schema_by_type)
        fields["requestBody"] = {"required": True, "content": content}
    if operation.callback is not None:
        content = _json_content(operation.callback, schema_by_type)
        post = {
            "summary": "Report the result of the task. The service retries the callback with the "
            "default policy.",
            "requestBody": {"required": True, "content": content},
            "responses": {"2XX": {"description": "The callback was received."}},
        }
        fields["callbacks"] = {"finished": {"{$request.body#/callbackUrl}": {"post": post}}}
    return fields


def _json_content(json_type: Any, schema_by_type: dict[str, Any]) -> dict[str, Any]:
    name = str(json_type)
    media_type = {"schema": schema_by_type[name]}
    if name in EXAMPLES:
        media_type["example"] = EXAMPLES[name]
    return {"application/json": media_type}


def _parameter_schema(name: str) -> dict[str, Any]:
    return {"type": "string", **PARAMETER_RULES.get(name, {})}


def _describe_problem(status: int) -> dict[str, Any]:
    media_type: dict[str, Any] = {"schema": {"$ref": REF_TEMPLATE.format(name="Problem")}}
    for problem_type in PROBLEM_TYPES:
        if status in problem_type.statuses:
            example = {"type": problem_type.type, "title": problem_type.title, "status": status}
            media_type["example"] = example
            break
    content = {PROBLEM_MEDIA_TYPE: media_type}
    return {"description": HTTPStatus(status).phrase, "content": content}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a query parameter without null: the parameter is omitted instead."""
    result: dict[str, Any] = {name: value for name, value in schema.items() if value is not None}
    choices = [choice for choice in result.pop("anyOf", ()) if choice != {"type": "null"}]
    for choice in choices:
        result.update(choice)
    if None in result.get("enum", ()):
        result["enum"] = [value for value in result["enum"] if value is not None]
    return result
