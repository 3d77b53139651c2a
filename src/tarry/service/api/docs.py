"""`GET /docs`: the OpenAPI document as one HTML page, without scripts or external resources."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, Any

from tarry.service.api.problem_types import PROBLEM_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

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

_CODE = re.compile("`([^`]*)`")
_RULE_TEXTS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "minLength": "characters, at least",
    "maxLength": "characters, at most",
    "pattern": "pattern",
    "default": "default",
}


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
            description = parameter.get("description")
            rule = (
                _render_schema(parameter["schema"]) if description is None else escape(description)
            )
            yield f"<tr><td><code>{escape(parameter['name'])}</code></td>"
            yield f"<td>{parameter['in']}</td>"
            yield f"<td>{rule}</td></tr>"
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
        help_text = _CODE.sub(r"<code>\1</code>", escape(problem_type.help))
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
    """Return a schema as one line of HTML; named types are links."""
    if ref := schema.get("$ref"):
        name = escape(ref.rpartition("/")[2])
        return f'<a href="#type-{name}">{name}</a>'
    if choices := schema.get("anyOf"):
        return " or ".join(_render_schema(choice) for choice in choices)
    if schema.get("type") == "array":
        return f"list of {_render_schema(schema.get('items', {}))}"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    parts = [str(schema.get("type", "any JSON"))]
    for name, text in _RULE_TEXTS.items():
        if schema.get(name) is not None:
            parts.append(f"{text} {schema[name]}")
    if "description" in schema:
        parts.append(schema["description"])
    return escape(", ".join(parts))
