"""What the middleware answers by itself: problem details in the words of the draft, section 2.7."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from tarry.wire.problem import BLANK, MEDIA_TYPE, Problem

if TYPE_CHECKING:
    from tarry.idempotency.record import Conflict, StoredResponse
    from tarry.wire.asgi import Send

_ASK_AGAIN = 1
"""Seconds: most handlers end within one, and to ask again is cheap."""


class Refusal(Exception):
    """A request that is answered with a problem instead of by the application.

    `should_retry` tells clients that know the header whether the same request may do better later.
    """

    def __init__(
        self,
        problem: Problem,
        anchor: str,
        *,
        retry_after: int | None = None,
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


def outstanding(conflict: Conflict) -> Refusal:
    """The first request with the key still runs."""
    detail = (
        "The first request with this key still runs. Send the same again a little later. If its "
        f"server has died, the key is free in {ceil(conflict.retry_after)} s."
    )
    title = "A request is outstanding for this Idempotency-Key"
    problem = Problem(409, title, detail)
    return Refusal(problem, "outstanding", retry_after=_ASK_AGAIN, should_retry=True)


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
    return Refusal(problem, "unavailable", retry_after=seconds, should_retry=True)


async def refuse(send: Send, refusal: Refusal, docs_url: str | None) -> None:
    """Answer with the problem; its type and a link lead to the documentation, if there is any."""
    problem = refusal.problem
    kind = BLANK if docs_url is None else _with_anchor(docs_url, refusal.anchor)
    body = Problem(problem.status, problem.title, problem.detail, kind, more=problem.more).to_json()
    headers = [
        (b"content-type", MEDIA_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"content-language", b"en"),
        (b"x-should-retry", b"true" if refusal.should_retry else b"false"),
    ]
    if refusal.retry_after is not None:
        headers.append((b"retry-after", str(refusal.retry_after).encode()))
    if docs_url is not None:
        headers.append((b"link", f'<{docs_url}>; rel="describedby"'.encode()))
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _with_anchor(docs_url: str, anchor: str) -> str:
    """A type of its own for each problem, unless the URL points into its page already."""
    return docs_url if "#" in docs_url else f"{docs_url}#{anchor}"
