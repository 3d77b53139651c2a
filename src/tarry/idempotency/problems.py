"""What the middleware answers by itself: problem details in the words of the draft, section 2.7."""

from __future__ import annotations

import re
from math import ceil
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError
from tarry.wire.problem import MEDIA_TYPE, Problem

if TYPE_CHECKING:
    from tarry.idempotency.record import Conflict, StoredResponse
    from tarry.wire.asgi import Send

_ASK_AGAIN = 1
"""Seconds: most handlers end within one, and to ask again is cheap."""
_DRAFT = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/"
_URL = re.compile(r"https?://[!#-;=?-~]+")
"""No space, quote, angle bracket or line break: it goes into a header field."""


class Refusal(Exception):
    """A request that is answered with a problem instead of by the application.

    `should_retry` tells clients that know the header whether the same request may do better later.
    """

    def __init__(
        self,
        problem: Problem,
        anchor: str,
        retry_after: int | None = None,
        *,
        should_retry: bool = False,
    ) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.anchor = anchor
        self.retry_after = retry_after
        self.should_retry = should_retry


def missing() -> Refusal:
    """The route needs a key."""
    detail = "Send a new unique key with each operation, and the same key when you retry it."
    return Refusal(Problem(400, "Idempotency-Key is missing", detail), "missing")


def malformed(detail: str) -> Refusal:
    """The key cannot be read."""
    return Refusal(Problem(400, "Idempotency-Key is malformed", detail), "malformed")


def reused() -> Refusal:
    """The key came with something else before."""
    detail = (
        "The first request with this key had another query, content type or body. Send a new key "
        "with a new operation, and what was sent first with a retry."
    )
    return Refusal(Problem(422, "Idempotency-Key is already used", detail), "reused")


def outstanding(conflict: Conflict, lease: float) -> Refusal:
    """The first request with the key still runs; or its server has died, and does not renew it."""
    detail = (
        "The first request with this key still runs. Send the same again a little later. If its "
        f"server has died, the key is free in {ceil(conflict.retry_after)} s."
    )
    title = "A request is outstanding for this Idempotency-Key"
    problem = Problem(409, title, detail)
    seconds = ceil(conflict.retry_after) if conflict.retry_after < lease / 3 else 0
    return Refusal(problem, "outstanding", max(_ASK_AGAIN, seconds), should_retry=True)


def not_kept(response: StoredResponse) -> Refusal:
    """The first request is done, and its response was not kept.

    409: what was asked for is done, and stays so. Not 410, at which senders of webhooks give up the
    endpoint, and no status that clients retry: no later try will do better.
    """
    detail = (
        f"The first request with this key was answered with status {response.status}, and its "
        "response was too large, or of a kind, to be kept. It has not been run again."
    )
    title = "The response for this Idempotency-Key was not kept"
    problem = Problem(409, title, detail, more={"originalStatus": response.status})
    return Refusal(problem, "not-kept")


def too_large(limit: int) -> Refusal:
    """The body is too large to be compared."""
    detail = (
        f"A request with an Idempotency-Key may have a body of up to {limit} bytes here "
        "(max_request of the middleware)."
    )
    return Refusal(Problem(413, "Content is too large for an Idempotency-Key", detail), "too-large")


def unavailable(retry_after: float | None) -> Refusal:
    """The store cannot say whether the request ran before, so it does not run."""
    detail = (
        "It cannot be told now whether a request with this key ran before. This one has not run."
    )
    problem = Problem(503, "Idempotency-Key cannot be checked", detail)
    seconds = max(_ASK_AGAIN, ceil(retry_after or 0))
    return Refusal(problem, "unavailable", seconds, should_retry=True)


class Docs:
    """Where the problems lead: to the API's own page, or to the draft."""

    def __init__(self, url: str | None) -> None:
        if url is not None and not (isinstance(url, str) and _URL.fullmatch(url)):
            raise ConfigurationError("docs_url", "must be an http or https URL in plain ASCII", url)
        self._url = url
        self.link: bytes = f'<{url or _DRAFT}>; rel="describedby"'.encode()

    def type_of(self, anchor: str) -> str:
        """A type of its own for each problem, unless the URL points into its page already."""
        if self._url is None:
            return f"urn:tarry:idempotency:{anchor}"
        return self._url if "#" in self._url else f"{self._url}#{anchor}"


async def refuse(send: Send, refusal: Refusal, docs: Docs) -> None:
    """Answer with the problem; a link leads to the documentation."""
    problem = refusal.problem
    kind = docs.type_of(refusal.anchor)
    body = Problem(problem.status, problem.title, problem.detail, kind, more=problem.more).to_json()
    headers = [
        (b"content-type", MEDIA_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"content-language", b"en"),
        (b"link", docs.link),
        (b"x-should-retry", b"true" if refusal.should_retry else b"false"),
    ]
    if refusal.retry_after is not None:
        headers.append((b"retry-after", str(refusal.retry_after).encode()))
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
