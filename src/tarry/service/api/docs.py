"""`/docs`: the OpenAPI document as one page, made here. No script, and nothing from elsewhere."""

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
"""The content security policy of the page."""

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
_RULES = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "minLength": "characters at least",
    "maxLength": "at most",
    "pattern": "as",
    "default": "by default",
}


def build_docs_page(document: dict[str, Any]) -> bytes:
    """Return the page."""
    info = document["info"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(info['title'])}: the API</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>",
        f"<p>{escape(info['description'])} Times are epoch milliseconds, durations milliseconds, ",
        'errors are <a href="#problems">problem details</a> (RFC 9457). The same for programs: ',
        '<a href="openapi.json">openapi.json</a>.</p><h2>Calls</h2>',
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _operation(path, method, operation)
    parts.append("<h2>Forms</h2>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += _form(name, schema)
    parts += _problems()
    parts.append("</body></html>")
    return "".join(parts).encode()


def _operation(path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield "<details><summary>"
    yield f'<code><span class="method">{method.upper()}</span>{escape(path)}</code><br>'
    yield f'{escape(operation["summary"])}</summary><div id="{escape(operation["operationId"])}">'
    if parameters := operation.get("parameters"):
        yield "<h4>Parameters</h4><table>"
        for one in parameters:
            rule = escape(one["description"]) if "description" in one else _rule(one["schema"])
            yield f"<tr><td><code>{escape(one['name'])}</code></td><td>{one['in']}</td>"
            yield f"<td>{rule}</td></tr>"
        yield "</table>"
    if body := operation.get("requestBody"):
        yield f"<h4>Takes</h4><p>{_forms_of(body['content'])}</p>"
    for callback in operation.get("callbacks", {}).values():
        for place, methods in callback.items():
            content = methods["post"]["requestBody"]["content"]
            yield f"<h4>Posts later to <code>{escape(place)}</code></h4>"
            yield f"<p>{_forms_of(content)}</p>"
    yield "<h4>Answers</h4><table>"
    for status, answer in operation["responses"].items():
        yield f"<tr><td>{status}</td><td>{escape(answer['description'])}</td>"
        yield f"<td>{_forms_of(answer.get('content', {}))}</td></tr>"
    yield "</table></div></details>"


def _form(name: str, schema: dict[str, Any]) -> Iterator[str]:
    # The place inside, so that a link to it opens what is around it.
    yield f"<details><summary><code>{escape(name)}</code></summary>"
    yield f'<div id="form-{escape(name)}">'
    yield f"<p>{escape(schema.get('description', ''))}</p><table>"
    required = schema.get("required", ())
    for field, rule in schema.get("properties", {}).items():
        must = "required" if field in required else ""
        yield f"<tr><td><code>{escape(field)}</code></td><td>{must}</td><td>{_rule(rule)}</td></tr>"
    yield "</table></div></details>"


def _problems() -> Iterator[str]:
    yield '<h2 id="problems">Problems</h2><p>The <code>type</code> of a problem is its place here.'
    yield "</p><table>"
    for kind in PROBLEM_TYPES:
        said = _CODE.sub(r"<code>\1</code>", escape(kind.help))
        statuses = ", ".join(map(str, kind.statuses))
        yield f'<tr id="{kind.anchor}"><td><code>{kind.name}</code></td><td>{statuses}</td>'
        yield f"<td>{escape(kind.title)}</td><td>{said}</td></tr>"
    yield "</table>"


def _forms_of(content: dict[str, Any]) -> str:
    return ", ".join(
        f"<code>{escape(kind)}</code> {_rule(media['schema'])}" for kind, media in content.items()
    )


def _rule(schema: dict[str, Any]) -> str:
    """Return a schema in one line of HTML; forms are links."""
    if ref := schema.get("$ref"):
        name = escape(ref.rpartition("/")[2])
        return f'<a href="#form-{name}">{name}</a>'
    if choices := schema.get("anyOf"):
        return " or ".join(_rule(choice) for choice in choices)
    if schema.get("type") == "array":
        return f"list of {_rule(schema.get('items', {}))}"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(one))}</code>" for one in schema["enum"])
    words = [str(schema.get("type", "any JSON"))]
    for name, said in _RULES.items():
        if schema.get(name) is not None:
            words.append(f"{said} {schema[name]}")
    if "description" in schema:
        words.append(schema["description"])
    return escape(", ".join(words))
