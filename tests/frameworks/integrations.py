"""The integrations: each framework with each way to add a middleware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tarry.wire.http import App
from tests.frameworks import django_app, fastapi_app, litestar_app, starlette_app
from tests.frameworks.shop import BuildApp, Shop


@dataclass(frozen=True)
class Integration:
    """A framework and a function that adds a middleware to its application."""

    name: str
    build: BuildApp
    has_lifespan: bool = True

    def __str__(self) -> str:
        return self.name


def wrap_app(make_app: Callable[[Shop], App]) -> BuildApp:
    """Return a function that wraps the whole application in the middleware."""

    def build(shop: Shop, middleware_class: Any, **options: Any) -> App:
        app: App = middleware_class(make_app(shop), **options)
        return app

    return build


DOCUMENTED_INTEGRATIONS = [
    Integration("starlette", starlette_app.make_app_with_middleware),
    Integration("fastapi", fastapi_app.make_app_with_middleware),
    Integration("litestar", litestar_app.make_app_with_middleware),
    Integration("django", wrap_app(django_app.make_app), has_lifespan=False),
]
"""The integration that docs/frameworks.md shows for each framework."""

INTEGRATIONS = [
    *DOCUMENTED_INTEGRATIONS,
    Integration("wrapped-starlette", wrap_app(starlette_app.make_app)),
    Integration("wrapped-fastapi", wrap_app(fastapi_app.make_app)),
    Integration("wrapped-litestar", wrap_app(litestar_app.make_app)),
]
