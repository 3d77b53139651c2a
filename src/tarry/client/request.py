"""A request to the service and what its answer means. Pure: nothing is sent here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from tarry.client.errors import (
    Conflict,
    InvalidRequest,
    NotAuthorized,
    NotFound,
    ServiceError,
    ServiceUnavailable,
    TooManyRequests,
)
from tarry.core.hints import parse_retry_after

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

_ERRORS: dict[int, type[ServiceError]] = {
    401: NotAuthorized,
    403: NotAuthorized,
    404: NotFound,
    409: Conflict,
    429: TooManyRequests,
    502: ServiceUnavailable,
    503: ServiceUnavailable,
    504: ServiceUnavailable,
}

Manner: TypeAlias = Literal["retried", "waited", "once", "for_ever"]
"""Sent again as the client's policy says; the same, but slow on purpose, so that its time says
nothing about the service; sent once; or sent again until it is answered."""


class Answer(msgspec.Struct, frozen=True):
    """What came back."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case, or a mapping that does not tell the cases apart."""
    content: bytes


class Request(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """What to send, and how to read what comes back."""

    method: str
    path: str
    """With the query."""
    read: Callable[[Answer], T]
    """Gets the answers of status 2xx, and those of `also`."""
    headers: dict[str, str] = {}
    content: bytes | None = None
    also: frozenset[int] = frozenset()
    waits: float = 0.0
    """Seconds that the service was asked to wait before it answers."""
    manner: Manner = "retried"

    def result(self, answer: Answer, now: float) -> T:
        """Return what was asked for, or raise what the service said; `now` in epoch seconds."""
        if answer.status // 100 == 2 or answer.status in self.also:  # noqa: PLR2004
            try:
                return self.read(answer)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                msg = f"the answer to {self} is none of a tarry service: {error}"
                raise ServiceError(msg, status=answer.status) from error
        raise self.error(answer, now)

    def error(self, answer: Answer, now: float) -> ServiceError:
        """Return what an answer means that is not what was asked for."""
        status, problem = answer.status, problem_of(answer.content)
        said = problem.get("detail") or problem.get("title") or "no problem document came with it"
        after = answer.headers.get("retry-after")
        kind = _ERRORS.get(status) or (InvalidRequest if 400 <= status < 500 else ServiceError)  # noqa: PLR2004
        return kind(
            f"{self} was answered with {status}: {said}",
            status=status,
            problem=problem,
            retry_after=None if after is None else parse_retry_after(after, now),
        )

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def problem_of(content: bytes) -> dict[str, Any]:
    """Return the members of a problem document; what is none, as a proxy may send it, has none."""
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def decoded(form: type[T]) -> Callable[[Answer], T]:
    """Return a reader of answers that are a form in JSON."""
    decode = msgspec.json.Decoder(form).decode
    return lambda answer: decode(answer.content)


def nothing(_: Answer) -> None:
    """Read an answer that says no more than its status."""
