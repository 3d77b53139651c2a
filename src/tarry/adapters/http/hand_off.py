"""Handing a call off: what cannot go on now goes to the retry service, with the key it has.

An adapter asks for it when a call has ended. Either `HandedOff` is raised, or nothing is: then the
call ends as it would have without, and the error and the log say why it was not handed off.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4
from zlib import crc32

from tarry.core.checks import duration_or_none
from tarry.core.decide import HINT_SPREAD
from tarry.core.policy import Policy
from tarry.core.verdict import Reason
from tarry.errors import ConfigurationTypeError, HandedOff, ResultNotAccepted
from tarry.runtime import deadlines
from tarry.runtime.callables import COROUTINE, flags_of
from tarry.runtime.clocks import system
from tarry.runtime.error_record import mark, record_of
from tarry.wire import http

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping

    from tarry.core.outcome import Outcome
    from tarry.core.verdict import CallRecord
    from tarry.wire.tasks import RetryTask

T_co = TypeVar("T_co", covariant=True)

NOT_NOW = frozenset({
    Reason.ATTEMPTS, Reason.BREAKER_OPEN, Reason.BUDGET_EMPTY, Reason.LIMIT,
    Reason.HINT_TOO_LONG, Reason.TOTAL_BUDGET, Reason.DEADLINE,
})  # fmt: skip
"""The ends that say nothing against the request: later it may succeed."""
PATIENCE = 5.0
"""Seconds that a hand-off may take, whatever the caller's deadline leaves: that it leaves nothing
may be why the call has ended."""

_LEFT_OUT = frozenset({
    # They are about one connection (RFC 9110, 7.6.1),
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "transfer-encoding", "upgrade",
    # or about one attempt, and the service has its own.
    "accept-encoding", "content-length", "expect", "traceparent", "tracestate",
    http.ATTEMPT.lower(), http.DEADLINE.lower(),
})  # fmt: skip
_OPENING = "tarry: not handed off to the retry service: "
_ESCAPED = re.compile(r"\\(.)")


class Takes(Protocol[T_co]):
    """The service's client, or whatever takes a task as it does."""

    def enqueue(
        self,
        url: str,
        body: bytes | None,
        *,
        method: str,
        headers: Mapping[str, str],
        key: str,
        delay: float | None,
    ) -> T_co:
        """Take a task. When this returns, or has been awaited, the task is durable."""
        ...


Service: TypeAlias = "Takes[RetryTask]"
"""A `tarry.Client`."""
AsyncService: TypeAlias = "Takes[Awaitable[RetryTask]]"
"""A `tarry.AsyncClient`."""


class Parts(NamedTuple):
    """A request, as no client in particular has it."""

    method: str
    url: str
    headers: Iterable[tuple[str, str]]
    body: bytes | None
    """None for one that is not bytes; none at all is b""."""


class _Unfit(Exception):
    """The request cannot be handed off."""


class HandOff:
    """The way of one adapter to the service.

    `parts` takes a request of its client apart, `judge` classifies an answer, `release` lets go of
    one. Where these are awaited, `aover` is to be called.
    """

    def __init__(
        self,
        client: Any,
        policy: Policy,
        parts: Callable[[Any], Parts],
        judge: Callable[[Policy, bool, Any], Outcome],
        release: Callable[[Any], Any],
    ) -> None:
        self._client = client
        self._policy = policy
        self._parts = parts
        self._judge = judge
        self._release = release

    def over(self, request: Any, error: Exception) -> None:
        """Hand a call off that ended with this error, if it may go on later: raise `HandedOff`."""
        record = record_of(error)
        if record is None or record.reason not in NOT_NOW:
            return
        try:
            order = self._order(request, error)
            with _in_time():
                task = self._client.enqueue(**order)
        except Exception as failure:
            _stands(error, record, failure)
            return
        except BaseException:
            if isinstance(error, ResultNotAccepted):
                self._release(error.result)
            raise
        if isinstance(error, ResultNotAccepted):
            self._release(error.result)
        raise _handed_off(task, record) from error

    async def aover(self, request: Any, error: Exception) -> None:
        """Do what `over` does."""
        record = record_of(error)
        if record is None or record.reason not in NOT_NOW:
            return
        try:
            order = self._order(request, error)
            with _in_time():
                task = await self._client.enqueue(**order)
        except Exception as failure:
            _stands(error, record, failure)
            return
        except BaseException:
            if isinstance(error, ResultNotAccepted):
                await self._release(error.result)
            raise
        if isinstance(error, ResultNotAccepted):
            await self._release(error.result)
        raise _handed_off(task, record) from error

    def _order(self, request: Any, error: Exception) -> dict[str, Any]:
        """Return what to enqueue, or say why it cannot be."""
        method, url, lines, body = self._parts(request)
        scheme, netloc, path, query, _ = urlsplit(url)
        netloc = netloc.rpartition("@")[2]  # the client has made a header of what stands before
        headers = _joined(lines)
        if _authority(scheme, headers.get("host", netloc)) == _authority(scheme, netloc):
            headers.pop("host", None)  # another one is refused, which is better than lost
        written = headers.pop(http.KEY.lower(), "")
        if not http.repeatable(method, keyed=bool(written)):
            msg = (
                f"a {method} is not safe to repeat; an Idempotency-Key "
                '(idempotency_key="auto") makes it so'
            )
            raise _Unfit(msg)
        if body is None:
            msg = "its body is a file or a stream; bytes can be handed off"
            raise _Unfit(msg)
        key = _key_of(written) if written else uuid4().hex
        if key is None:
            msg = (
                "the service sends an Idempotency-Key in double quotes (RFC 9651), and this "
                'request has one without, which its server may take for another; write it as "..."'
            )
            raise _Unfit(msg)
        return {
            "url": f"{scheme}://{netloc}{path or '/'}{'?' if query else ''}{query}",
            "body": body or None,
            "method": method,
            "headers": headers,
            "key": key,
            "delay": self._asked_for(error, key),
        }

    def _asked_for(self, error: Exception, key: str) -> float | None:
        """Return the wait that the server asked for in its last answer, and a little more.

        As the core has it, those who were told the same time do not come back together. How much
        more follows from the key: the same request, handed off twice, is the same task.
        """
        if not isinstance(error, ResultNotAccepted):
            return None
        hint = self._judge(self._policy, True, error.result).hint  # noqa: FBT003
        floor = None if hint is None else duration_or_none(hint.delay)
        return None if not floor else floor * (1.0 + HINT_SPREAD * crc32(key.encode()) / 2**32)


