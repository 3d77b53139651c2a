"""Hook of mkdocs: reference pages, generated from docstrings, the OpenAPI document and `--help`."""

import re
from collections.abc import Iterator
from importlib import import_module
from itertools import cycle
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

from tarry.cli.app import app
from tests.openapi_document import get_openapi_document
from tests.public_api import PUBLIC_MODULES

_HELP_ENVIRON = {"COLUMNS": "76", "TERM": "dumb", "NO_COLOR": "1"}
_MAX_PATTERN_CHARS = 80
_RULE_TEXTS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "pattern": "pattern",
    "default": "default",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "reference-python.md": _render_python(),
        "reference-http.md": _render_http(get_openapi_document()),
        "reference-cli.md": _render_commands(),
    }
    for path, lines in pages.items():
        files.append(File.generated(config, path, content="\n".join(lines) + "\n"))
    return files


def _render_python() -> Iterator[str]:
    """Yield the page about all public names; mkdocstrings replaces `:::` with their docstrings."""
    yield "# Python API\n\nAll public names, with their signatures and docstrings."
    for module in PUBLIC_MODULES:
        yield f"\n## {module}\n"
        for name in sorted(import_module(module).__all__):
            if f"{module}.{name}" not in PUBLIC_MODULES:
                yield f"::: {module}.{name}\n"


def _render_commands() -> Iterator[str]:
    """Yield the page with the help of each command."""
    yield "# Commands and options\n"
    yield "The help of each command. [Command line](cli.md) explains how to use them."
    for words in _iter_commands(typer.main.get_command(app), ()):
        printed = CliRunner(env=_HELP_ENVIRON).invoke(app, [*words, "--help"], prog_name="tarry")
        text = "\n".join(line.rstrip() for line in printed.stdout.strip().splitlines())
        yield f"\n## {' '.join(['tarry', *words])}\n\n```text\n{text}\n```"


def _iter_commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    subcommands = getattr(command, "commands", None)
    if subcommands is None:
        yield words
        return
    for name, subcommand in subcommands.items():
        yield from _iter_commands(subcommand, (*words, name))


def _render_http(document: dict[str, Any]) -> Iterator[str]:
    """Yield the page about all operations and types of the OpenAPI document."""
    yield f"# HTTP API\n\n{document['info']['description']}\n"
    yield "[Service API](service-api.md) explains how the operations behave. `/docs` of a running"
    yield "service also has examples, and sends requests."
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    for tag in dict.fromkeys(operation["tags"][0] for *_, operation in operations):
        yield f"\n## {tag}"
        for path, method, operation in operations:
            if operation["tags"] == [tag]:
                yield from _render_operation(path, method, operation)
    yield "\n## Types"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield from _render_type(name, schema)


def _render_operation(path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"\n### `{method.upper()} {path}`\n\n{operation['summary']}"
    if parameters := operation.get("parameters"):
        yield "\n| parameter | in | value |\n|---|---|---|"
        for parameter in parameters:
            value = parameter.get("description") or _render_schema(parameter["schema"])
            yield f"| `{parameter['name']}` | {parameter['in']} | {_escape(value)} |"
    if body := operation.get("requestBody"):
        yield f"\nRequest body: {_render_content(body['content'])}"
    yield "\n| status | response body |\n|---|---|"
    for status, response in sorted(operation["responses"].items()):
        content = _render_content(response.get("content", {})) or "none"
        yield f"| {status} {response['description']} | {_escape(content)} |"


def _render_type(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"\n### {name}\n\n{' '.join(schema.get('description', '').split())}"
    yield "\n| field | required | value |\n|---|---|---|"
    for field, field_schema in schema.get("properties", {}).items():
        is_required = "yes" if field in schema.get("required", ()) else ""
        yield f"| `{field}` | {is_required} | {_escape(_render_schema(field_schema))} |"


def _render_content(content: dict[str, Any]) -> str:
    return ", ".join(
        f"`{media_type}` {_render_schema(media['schema'])}" for media_type, media in content.items()
    )


def _render_schema(schema: dict[str, Any]) -> str:
    """Return a schema as one line: its types, in which named types are links, and descriptions."""
    choices = schema.get("anyOf", ()) if "properties" not in schema else ()
    descriptions = [each["description"] for each in (schema, *choices) if "description" in each]
    return ". ".join([_render_rules(schema), *descriptions])


def _render_rules(schema: dict[str, Any]) -> str:
    if ref := schema.get("$ref"):
        name = ref.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if schema.get("anyOf") and "properties" not in schema:
        return " or ".join(_render_rules(choice) for choice in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_render_rules(schema.get('items', {}))}"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    texts = [str(schema.get("type", "any JSON"))]
    if "maxLength" in schema:
        texts.append(f"{schema.get('minLength', 0)} to {schema['maxLength']} characters")
    for name, text in _RULE_TEXTS.items():
        # The pattern of a URL would fill the page.
        if schema.get(name) is not None and len(str(schema[name])) <= _MAX_PATTERN_CHARS:
            texts.append(f"{text} `{schema[name]}`")
    return ", ".join(texts)


def _escape(cell: str) -> str:
    """Return the text of a table cell; only outside of code, `|` would end the cell."""
    parts = re.sub(r"\s+", " ", cell).split("`")
    return "`".join(
        part if is_code else part.replace("|", "\\|")
        for part, is_code in zip(parts, cycle((False, True)), strict=False)
    )
