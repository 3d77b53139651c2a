"""Problem details: the JSON body of HTTP errors (RFC 9457)."""

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
ABOUT_BLANK = "about:blank"
"""The type of a problem that means no more than its HTTP status."""

_MAX_STATUS = 599


class Problem(Value):
    """A problem: `title` is the same for all problems of a `type`, `detail` describes this one.

    `extensions` are further members of the JSON object, for programs.
    """

    __slots__ = __match_args__ = _fields = (
        "status",
        "title",
        "detail",
        "type",
        "instance",
        "extensions",
    )

    status: int
    title: str
    detail: str | None
    type: str
    instance: str | None
    extensions: Mapping[str, Any]

    def __init__(
        self,
        status: int,
        title: str,
        detail: str | None = None,
        type: str = ABOUT_BLANK,  # noqa: A002 - the name in the RFC
        instance: str | None = None,
        extensions: Mapping[str, Any] | None = None,
    ) -> None:
        if check_count("status", status, 100) > _MAX_STATUS:
            raise ConfigurationError("status", f"must be at most {_MAX_STATUS}", status)
        extensions = dict(extensions or {})
        if duplicates := sorted(set(extensions) & set(self._fields[:-1])):
            rule = f"must not contain {duplicates[0]!r}, which is a standard member"
            raise ConfigurationError("extensions", rule)
        self._set(
            status=status,
            title=title,
            detail=detail,
            type=type,
            instance=instance,
            extensions=MappingProxyType(extensions),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the members of the JSON object; members that are None are left out."""
        members = {
            "type": self.type,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "instance": self.instance,
        }
        return {name: value for name, value in members.items() if value is not None} | {
            **self.extensions
        }

    def to_json(self) -> bytes:
        """Return JSON in ASCII, so that text from a client cannot break the response."""
        return json.dumps(self.to_dict()).encode()
