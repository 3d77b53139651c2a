"""The OpenAPI document, built from the operations and their types, and its HTML page, /docs."""

from __future__ import annotations

import re
from html import escape
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import msgspec

from tarry.service.api.examples import EXAMPLES
from tarry.service.api.openapi_rules import PARAMETER_RULES, REF_TEMPLATE, add_rules
from tarry.service.api.problems import PROBLEM_TYPES
from tarry.wire.http import PROBLEM_MEDIA_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
CONTENT_SECURITY_POLICY = (
    b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 small { font-weight: normal; font-size: 1rem; opacity: .7; }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .5rem 0; }
summary { cursor: pointer; padding: .5rem .8rem; overflow-wrap: anywhere; }
details > div { padding: 0 .8rem .8rem; border-top: 1px solid var(--line); }
code, pre { font: .9em/1.45 ui-monospace, monospace; }
pre { background: var(--soft); border-radius: .3rem; padding: .6rem; overflow-x: auto; }
.method { display: inline-block; min-width: 4.5rem; font-weight: 700; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0;
  border-bottom: 1px solid var(--line); }
tr:target { background: var(--soft); }
"""

_MAX_RULE_CHARS = 80
_BACKTICKS = re.compile("`([^`]*)`")
_RULE_TEXTS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "minLength": "characters, at least",
    "maxLength": "characters, at most",
    "pattern": "pattern",
    "default": "default",
}


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
            "summary": " ".join((handler.__doc__ or "").split()),
            **_describe_messages(operation, schema_by_type, schemas),
        }
        if require_api_keys and not operation.is_public:
            operation_object["responses"]["401"] = _describe_problem(401)
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
            "description": "Durable HTTP and gRPC calls: delivered at least once, with backoff.",
        },
        "paths": paths,
        "components": components,
    }
    # msgspec names the type Page[RetryTask] "Page_RetryTask_"; it is renamed to "RetryTaskPage".
    text = _GENERIC_PAGE.sub(rb"\1Page", msgspec.json.encode(document))
    renamed_document: dict[str, Any] = msgspec.json.decode(text)
    return renamed_document


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
    schema = {"$ref": REF_TEMPLATE.format(name="Problem")}
    content = {PROBLEM_MEDIA_TYPE: {"schema": schema}}
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


def build_docs_page(document: dict[str, Any]) -> bytes:
    """Return the HTML page of an OpenAPI document."""
    info = document["info"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(info['title'])} API</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>",
        f"<p>{escape(info['description'])} Times are epoch milliseconds, durations milliseconds, ",
        'errors are <a href="#problems">problem details</a> (RFC 9457). For programs: ',
        '<a href="openapi.json">openapi.json</a>.</p><h2>Operations</h2>',
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _render_operation(path, method, operation)
    parts.append("<h2>Types</h2>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += _render_type(name, schema)
    parts += _render_problems()
    parts.append("</body></html>")
    return "".join(parts).encode()


def _render_operation(path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield "<details><summary>"
    yield f'<code><span class="method">{method.upper()}</span>{escape(path)}</code><br>'
    yield f'{escape(operation["summary"])}</summary><div id="{escape(operation["operationId"])}">'
    if parameters := operation.get("parameters"):
        yield "<h4>Parameters</h4><table>"
        for parameter in parameters:
            name, description = escape(parameter["name"]), parameter.get("description")
            rule = escape(description) if description else _render_schema(parameter["schema"])
            yield f"<tr><td><code>{name}</code></td><td>{parameter['in']}</td><td>{rule}</td></tr>"
        yield "</table>"
    if body := operation.get("requestBody"):
        yield f"<h4>Request body</h4><p>{_render_content(body['content'])}</p>"
    for callback in operation.get("callbacks", {}).values():
        for url, methods in callback.items():
            content = methods["post"]["requestBody"]["content"]
            yield f"<h4>Callback to <code>{escape(url)}</code></h4>"
            yield f"<p>{_render_content(content)}</p>"
    yield "<h4>Responses</h4><table>"
    for status, response in operation["responses"].items():
        yield f"<tr><td>{status}</td><td>{escape(response['description'])}</td>"
        yield f"<td>{_render_content(response.get('content', {}))}</td></tr>"
    yield "</table></div></details>"


def _render_type(name: str, schema: dict[str, Any]) -> Iterator[str]:
    # The id is inside <details>, so that a link to it opens the element.
    yield f"<details><summary><code>{escape(name)}</code></summary>"
    yield f'<div id="type-{escape(name)}">'
    yield f"<p>{escape(schema.get('description', ''))}</p><table>"
    required = schema.get("required", ())
    for field, field_schema in schema.get("properties", {}).items():
        note = "required" if field in required else ""
        yield f"<tr><td><code>{escape(field)}</code></td><td>{note}</td>"
        yield f"<td>{_render_schema(field_schema)}</td></tr>"
    yield "</table></div></details>"


def _render_problems() -> Iterator[str]:
    yield '<h2 id="problems">Problems</h2><p>The <code>type</code> of a problem links to its row.'
    yield "</p><table>"
    for problem_type in PROBLEM_TYPES:
        help_text = _BACKTICKS.sub(r"<code>\1</code>", escape(problem_type.help))
        statuses = ", ".join(map(str, problem_type.statuses))
        yield f'<tr id="{problem_type.anchor}"><td><code>{problem_type.name}</code></td>'
        yield f"<td>{statuses}</td><td>{escape(problem_type.title)}</td><td>{help_text}</td></tr>"
    yield "</table>"


def _render_content(content: dict[str, Any]) -> str:
    return ", ".join(
        f"<code>{escape(media_type)}</code> {_render_schema(media['schema'])}"
        for media_type, media in content.items()
    )


def _render_schema(schema: dict[str, Any]) -> str:
    """Return a schema as one line of HTML, in which named types are links."""
    if ref := schema.get("$ref"):
        name = escape(ref.rpartition("/")[2])
        return f'<a href="#type-{name}">{name}</a>'
    if choices := schema.get("anyOf"):
        return " or ".join(_render_schema(choice) for choice in choices)
    if schema.get("type") == "array":
        return f"list of {_render_schema(schema.get('items', {}))}"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    texts = [str(schema.get("type", "any JSON"))]
    for name, rule_text in _RULE_TEXTS.items():
        # The pattern of a URL would fill the page.
        if schema.get(name) is not None and len(str(schema[name])) <= _MAX_RULE_CHARS:
            texts.append(f"{rule_text} {schema[name]}")
    if "description" in schema:
        texts.append(schema["description"])
    return escape(", ".join(texts))
