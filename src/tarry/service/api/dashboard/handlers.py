"""Handlers of the dashboard's page (`/`) and of its static files (`/dashboard/...`).

The files are part of the package and contain no data. The page reads the data through the API, with
the API key that the user has entered, so the files themselves need no API key.
"""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING

from tarry.service.api import problems
from tarry.service.api.messages import ApiResponse
from tarry.service.api.static_files import build_file_handler

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from tarry.service.api.messages import ApiRequest
    from tarry.service.api.routing import Handler

_INDEX = "index.html"
_API_KEYS_PLACEHOLDER = b'data-api-keys="optional"'
CONTENT_SECURITY_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
"""`require-trusted-types-for` makes the browser reject text that a script would use as HTML."""


def dashboard_handlers(role: str, *, require_api_keys: bool) -> dict[str, dict[str, Handler]]:
    """Return the handlers of the page and its static files, by path and method.

    A process with the role `worker` has no API for the page, so it rejects requests for the page.
    """
    if role == "worker":
        return {"/": {"GET": _reject_for_role}}
    handlers: dict[str, dict[str, Handler]] = {}
    for path, location in (("/dashboard", b"./"), ("/dashboard/", b"../")):
        handlers[path] = {"GET": partial(_redirect_to_page, location)}
    for file in files("tarry.service.api.dashboard").joinpath("assets").iterdir():
        path = "/" if file.name == _INDEX else f"/dashboard/{file.name}"
        read = partial(_read_file, file, require_api_keys=require_api_keys)
        handlers[path] = {"GET": build_file_handler(file.name, read, CONTENT_SECURITY_POLICY)}
    return handlers


def _read_file(file: Traversable, *, require_api_keys: bool) -> bytes:
    body = file.read_bytes()
    if file.name == _INDEX and require_api_keys:
        body = body.replace(_API_KEYS_PLACEHOLDER, b'data-api-keys="required"')
    return body


async def _redirect_to_page(location: bytes, _: ApiRequest) -> ApiResponse:
    # Relative, because a proxy may add a prefix to the path.
    return ApiResponse(307, b"", [(b"location", location)])


async def _reject_for_role(_: ApiRequest) -> ApiResponse:
    raise problems.WRONG_ROLE.error(
        "This process only delivers tasks (role worker). Open the dashboard of a process with the "
        "role api or all."
    )
