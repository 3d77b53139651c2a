"""The trace of a caller: the headers `traceparent` and `tracestate` (W3C Trace Context)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from tarry.wire.tasks import TRACEPARENT_PATTERN

if TYPE_CHECKING:
    from tarry.service.api.messages import ApiRequest

MAX_TRACESTATE_CHARS = 512
"""W3C Trace Context requires that this many characters are passed on."""
_MAX_MEMBERS = 32
_MAX_KEPT_MEMBER_CHARS = 128
"""If a `tracestate` is too long, longer members are removed first."""
_MAX_INPUT_CHARS = 8192
_TRACEPARENT = re.compile(TRACEPARENT_PATTERN)
_KEY = r"[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}"
_MEMBER = re.compile(rf"({_KEY})=[ -+\--<>-~]{{0,255}}[!-+\--<>-~]")


class TraceContext(NamedTuple):
    """The span of a caller, and the state that tracing systems have added to its trace."""

    traceparent: str
    tracestate: str | None


def is_traceparent(text: str) -> bool:
    """Return whether a text has the form of a `traceparent` header."""
    return _TRACEPARENT.fullmatch(text) is not None


def clean_tracestate(text: str) -> str | None:
    """Return a valid `tracestate` of at most 512 characters; None if there is nothing to pass on.

    An invalid `tracestate` is dropped as a whole. A `tracestate` that is too long loses members,
    first those of more than 128 characters, then those at its end, which are the oldest.
    """
    if len(text) > _MAX_INPUT_CHARS:
        return None
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in matches if match is not None}
    # A member that does not match, or repeats a key, makes the whole header invalid.
    if not keys or len(keys) < len(members) or len(members) > _MAX_MEMBERS:
        return None
    if len(",".join(members)) > MAX_TRACESTATE_CHARS:
        members = [member for member in members if len(member) <= _MAX_KEPT_MEMBER_CHARS]
        while len(",".join(members)) > MAX_TRACESTATE_CHARS:
            members.pop()
    return ",".join(members) or None


def trace_context_of(request: ApiRequest) -> TraceContext | None:
    """Return the trace of a request; None if it has none. Invalid headers are ignored."""
    traceparent = request.headers.get(b"traceparent", b"").decode("latin-1")
    if not is_traceparent(traceparent):
        return None
    tracestate = None
    if b"tracestate" in request.headers:
        tracestate = clean_tracestate(
            b",".join(request.header_values(b"tracestate")).decode("latin-1")
        )
    return TraceContext(traceparent, tracestate)
