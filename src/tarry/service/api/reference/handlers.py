"""Handlers of the OpenAPI document (`/openapi.json`) and of the API reference (`/docs`).

The reference is Swagger UI, whose files are in the package flask-swagger-ui. Only these files are
used: the package is not imported, because this would also import Flask.
"""

from __future__ import annotations

import re
from functools import cache, partial
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.service.api.messages import ApiResponse
from tarry.service.api.problems import PROBLEM_TYPES
from tarry.service.api.static_files import build_file_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tarry.service.api.messages import ApiRequest
    from tarry.service.api.routing import Handler

_INDEX = "index.html"
_PROBLEMS_PLACEHOLDER = b"<!-- problems -->"
_SWAGGER_UI_PACKAGE = "flask_swagger_ui"
_SWAGGER_UI_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
_BACKTICKS = re.compile("`([^`]*)`")
CONTENT_SECURITY_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""`data:` because the icons of Swagger UI are in its style sheet."""


def reference_handlers(
    build_document: Callable[[], dict[str, Any]],
) -> dict[str, dict[str, Handler]]:
    """Return the handlers of the OpenAPI document and of the reference, by path and method."""
    encode_document = cache(lambda: msgspec.json.encode(build_document()))

    async def get_document(_: ApiRequest) -> ApiResponse:
        return ApiResponse(200, encode_document(), [(b"content-type", b"application/json")])

    readers: dict[str, Callable[[], bytes]] = {
        name: partial(_read_swagger_ui_file, name) for name in _SWAGGER_UI_FILES
    }
    for file in files("tarry.service.api.reference").joinpath("assets").iterdir():
        readers[file.name] = file.read_bytes
    readers[_INDEX] = partial(_build_page, readers[_INDEX])
    handlers: dict[str, dict[str, Handler]] = {"/openapi.json": {"GET": get_document}}
    for name, read in readers.items():
        path = "/docs" if name == _INDEX else f"/docs/{name}"
        handlers[path] = {"GET": build_file_handler(name, read, CONTENT_SECURITY_POLICY)}
    return handlers


def _read_swagger_ui_file(name: str) -> bytes:
    spec = find_spec(_SWAGGER_UI_PACKAGE)
    if spec is None or spec.origin is None:
        msg = "GET /docs needs the package flask-swagger-ui: pip install 'tarry[service]'"
        raise ModuleNotFoundError(msg)
    return Path(spec.origin).with_name("dist").joinpath(name).read_bytes()


def _build_page(read_template: Callable[[], bytes]) -> bytes:
    return read_template().replace(_PROBLEMS_PLACEHOLDER, "".join(_render_problems()).encode())


def _render_problems() -> Iterator[str]:
    """Yield a row of the table for each problem type; `type` of a problem links to its row."""
    for problem_type in PROBLEM_TYPES:
        help_text = _BACKTICKS.sub(r"<code>\1</code>", escape(problem_type.help))
        statuses = ", ".join(map(str, problem_type.statuses))
        yield f'<tr id="{problem_type.anchor}">'
        yield f'<th scope="row"><code>{problem_type.name}</code></th><td>{statuses}</td>'
        yield f"<td>{escape(problem_type.title)}</td><td>{help_text}</td></tr>\n"
