"""Errors as HTTP APIs tell them: problem details, RFC 9457."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tarry.core.checks import check_count
from tarry.core.value import Value
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

MEDIA_TYPE = "application/problem+json"
BLANK = "about:blank"
"""The type of a problem that means no more than its status."""

_LARGEST_STATUS = 599


class Problem(Value):
    """What went wrong: `title` is the same for all problems of a `type`, `detail` is about one.

    `more` has what else a program may want to know; its names stand beside the others.
    """

    __slots__ = __match_args__ = _fields = (
        "status",
        "title",
        "detail",
        "type",
        "instance",
        "more",
    )

    status: int
    title: str
    detail: str | None
    type: str
    instance: str | None
    more: Mapping[str, Any]

    def __init__(
        self,
        status: int,
        title: str,
        detail: str | None = None,
        type: str = BLANK,  # noqa: A002 - the name that the RFC gives it
        instance: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        if check_count("status", status, 100) > _LARGEST_STATUS:
            raise ConfigurationError("status", f"must be at most {_LARGEST_STATUS}", status)
        more = dict(more or {})
        if taken := sorted(set(more) & set(self._fields[:-1])):
            rule = f"must not name {taken[0]!r} again: the problem has one"
            raise ConfigurationError("more", rule)
        self._set(
            status=status,
            title=title,
            detail=detail,
            type=type,
            instance=instance,
            more=MappingProxyType(more),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the members of the JSON object; what is not said is left out."""
        members = {
            "type": self.type,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "instance": self.instance,
        }
        return {name: value for name, value in members.items() if value is not None} | {**self.more}

    def to_json(self) -> bytes:
        """Return the body of the response, in ASCII: no text of a client can break it."""
        return json.dumps(self.to_dict()).encode()
