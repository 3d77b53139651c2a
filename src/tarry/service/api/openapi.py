"""The OpenAPI document, built from the operations and their request and response types."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.service.api.problem_types import PROBLEM_TYPES
from tarry.wire.problem import MEDIA_TYPE
from tarry.wire.tasks import MAX_BATCH_SIZE, BatchRequest, RetryTaskRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.service.api.routing import Operation

_REF_TEMPLATE = "#/components/schemas/{name}"
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


def build_openapi(
    operations: Sequence[Operation], *, version: str, require_keys: bool
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the API."""
    types = [json_type for operation in operations for json_type in _json_types(operation)]
    type_schemas, schemas = msgspec.json.schema_components(types, ref_template=_REF_TEMPLATE)
    schema_by_type = dict(zip(map(str, types), type_schemas, strict=True))
    _add_untyped_rules(schemas)
    schemas["Problem"] = _PROBLEM_SCHEMA
    query_names = {
        operation.query_type.__name__ for operation in operations if operation.query_type
    }
    paths: dict[str, Any] = {}
    for operation in operations:
        methods = paths.setdefault(operation.path, {})
        methods[operation.method.lower()] = _describe_operation(
            operation, schema_by_type, schemas, require_keys=require_keys
        )
    # Query types are not listed: their fields appear as parameters of the operations.
    listed = {name: schema for name, schema in schemas.items() if name not in query_names}
    components: dict[str, Any] = {"schemas": listed}
    if require_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "tarry",
            "version": version,
            "description": "Durable HTTP and gRPC calls: delivered at least once, with backoff.",
        },
        "paths": paths,
        "components": components,
    }
    # msgspec names the type Page[RetryTask] "Page_RetryTask_"; it is renamed to "RetryTaskPage".
    text = _GENERIC_PAGE.sub(rb"\1Page", msgspec.json.encode(document))
    renamed: dict[str, Any] = msgspec.json.decode(text)
    return renamed


def _json_types(operation: Operation) -> Iterable[Any]:
    """Yield the types of an operation that need a schema."""
    yield from (
        json_type
        for json_type in operation.responses.values()
        if json_type is not None and json_type.__class__ is not str
    )
    for json_type in (operation.request_type, operation.callback_type, operation.query_type):
        if json_type is not None:
            yield json_type


def _add_untyped_rules(schemas: dict[str, Any]) -> None:
    """Add rules that the Python types cannot express: JSON values, formats, overrides."""
    tasks = schemas[BatchRequest.__name__]["properties"]["tasks"]
    # Any JSON value is accepted, because an invalid task does not fail the batch: it gets its own
    # result.
    task = {"$ref": _REF_TEMPLATE.format(name=RetryTaskRequest.__name__)}
    tasks.update(items={"anyOf": [task, {}]}, maxItems=MAX_BATCH_SIZE)
    fields = schemas[RetryTaskRequest.__name__]["properties"]
    fields["body"] = {"description": "Text, or any other JSON value. null means no body."}
    fields["headers"]["anyOf"][0]["additionalProperties"] = {"type": "string"}
    fields["method"]["pattern"] = "^[A-Z][A-Z0-9_-]*$"
    fields["targetUrl"]["format"] = "uri"
    fields["bodyBase64"]["contentEncoding"] = "base64"
    policy_fields = {**schemas["PolicyFields"]["properties"]}
    policy_fields.pop("policyId")
    overrides = {"type": "object", "properties": policy_fields, "additionalProperties": False}
    fields["policy"] = {"anyOf": [overrides, {"type": "null"}], "default": None}
    schemas["PolicyFields"]["additionalProperties"] = False


def _describe_operation(
    operation: Operation,
    schema_by_type: dict[str, Any],
    schemas: dict[str, Any],
    *,
    require_keys: bool,
) -> dict[str, Any]:
    needs_key = require_keys and not operation.is_public
    described: dict[str, Any] = {
        "operationId": operation.operation_id,
        "summary": operation.summary,
        "responses": {
            **{
                str(status): _describe_response(status, json_type, schema_by_type)
                for status, json_type in sorted(operation.responses.items())
            },
            **{
                str(status): _describe_problem(status)
                for status in (*operation.error_statuses, *((401,) if needs_key else ()))
            },
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAMETER.findall(operation.path)
    ]
    if operation.query_type is not None:
        properties = schemas[operation.query_type.__name__].get("properties", {})
        parameters += [
            {"name": name, "in": "query", "required": False, "schema": _without_null(schema)}
            for name, schema in properties.items()
        ]
    parameters += [
        {"name": name, "in": "header", "description": description, "schema": {"type": "string"}}
        for name, description in operation.request_headers.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.request_type is not None:
        content = {"application/json": {"schema": schema_by_type[str(operation.request_type)]}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.callback_type is not None:
        schema = schema_by_type[str(operation.callback_type)]
        described["callbacks"] = {"finished": _describe_callback(schema)}
    if needs_key:
        described["security"] = [{"key": []}]
    return described


def _describe_callback(schema: dict[str, Any]) -> dict[str, Any]:
    post = {
        "summary": "Report the result of the task. Delivered as a task with the default policy.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"2XX": {"description": "The callback was received."}},
    }
    return {"{$request.body#/callbackUrl}": {"post": post}}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a query parameter: it may be omitted, but not null."""
    result: dict[str, Any] = {name: value for name, value in schema.items() if value is not None}
    choices = [choice for choice in result.pop("anyOf", ()) if choice != {"type": "null"}]
    for choice in choices:
        result.update(choice)
    if None in result.get("enum", ()):
        result["enum"] = [value for value in result["enum"] if value is not None]
    return result


def _describe_response(
    status: int, json_type: Any, schema_by_type: dict[str, Any]
) -> dict[str, Any]:
    described: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if isinstance(json_type, str):
        described["content"] = {json_type: {"schema": {"type": "string"}}}
    elif json_type is not None:
        described["content"] = {"application/json": {"schema": schema_by_type[str(json_type)]}}
    return described


def _describe_problem(status: int) -> dict[str, Any]:
    schema = {"$ref": _REF_TEMPLATE.format(name="Problem")}
    return {
        "description": HTTPStatus(status).phrase,
        "content": {MEDIA_TYPE: {"schema": schema}},
    }
