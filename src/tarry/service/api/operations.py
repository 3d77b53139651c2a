"""One row of the API: its route and its documentation come from the same place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from tarry.service.api.exchange import Answer, Asked, Stream
from tarry.wire.tasks import MOST_IN_PAGE

Handler: TypeAlias = Callable[[Asked], Awaitable[Answer | Stream]]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """A method of a path, what it does, and the forms that go in and out."""

    method: str
    path: str
    name: str
    does: str
    handler: Handler
    answers: dict[int, Any]
    """The forms by status; None is an answer without content, a string its media type."""
    refuses: tuple[int, ...] = ()
    takes: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    more_headers: dict[str, str] = {}
    """Further request headers that mean something, and what."""
    calls_back: type[msgspec.Struct] | None = None
    """What is posted to the `callbackUrl` of the request, later."""
    is_open: bool = False
    """Whether it needs no key."""


class PageQuery(
    msgspec.Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True
):
    """Which part of a list."""

    limit: Annotated[int, Meta(ge=1, le=MOST_IN_PAGE)] = 100
    cursor: Annotated[str, Meta(max_length=1024)] | None = None
