"""The table of frameworks: each way in which its users put a middleware in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tarry.wire.asgi import App
from tests.frameworks import in_django, in_fastapi, in_litestar, in_starlette
from tests.frameworks.shop import Build, Shop


@dataclass(frozen=True)
class Way:
    """A framework, where the middleware stands, and what is the framework's own."""

    name: str
    build: Build
    has_lifespan: bool = True

    def __str__(self) -> str:
        return self.name


def around(app_of: Callable[[Shop], App]) -> Build:
    """The middleware around the whole application."""

    def build(shop: Shop, guard: Any, **options: Any) -> App:
        app: App = guard(app_of(shop), **options)
        return app

    return build


ONE_OF_EACH = [
    Way("starlette", in_starlette.listed),
    Way("fastapi", in_fastapi.added),
    Way("litestar", in_litestar.listed),
    Way("django", around(in_django.app_of), has_lifespan=False),
]
"""The way that each framework's own pages show."""

WAYS = [
    *ONE_OF_EACH,
    Way("around-starlette", around(in_starlette.app_of)),
    Way("around-fastapi", around(in_fastapi.app_of)),
    Way("around-litestar", around(in_litestar.app_of)),
]
