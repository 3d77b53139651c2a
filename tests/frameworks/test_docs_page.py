"""The code of docs/frameworks.md runs. It needs third-party packages."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from runpy import run_path

import pytest
from django.http import HttpRequest, HttpResponse, JsonResponse  # type: ignore[import-untyped]
from litestar.logging import LoggingConfig

from tests.frameworks import django_app
from tests.frameworks.shop import Shop, open_asgi_client
from tests.test_docs import DOCS, Block, blocks_of

BLOCKS = blocks_of(DOCS / "frameworks.md")


def framework_of(block: Block) -> str:
    """Return the framework that a block imports."""
    names = ("fastapi", "starlette", "litestar", "django")
    return next(name for name in names if f"from {name}" in block.text)


def test_page_has_all_frameworks() -> None:
    """There is one block for each framework."""
    assert ["django", "fastapi", "litestar", "starlette"] == sorted(map(framework_of, BLOCKS))


async def pay_in_django(request: HttpRequest) -> HttpResponse:
    """Return a response, as the view of a project would."""
    return JsonResponse({"paid": json.loads(request.body)["amount"]}, status=201)


@pytest.mark.parametrize("block", BLOCKS, ids=framework_of)
def test_block_works(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The application of a block requires a key, runs once for it, and repeats the response."""
    django_app.make_app(Shop(), payments=pay_in_django)  # settings and views, as a project has them
    # Litestar would set up logging for all tests that follow.
    monkeypatch.setattr(LoggingConfig, "configure", lambda _config: logging.getLogger)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "shop.settings")
    (tmp_path / "page.py").write_text(block.text, encoding="utf-8")
    made = run_path("page.py")

    async def main() -> None:
        async with open_asgi_client(made.get("app") or made["application"]) as client:
            first, second = [await client.post("/payments", json={"amount": 7}) for _ in range(2)]
            del client.headers["Idempotency-Key"]
            unguarded = await client.post("/payments", json={"amount": 7})
        await made["store"].close()

        assert (201, {"paid": 7}) == (first.status_code, first.json())
        assert first.content == second.content
        assert "true" == second.headers["idempotent-replayed"]
        assert 400 == unguarded.status_code

    asyncio.run(main())
