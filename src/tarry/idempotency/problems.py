"""The responses that the middleware sends itself: problem details (RFC 9457).

The titles are those of draft-ietf-httpapi-idempotency-key-header, section 2.7. The functions from
`key_missing` to `store_unavailable` return a `Rejection`, which the middleware raises.
"""

from __future__ import annotations

import re
from math import ceil
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError
from tarry.wire.http import PROBLEM_MEDIA_TYPE, Problem

if TYPE_CHECKING:
    from tarry.idempotency.store import InProgress, StoredResponse
    from tarry.wire.http import Send

_MIN_RETRY_AFTER_S = 1
"""One second, because most handlers finish within it, and a retry that comes too early is cheap."""
_DRAFT = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/"
_URL = re.compile(r"https?://[!#-;=?-~]+")
"""Excludes spaces, quotes, angle brackets and line breaks, because the URL is sent in a header."""


class Rejection(Exception):
    """A request that gets a problem as its response and does not reach the application.

    `anchor` names the kind of rejection in the problem's `type` (see `ProblemDocs.problem_type`).
    `retry_after` is in seconds. `should_retry`, whether the same request may succeed later, becomes
    the `X-Should-Retry` header.
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


def key_missing() -> Rejection:
    """Return the rejection of a request without a key on a path that requires one."""
    detail = "Send a new unique key with each operation, and the same key when you retry it."
    return Rejection(Problem(400, "Idempotency-Key is missing", detail), "missing")


def key_malformed(detail: str) -> Rejection:
    """Return the rejection of a key that cannot be parsed."""
    return Rejection(Problem(400, "Idempotency-Key is malformed", detail), "malformed")


def key_reused() -> Rejection:
    """Return the rejection of a key that was already used for a different request."""
    detail = (
        "The first request with this key had a different query, content type or body. Use a new "
        "key for a new operation; repeat the first request exactly to retry it."
    )
    return Rejection(Problem(422, "Idempotency-Key is already used", detail), "reused")


def request_in_progress(in_progress: InProgress, lease: float) -> Rejection:
    """Return the rejection for a key whose first request still runs, or whose server died.

    `lease` is the length of a lease in seconds.
    """
    detail = (
        "The first request with this key is still running. Send the same request again later. If "
        f"its server has died, the key is free in {ceil(in_progress.retry_after)} s."
    )
    title = "A request is outstanding for this Idempotency-Key"
    problem = Problem(409, title, detail)
    # A live server renews its lease when a third of it has passed. If less than a third remains,
    # the server has died, and the key becomes free when the lease expires.
    seconds = ceil(in_progress.retry_after) if in_progress.retry_after < lease / 3 else 0
    return Rejection(problem, "outstanding", max(_MIN_RETRY_AFTER_S, seconds), should_retry=True)


def response_not_stored(response: StoredResponse) -> Rejection:
    """Return the rejection for a key whose first request is complete but has no stored response.

    The status is 409, because the requested effect exists and a retry would conflict with it. It is
    not 410, because webhook senders disable an endpoint that returns 410. It is not a status that
    clients retry, because a retry cannot succeed either.
    """
    detail = (
        f"The first request with this key was answered with status {response.status}. Its response "
        "was too large, or of a type that is not stored. The request has not been run again."
    )
    title = "The response for this Idempotency-Key was not kept"
    problem = Problem(409, title, detail, extensions={"originalStatus": response.status})
    return Rejection(problem, "not-kept")


def body_too_large(max_bytes: int) -> Rejection:
    """Return the rejection of a body that is too large to be buffered for its fingerprint."""
    detail = (
        f"A request with an Idempotency-Key may have a body of up to {max_bytes} bytes here "
        "(max_request_bytes of the middleware)."
    )
    problem = Problem(413, "Content is too large for an Idempotency-Key", detail)
    return Rejection(problem, "too-large")


def store_unavailable(retry_after: float | None) -> Rejection:
    """Return the rejection of a request that may have run before, as the store cannot be read."""
    detail = (
        "The server cannot currently check whether a request with this key ran before. This "
        "request has not run."
    )
    problem = Problem(503, "Idempotency-Key cannot be checked", detail)
    seconds = max(_MIN_RETRY_AFTER_S, ceil(retry_after or 0))
    return Rejection(problem, "unavailable", seconds, should_retry=True)


class ProblemDocs:
    """The documentation that problems link to: the API's own page, or the draft."""

    def __init__(self, url: str | None) -> None:
        if url is not None and not (isinstance(url, str) and _URL.fullmatch(url)):
            raise ConfigurationError("docs_url", "must be an http or https URL in plain ASCII", url)
        self._url = url
        self.link: bytes = f'<{url or _DRAFT}>; rel="describedby"'.encode()

    def problem_type(self, anchor: str) -> str:
        """Return the type of a problem: the docs URL, with this anchor unless the URL has its own.

        Without a docs URL, the type is a URN.
        """
        if self._url is None:
            return f"urn:tarry:idempotency:{anchor}"
        return self._url if "#" in self._url else f"{self._url}#{anchor}"


async def send_rejection(send: Send, rejection: Rejection, docs: ProblemDocs) -> None:
    """Send the problem, with a link to the documentation."""
    problem = rejection.problem
    problem_type = docs.problem_type(rejection.anchor)
    body = Problem(
        problem.status, problem.title, problem.detail, problem_type, extensions=problem.extensions
    ).to_json()
    headers = [
        (b"content-type", PROBLEM_MEDIA_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"content-language", b"en"),
        (b"link", docs.link),
        (b"x-should-retry", b"true" if rejection.should_retry else b"false"),
    ]
    if rejection.retry_after is not None:
        headers.append((b"retry-after", str(rejection.retry_after).encode()))
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
