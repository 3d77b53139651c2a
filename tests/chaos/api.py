"""The API of one simulated process, and a caller that speaks HTTP to it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tarry.service.api.application import Api
from tarry.service.api.context import ApiContext
from tarry.service.delivery.guard import Guard
from tarry.service.encryption import PlainCodec
from tests.service.api.harness import FakePayloads
from tests.service.engine.rig import Rig


async def _no_metrics(_: str | None) -> tuple[bytes, str]:
    return b"", "text/plain"


def api_of(rig: Rig) -> Api:
    """Return the API that stands before an engine."""
    return Api(
        ApiContext(
            engine=rig.engine,
            store=rig.store,
            payloads=FakePayloads(),
            codec=PlainCodec(),
            guard=Guard(),
            new_id=lambda: next(rig.ids),
            monotonic=asyncio.get_running_loop().time,
            render_metrics=_no_metrics,
        )
    )


async def ask(api: Api, method: str, path: str, document: object = None) -> tuple[int, Any]:
    """Send one request; return the status and the JSON of the answer."""
    body = b"" if document is None else json.dumps(document).encode()
    headers = [(b"host", b"tarry.test")]
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
    answer: list[dict[str, Any]] = []
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            return {"type": "http.disconnect"}
        asked = True
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        answer.append(dict(message))

    await api(scope, receive, send)
    whole = b"".join(message.get("body", b"") for message in answer[1:])
    return answer[0]["status"], json.loads(whole) if whole else None
