"""Reading of request bodies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.service.api import messages
from tarry.service.api.messages import ApiRequest
from tarry.service.api.problems import ApiError

JSON = {b"content-type": b"application/json"}


def chunked_request(*chunks: bytes) -> ApiRequest:
    """Return a request whose body arrives in chunks."""
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        piece = left.pop(0)
        await asyncio.sleep(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    return ApiRequest({}, receive, JSON)


def test_partial_bodies_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunked bodies do not fill the memory; complete ones free their share."""
    monkeypatch.setattr(messages, "MAX_PARTIAL_BODY_BYTES", 18)

    async def main() -> None:
        many = [chunked_request(b"12345", b"67890").read_body(100) for _ in range(4)]
        ends = await asyncio.gather(*many, return_exceptions=True)
        rejected = [end for end in ends if isinstance(end, ApiError)]

        assert {503} == {one.problem.status for one in rejected}
        assert len(ends) - len(rejected) == ends.count(b"1234567890") > 0
        assert b"1234567890" == await chunked_request(b"12345", b"67890").read_body(100)

    asyncio.run(main())