def make_hand_off(
    client: Service | AsyncService | None,
    policy: Policy | None,
    *,
    looped: bool,
    parts: Callable[[Any], Parts],
    judge: Callable[[Policy, bool, Any], Outcome],
    release: Callable[[Any], Any],
) -> HandOff | None:
    """Return the way to the service that `hand_off` of an adapter names, or say what is wrong."""
    if client is None:
        return None
    name, how = ("AsyncClient", "awaits") if looped else ("Client", "blocks")
    enqueue = getattr(client, "enqueue", None)
    is_kind = callable(enqueue) and bool(flags_of(enqueue) & COROUTINE) is looped
    if isinstance(client, type) or not is_kind:
        rule = f'must be a tarry.{name}("http://127.0.0.1:8080"), for this adapter {how}'
        raise ConfigurationTypeError("hand_off", rule, client)
    return HandOff(client, policy or Policy(), parts, judge, release)


@contextmanager
def _in_time() -> Generator[None]:
    """Put a deadline of the hand-off's own in the place of the caller's."""
    token = deadlines.scope.set(None)
    try:
        deadlines.enter(system.now() + PATIENCE)
        yield
    finally:
        deadlines.scope.reset(token)


def _handed_off(task: Any, record: CallRecord) -> HandedOff:
    named = getattr(task, "task_id", task)
    msg = f"{record.operation}: handed off as task {named}, for {record.reason.words}"
    error = HandedOff(msg, task)
    mark(
        error, record, final=True, block=True
    )  # or a loop around the call would make a second task
    return error


def _stands(error: Exception, record: CallRecord, failure: Exception) -> None:
    """Say why the call ends as it does: on the error, and in the log; an answer has no notes."""
    why = f"{failure}" if isinstance(failure, _Unfit) else f"{type(failure).__name__}: {failure}"
    before: list[str] = getattr(error, "__notes__", [])
    notes = [note for note in before if not note.startswith(_OPENING)]
    object.__setattr__(error, "__notes__", [*notes, _OPENING + why])
    import logging

    fields = {"event": "tarry.not_handed_off", "operation": record.operation, "why": why}
    logging.getLogger("tarry").warning(
        "%s: %s", record.operation, _OPENING.removeprefix("tarry: ") + why, extra={"tarry": fields}
    )


def _joined(lines: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers that are the same on every attempt, each on one line (RFC 9110, 5.3)."""
    headers: dict[str, str] = {}
    for spelled, value in lines:
        name = spelled.lower()
        between = "; " if name == "cookie" else ", "
        headers[name] = f"{headers[name]}{between}{value}" if name in headers else value
    named = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    return {name: value for name, value in headers.items() if name not in _LEFT_OUT | named}


def _authority(scheme: str, netloc: str) -> str:
    """Return a host and its port in one spelling."""
    try:
        parts = urlsplit(f"{scheme}://{netloc}")
        return http.origin_of(scheme, parts.hostname or "", parts.port)
    except ValueError:
        return netloc


def _key_of(written: str) -> str | None:
    """Return the key in a header, if that is how the service will write it."""
    key = _ESCAPED.sub(r"\1", written[1:-1])
    fits = key and key.isascii() and key.isprintable() and http.key_text(key) == written
    return key if fits else None
