"""Unknown paths and unsupported protocols."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.api.harness import ApiHarness, run_with_api


@pytest.mark.parametrize("path", ["/nothing", "/retry-tasks/", "/retry-tasks//x", "/docs/x"])
def test_an_unknown_path_is_404(path: str) -> None:
    """The response is a problem with the title "Not found"."""

    async def test(api: ApiHarness) -> None:
        assert "Not found" == (await api.request("GET", path)).problem["title"]

    run_with_api(test)


def test_web_sockets_are_closed() -> None:
    """A WebSocket connection is closed, because the API has no WebSockets."""

    async def test(api: ApiHarness) -> None:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": "/x", "root_path": "", "headers": []}
        await api.api(scope, receive, send)
        assert ["websocket.close"] == [message["type"] for message in sent]

    run_with_api(test)
