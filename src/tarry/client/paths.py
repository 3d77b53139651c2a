"""Parts of a request: paths with names and queries in them, keys. Pure but for new keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlencode
from uuid import uuid4

from tarry.client.errors import NotFound
from tarry.client.request import Answer, Request
from tarry.errors import ConfigurationTypeError, short_repr
from tarry.wire import http
from tarry.wire.tasks import MOST_IN_PAGE, Page

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")


def path_of(path: str, query: Mapping[str, str | None]) -> str:
    """Return a path with what is asked for, without what is not."""
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def named(field: str, name: str) -> str:
    """Return a name as one part of a path, slashes and all."""
    if not isinstance(name, str) or not name.strip("."):  # "..", in a path, is another path
        raise ConfigurationTypeError(field, "must be the name of one", name)
    return quote(name, safe="")


def identified(field: str, name: str) -> str:
    """Return a name as one part of a path, of a kind whose names have no slashes.

    One with a slash is not asked for: a server reads an escaped one as any, and finds no path.
    """
    part = named(field, name)
    if "/" in name:
        msg = f"There is no such {field.removesuffix('_id')}: {short_repr(name)} has a slash."
        raise NotFound(msg)
    return part


def repeatable(key: str | None = None) -> dict[str, str]:
    """Return the header that says that a request may be sent again."""
    return {http.KEY.lower(): http.key_text(key or str(uuid4()))}


def page(
    path: str,
    read: Callable[[Answer], Page[T]],
    cursor: str | None,
    query: Mapping[str, str | None] | None = None,
) -> Request[Page[T]]:
    """Ask for the part of a list that begins at a cursor."""
    # The first page has the service's usual length: many look no further.
    limit = None if cursor is None else str(MOST_IN_PAGE)
    whole = {**(query or {}), "limit": limit, "cursor": cursor}
    return Request(method="GET", path=path_of(path, whole), read=read)
