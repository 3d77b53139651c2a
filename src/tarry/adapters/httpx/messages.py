"""What retries do to the requests, the answers and the errors of httpx."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tarry.adapters.http.hand_off import Parts
from tarry.adapters.http.headers import (
    MAX_DRAINED_BYTES,
    MIN_TIMEOUT_S,
    attempt_time_limit,
    classify_proxy_refusal,
    drain_timeout,
    is_permanent_tls_error,
    is_worth_draining,
    response_classifier,
    set_attempt_headers,
)
from tarry.core.outcome import PERMANENT, Kind, Outcome
from tarry.runtime import event_loops
from tarry.runtime.clocks import system

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.policy import Policy

BYTES = "ByteStream"
"""The type of a body that can be sent again, and of none at all."""
_PHASES = ("connect", "read", "write", "pool")
_EARLY = 0.9
"""The part of an attempt that may pass without a connection. Then comes the client's own error,
which tells that nothing was sent; one that is cut off from outside does not."""
# By name: there are two packages, and none of them may be there.
_NEVER_SENT = frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout"})
_PERHAPS_READ = frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError"})


class _Timeouts(dict[str, Any]):
    """The timeouts of an attempt, ours to change while its answer is read."""


def can_replay(request: Any, *, at_once: bool = False) -> bool:
    """Say whether the body can be sent a second time: bytes can, an iterator is used up.

    A form goes back to the start of its files by itself, but not for two that read them at once.
    """
    kind = type(request.stream).__name__
    if kind == BYTES:
        return True
    if kind != "MultipartStream":
        return False
    files = [getattr(field, "file", b"") for field in request.stream.fields]
    return all(isinstance(file, (bytes, str)) or _can_rewind(file, at_once) for file in files)


def _can_rewind(file: Any, at_once: bool) -> bool:  # noqa: FBT001
    return not at_once and hasattr(file, "seekable") and bool(file.seekable())


def told(request: Any, number: int, attempt_timeout: float | None) -> Any:
    """Return the request as an attempt or a copy sends it; the user's own stays as it is."""
    limit = attempt_time_limit(attempt_timeout)
    timeouts = _Timeouts(request.extensions.get("timeout") or {})
    if limit is not None:
        least = max(limit, MIN_TIMEOUT_S)
        for phase in _PHASES:
            most = least * _EARLY if phase in ("connect", "pool") else least
            timeouts[phase] = min(most, timeouts.get(phase) or most)
    copy = type(request)(
        request.method,
        request.url,
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "timeout": timeouts},
    )
    set_attempt_headers(copy.headers, number, limit)
    return copy


def parts(request: Any) -> Parts:
    """Return a request as the retry service can take it."""
    body = b"".join(request.stream) if type(request.stream).__name__ == BYTES else None
    return Parts(request.method, str(request.url), request.headers.multi_items(), body)


def outcome_of(error: Exception, repeatable: bool) -> Outcome:  # noqa: FBT001
    """Classify an error."""
    names = {base.__name__ for base in type(error).__mro__}
    detail = type(error).__name__
    timeout = "TimeoutException" in names
    if names & _NEVER_SENT:
        if "ConnectError" in names and _is_about_tls(error):
            return PERMANENT
        local = "PoolTimeout" in names  # all our connections are taken: no fault of the server
        return Outcome(Kind.TRANSIENT, timeout=timeout, local=local, detail=detail)
    if "ProxyError" in names and (refused := str(error).partition(" ")[0]).isdecimal():
        return classify_proxy_refusal(int(refused))
    if names & _PERHAPS_READ:
        return Outcome(Kind.TRANSIENT, safe=repeatable, timeout=timeout, detail=detail)
    return PERMANENT


def _is_about_tls(error: Exception) -> bool:
    """Say whether a certificate or the like kept the connection from being made: it stays so.

    The cause is an error of httpcore, which hides its own cause, but was raised while that was
    handled. Whatever else was being handled may be an error of the user's.
    """
    inside = error.__cause__
    link = None if inside is None else inside.__cause__ or inside.__context__
    while link is not None and not is_permanent_tls_error(link):
        link = link.__cause__
    return link is not None


def _pairs(response: Any) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = response.headers.multi_items()
    return pairs


judge: Callable[[Policy, bool, Any], Outcome] = response_classifier(_pairs)


def release(response: Any) -> bool:
    """Give the connection back, open if the rest of the answer is short: then it is kept."""
    stream, kept = response.stream, False
    with suppress(Exception):  # a connection that cannot be kept is closed
        if is_worth_draining(response.headers):
            body = _Body(drain_timeout())
            body.hurry(response)
            kept = all(map(body.add, stream)) and body.put_back(response)
    stream.close()
    return kept


async def arelease(response: Any) -> bool:
    """Do what `release` does."""
    stream, kept = response.stream, False
    with suppress(Exception):
        if is_worth_draining(response.headers):
            brief = drain_timeout()
            body = _Body(brief)
            with event_loops.timeout(brief):
                async for piece in stream:
                    if not body.add(piece):
                        break
                else:
                    kept = body.put_back(response)
    await stream.aclose()
    return kept


class _Body:
    """What is read of an answer that is let go: not much, and not for long."""

    def __init__(self, brief: float) -> None:
        self._pieces: list[bytes] = []
        self._room = MAX_DRAINED_BYTES
        self._brief = brief
        self._end = system.now() + brief

    def hurry(self, response: Any) -> None:
        """Let no read of a client that blocks take longer, where its timeouts are ours."""
        with suppress(RuntimeError):  # it has no request: the user's own was sent
            timeouts = response.request.extensions.get("timeout")
            if isinstance(timeouts, _Timeouts):
                timeouts["read"] = min(timeouts.get("read") or self._brief, self._brief)

    def add(self, piece: bytes) -> bool:
        """Add a piece, and say whether there is room and time for another."""
        self._pieces.append(piece)
        self._room -= len(piece)
        return self._room >= 0 and system.now() <= self._end

    def put_back(self, response: Any) -> bool:
        """Let the answer be read as if nobody had."""
        package = sys.modules[type(response).__module__.partition(".")[0]]
        response.stream = package.ByteStream(b"".join(self._pieces))
        return True
