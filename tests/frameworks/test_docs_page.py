"""The code blocks of docs/frameworks.md run as they are."""

from __future__ import annotations

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
    """Return the name of the framework that a block imports."""
    names = ("fastapi", "starlette", "litestar", "django")
    return next(name for name in names if f"from {name}" in block.text)


def test_page_has_all_frameworks() -> None:
    """The page has one code block for each framework."""
    assert ["django", "fastapi", "litestar", "starlette"] == sorted(map(framework_of, BLOCKS))


async def pay_in_django(request: HttpRequest) -> HttpResponse:
    """Handle a payment, as a view of a Django project."""
    return JsonResponse({"paid": json.loads(request.body)["amount"]}, status=201)


@pytest.mark.parametrize("block", BLOCKS, ids=framework_of)
async def test_block_works(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The application of a block requires a key, and repeats the response to a known key."""
    django_app.make_app(Shop(), payments=pay_in_django)  # the settings and views of a project
    # Litestar would configure logging for all later tests.
    monkeypatch.setattr(LoggingConfig, "configure", lambda _config: logging.getLogger)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "shop.settings")
    (tmp_path / "page.py").write_text(block.text, encoding="utf-8")
    page_globals = run_path("page.py")

    async with open_asgi_client(page_globals.get("app") or page_globals["application"]) as client:
        first, second = [await client.post("/payments", json={"amount": 7}) for _ in range(2)]
        del client.headers["Idempotency-Key"]
        without_key = await client.post("/payments", json={"amount": 7})
    await page_globals["store"].close()

    assert (201, {"paid": 7}) == (first.status_code, first.json())
    assert first.content == second.content
    assert "true" == second.headers["idempotent-replayed"]
    assert 400 == without_key.status_code
