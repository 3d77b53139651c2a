"""The API of one simulated process, and a client that sends ASGI requests to it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tarry.service.api.application import Api
from tarry.service.api.context import ApiContext
from tarry.service.delivery.guard import Guard
from tarry.service.encryption import Codec
from tests.service.api.harness import FakePayloads
from tests.service.engine.harness import EngineHarness


async def _no_metrics(_: str | None, _accept: str) -> tuple[bytes, str]:
    return b"", "text/plain"


def build_api(harness: EngineHarness) -> Api:
    """Return an API for an engine."""
    return Api(
        ApiContext(
            engine=harness.engine,
            store=harness.store,
            body_store=FakePayloads(),
            codec=Codec(),
            target_guard=Guard(),
            new_id=lambda: next(harness.ids),
            monotonic=asyncio.get_running_loop().time,
            render_metrics=_no_metrics,
            require_api_keys=True,
        )
    )


async def send_request(
    api: Api, tenant: str, method: str, path: str, document: object = None
) -> tuple[int, Any]:
    """Send one request; return the status and the decoded JSON of the response.

    The API key of a tenant is the name of the tenant.
    """
    body = b"" if document is None else json.dumps(document).encode()
    headers = [(b"host", b"tarry.test"), (b"x-api-key", tenant.encode())]
    if document is not None:
        headers.append((b"content-type", b"application/json"))
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
    }
    messages: list[dict[str, Any]] = []
    request_was_read = False

    async def receive() -> dict[str, Any]:
        nonlocal request_was_read
        if request_was_read:
            return {"type": "http.disconnect"}
        request_was_read = True
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        messages.append(dict(message))

    await api(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in messages[1:])
    return messages[0]["status"], json.loads(content) if content else None
