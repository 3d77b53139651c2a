"""The shop in Django, as asgi.py creates it, with the middleware of a new project.

Django has one configuration for each process, so the shop that was created last is served.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeAlias

from django.conf import settings  # type: ignore[import-untyped]
from django.core.asgi import get_asgi_application  # type: ignore[import-untyped]
from django.core.exceptions import PermissionDenied  # type: ignore[import-untyped]
from django.http import (  # type: ignore[import-untyped]
    HttpRequest,
    HttpResponse,
    JsonResponse,
    StreamingHttpResponse,
)
from django.urls import path  # type: ignore[import-untyped]
from django.views.decorators.csrf import csrf_exempt  # type: ignore[import-untyped]

from tarry.wire.http import App
from tests.frameworks.shop import Shop

View: TypeAlias = Callable[[Any], Any]


def make_app(shop: Shop, **extra_views: View) -> App:
    """Return the application. `extra_views` are added by path; only `/form` checks CSRF tokens."""

    async def pay(request: HttpRequest) -> HttpResponse:
        paid = shop.pay(json.loads(request.body))
        response = JsonResponse(paid, status=201, headers={"X-Payment": str(paid["payment"])})
        response.set_cookie("basket", "empty")
        return response

    async def wait(_request: HttpRequest) -> HttpResponse:
        return JsonResponse(await shop.wait(), status=201)

    async def fail(_request: HttpRequest) -> HttpResponse:
        return JsonResponse(shop.fail(), status=201)

    async def forbid(_request: HttpRequest) -> HttpResponse:
        shop.pay("forbidden")
        raise PermissionDenied

    async def stream(_request: HttpRequest) -> HttpResponse:
        return StreamingHttpResponse(shop.chunks(), content_type="text/plain")

    async def wait_for_disconnect(_request: HttpRequest) -> HttpResponse:
        shop.handler_started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            shop.saw_disconnect = True
            raise

    async def give_up(_request: HttpRequest) -> HttpResponse:
        await shop.give_up_call()

    def give_up_in_thread(_request: HttpRequest) -> HttpResponse:
        shop.give_up_call_in_thread()

    views: dict[str, View] = {
        "pay": pay,
        "wait": wait,
        "fail": fail,
        "forbidden": forbid,
        "stream": stream,
        "disconnect": wait_for_disconnect,
        "give-up": give_up,
        "give-up/thread": give_up_in_thread,
        **extra_views,
    }
    if not settings.configured:
        settings.configure(
            ALLOWED_HOSTS=["*"],
            LOGGING_CONFIG=None,
            MIDDLEWARE=[
                "django.middleware.security.SecurityMiddleware",
                "django.middleware.common.CommonMiddleware",
                "django.middleware.csrf.CsrfViewMiddleware",
                "django.middleware.clickjacking.XFrameOptionsMiddleware",
            ],
            SECRET_KEY="not secret",  # noqa: S106 - only for tests
        )
    settings.ROOT_URLCONF = (
        *(path(name, csrf_exempt(view)) for name, view in views.items()),
        path("form", pay),
    )
    app: App = get_asgi_application()
    return app
