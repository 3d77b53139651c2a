"""The code of docs/frameworks.md, which needs third parties: it runs, and what it makes replays."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from runpy import run_path

import pytest
from django.http import HttpRequest, HttpResponse, JsonResponse  # type: ignore[import-untyped]
from litestar.logging import LoggingConfig

from tests.frameworks import in_django
from tests.frameworks.shop import Shop, client_of
from tests.test_docs import DOCS, Block, blocks_of

BLOCKS = blocks_of(DOCS / "frameworks.md")


def framework_of(block: Block) -> str:
    """The framework that a block imports."""
    names = ("fastapi", "starlette", "litestar", "django")
    return next(name for name in names if f"from {name}" in block.text)


def test_page_has_all_four() -> None:
    """One block for each framework."""
    assert ["django", "fastapi", "litestar", "starlette"] == sorted(map(framework_of, BLOCKS))


async def pay_in_django(request: HttpRequest) -> HttpResponse:
    """The view that a project would have."""
    return JsonResponse({"paid": json.loads(request.body)["amount"]}, status=201)


@pytest.mark.parametrize("block", BLOCKS, ids=framework_of)
def test_block_of_page_works(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The application of a block asks for a key, runs once for it, and replays."""
    in_django.app_of(Shop(), payments=pay_in_django)  # settings and views, as a project has them
    # Litestar would set up logging for all tests that follow.
    monkeypatch.setattr(LoggingConfig, "configure", lambda _config: logging.getLogger)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "shop.settings")
    (tmp_path / "page.py").write_text(block.text, encoding="utf-8")
    made = run_path("page.py")

    async def main() -> None:
        async with client_of(made.get("app") or made["application"]) as client:
            first, second = [await client.post("/payments", json={"amount": 7}) for _ in range(2)]
            del client.headers["Idempotency-Key"]
            unguarded = await client.post("/payments", json={"amount": 7})
        await made["store"].close()

        assert (201, {"paid": 7}) == (first.status_code, first.json())
        assert first.content == second.content
        assert "true" == second.headers["idempotent-replayed"]
        assert 400 == unguarded.status_code

    asyncio.run(main())
