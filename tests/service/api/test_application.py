"""Unknown paths and unsupported protocols."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.api.harness import ApiHarness


@pytest.mark.parametrize("path", ["/nothing", "/retry-tasks/", "/retry-tasks//x", "/docs/x"])
async def test_an_unknown_path_is_404(api: ApiHarness, path: str) -> None:
    """The response is a problem with the title "Not found"."""
    assert "Not found" == (await api.request("GET", path)).problem["title"]


async def test_web_sockets_are_closed(api: ApiHarness) -> None:
    """A WebSocket connection is closed, because the API has no WebSockets."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/x", "root_path": "", "headers": []}
    await api.api(scope, receive, send)
    assert ["websocket.close"] == [message["type"] for message in sent]
