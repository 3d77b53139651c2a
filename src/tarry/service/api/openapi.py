"""The OpenAPI document: built from the same rows that make the routes, and the same forms."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.service.api.problem_types import PROBLEM_TYPES
from tarry.wire.problem import MEDIA_TYPE
from tarry.wire.tasks import MOST_IN_BATCH, NewBatch, RetryTaskRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.service.api.routing import Operation

_REF = "#/components/schemas/{name}"
_PAGE = re.compile(rb"\bPage_(\w+?)_(?=\")")
_PARAMETER = re.compile(r"{(\w+)}")
_PROBLEM: dict[str, Any] = {
    "type": "object",
    "title": "Problem",
    "description": "What went wrong (RFC 9457); `field` is what to mend.",
    "properties": {
        "type": {
            "type": "string",
            "format": "uri-reference",
            "enum": [kind.type for kind in PROBLEM_TYPES],
        },
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "field": {"type": "string"},
    },
    "required": ["type", "title", "status"],
}


def build_openapi(operations: Sequence[Operation], *, version: str, keys: bool) -> dict[str, Any]:
    """Return the document."""
    forms = [form for operation in operations for form in _forms(operation)]
    found, schemas = msgspec.json.schema_components(forms, ref_template=_REF)
    by_form = dict(zip(map(str, forms), found, strict=True))
    _mend(schemas)
    schemas["Problem"] = _PROBLEM
    queries = {operation.query.__name__ for operation in operations if operation.query}
    paths: dict[str, Any] = {}
    for operation in operations:
        methods = paths.setdefault(operation.path, {})
        methods[operation.method.lower()] = _described(operation, by_form, schemas, keys=keys)
    shown = {name: form for name, form in schemas.items() if name not in queries}
    components: dict[str, Any] = {"schemas": shown}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "tarry",
            "version": version,
            "description": "Durable HTTP and gRPC calls: at least once, with backoff.",
        },
        "paths": paths,
        "components": components,
    }
    # Page[RetryTask] is Page_RetryTask_ to msgspec.
    text = _PAGE.sub(rb"\1Page", msgspec.json.encode(document))
    named: dict[str, Any] = msgspec.json.decode(text)
    return named


def _forms(operation: Operation) -> Iterable[Any]:
    yield from (
        form
        for form in operation.answers.values()
        if form is not None and form.__class__ is not str
    )
    if operation.takes is not None:
        yield operation.takes
    if operation.calls_back is not None:
        yield operation.calls_back
    if operation.query is not None:
        yield operation.query


def _mend(schemas: dict[str, Any]) -> None:
    """Say what the forms cannot: JSON within JSON, and the rules between fields."""
    tasks = schemas[NewBatch.__name__]["properties"]["tasks"]
    # Anything is taken, for what is no task gets a verdict of its own.
    task = {"$ref": _REF.format(name=RetryTaskRequest.__name__)}
    tasks.update(items={"anyOf": [task, {}]}, maxItems=MOST_IN_BATCH)
    new = schemas[RetryTaskRequest.__name__]["properties"]
    new["body"] = {"description": "Text, or any other JSON value; null is none."}
    new["headers"]["anyOf"][0]["additionalProperties"] = {"type": "string"}
    new["method"]["pattern"] = "^[A-Z][A-Z0-9_-]*$"
    new["targetUrl"]["format"] = "uri"
    new["bodyBase64"]["contentEncoding"] = "base64"
    fields = {**schemas["PolicyFields"]["properties"]}
    fields.pop("policyId")
    overrides = {"type": "object", "properties": fields, "additionalProperties": False}
    new["policy"] = {"anyOf": [overrides, {"type": "null"}], "default": None}
    schemas["PolicyFields"]["additionalProperties"] = False


def _described(
    operation: Operation, by_form: dict[str, Any], schemas: dict[str, Any], *, keys: bool
) -> dict[str, Any]:
    needs_key = keys and not operation.is_open
    told: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.does,
        "responses": {
            **{
                str(status): _answer(status, form, by_form)
                for status, form in sorted(operation.answers.items())
            },
            **{
                str(status): _refusal(status)
                for status in (*operation.refuses, *((401,) if needs_key else ()))
            },
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(operation.path)
    ]
    if operation.query is not None:
        properties = schemas[operation.query.__name__].get("properties", {})
        parameters += [
            {"name": name, "in": "query", "required": False, "schema": _not_null(schema)}
            for name, schema in properties.items()
        ]
    parameters += [
        {"name": name, "in": "header", "description": meaning, "schema": {"type": "string"}}
        for name, meaning in operation.more_headers.items()
    ]
    if parameters:
        told["parameters"] = parameters
    if operation.takes is not None:
        content = {"application/json": {"schema": by_form[str(operation.takes)]}}
        told["requestBody"] = {"required": True, "content": content}
    if operation.calls_back is not None:
        told["callbacks"] = {"ended": _callback(by_form[str(operation.calls_back)])}
    if needs_key:
        told["security"] = [{"key": []}]
    return told


def _callback(form: dict[str, Any]) -> dict[str, Any]:
    post = {
        "summary": "Tell how the task ended: a task of its own, by the default policy.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": form}}},
        "responses": {"2XX": {"description": "It was heard."}},
    }
    return {"{$request.body#/callbackUrl}": {"post": post}}


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter: one that is not there is left out, not null."""
    without: dict[str, Any] = {name: value for name, value in schema.items() if value is not None}
    choices = [one for one in without.pop("anyOf", ()) if one != {"type": "null"}]
    for choice in choices:
        without.update(choice)
    if None in without.get("enum", ()):
        without["enum"] = [one for one in without["enum"] if one is not None]
    return without


def _answer(status: int, form: Any, by_form: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if isinstance(form, str):
        described["content"] = {form: {"schema": {"type": "string"}}}
    elif form is not None:
        described["content"] = {"application/json": {"schema": by_form[str(form)]}}
    return described


def _refusal(status: int) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name="Problem")}
    return {
        "description": HTTPStatus(status).phrase,
        "content": {MEDIA_TYPE: {"schema": schema}},
    }
