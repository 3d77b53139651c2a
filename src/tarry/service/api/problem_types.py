"""Every kind of problem that the service tells: the one list, for answers, documents and people.

The type of each is a place on `GET /docs`, where a person reads what it means and what helps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tarry.wire.problem import Problem


class ProblemType(NamedTuple):
    """One kind of problem (RFC 9457, 3.1.1): what all of them have in common."""

    name: str
    statuses: tuple[int, ...]
    """The usual one first."""
    title: str
    help: str
    """What it means, and what helps."""

    @property
    def anchor(self) -> str:
        """The place on the page of the API that tells about it."""
        return f"problem-{self.name}"

    @property
    def type(self) -> str:
        """The URI reference that names it, for good."""
        return f"/docs#{self.anchor}"

    def problem(self, detail: str, status: int | None = None, **more: Any) -> Problem:
        """Return a problem of this kind."""
        return Problem(status or self.statuses[0], self.title, detail, self.type, more=more)


# fmt: off
NOT_HTTP = ProblemType(
    "not-http", (400,), "Bad Request",
    "What came is no HTTP request. Look at what your client, or a proxy between, sends.",
)
MALFORMED = ProblemType(
    "malformed", (400,), "Malformed JSON",
    "The body is not JSON in UTF-8, or is nested too deeply. `detail` says what is wrong.",
)
INVALID = ProblemType(
    "invalid", (422, 400), "Invalid request",
    "A field, parameter or header breaks a rule. `field` names it, `detail` has the rule.",
)
KEY_NEEDED = ProblemType(
    "key-needed", (401,), "API key needed",
    "There is no API key, or it is unknown or revoked. `tarry keys create` makes one.",
)
CROSS_SITE = ProblemType(
    "cross-site", (403,), "Cross-site request",
    "A page of another site asked through a browser. Call from a program, or from the same origin.",
)
NOT_FOUND = ProblemType(
    "not-found", (404,), "Not found",
    "There is no such thing, it is another tenant's, or it is older than what is kept.",
)
NOT_ALLOWED = ProblemType(
    "not-allowed", (405,), "Method not allowed",
    "The path has other methods. The header `Allow` lists them.",
)
TIMEOUT = ProblemType(
    "timeout", (408,), "Request Timeout",
    "The request did not arrive within `head_timeout_ms` and `body_timeout_ms`. Send it again.",
)
ENDED = ProblemType(
    "ended", (409,), "Already ended",
    "The task or the replay has ended, or is about to. Look at it, or send a new one.",
)
POLICY_TAKEN = ProblemType(
    "policy-taken", (409,), "policyId is taken",
    "A policy of this name has other content. `PUT` makes a new version of it.",
)
POLICY_IN_USE = ProblemType(
    "policy-in-use", (409,), "Policy is in use",
    "Live tasks go by this policy. Wait until they have ended, or cancel them.",
)
POLICY_BUILT_IN = ProblemType(
    "policy-built-in", (409,), "Policy cannot be deleted",
    "It comes with the service. `PUT` lays one of yours over it.",
)
TOO_LARGE = ProblemType(
    "too-large", (413,), "Content is too large",
    "The request is longer than `max_body_bytes`. Use `bodyRef`, or halve a batch.",
)
NOT_JSON = ProblemType(
    "not-json", (415,), "Unsupported media type",
    "Send JSON, with the header `Content-Type: application/json`.",
)
HOST = ProblemType(
    "host", (421,), "Misdirected Request",
    "Without keys, only requests to loopback itself are served. `allow_host` allows more names.",
)
KEY_REUSED = ProblemType(
    "key-reused", (422,), "idempotencyKey is already used",
    "The key came with other content before. A new task needs a new key, a retry the same content.",
)
QUOTA = ProblemType(
    "quota", (429,), "Too many requests",
    "The tenant's `tenant_rate` or `tenant_pending` is used up. Wait for `Retry-After`.",
)
HEAD_TOO_LARGE = ProblemType(
    "head-too-large", (431,), "Request Header Fields Too Large",
    "Request line and headers, or the trailers, are too long. Send fewer or shorter ones.",
)
BROKEN = ProblemType(
    "broken", (500,), "Internal error",
    "A mistake of ours: the log says why. What was sent may have been kept: send it again.",
)
UNAVAILABLE = ProblemType(
    "unavailable", (503,), "Service unavailable",
    "The store or another part is out of order, or there is too much to do. Wait for "
    "`Retry-After`, then send the same again.",
)
# fmt: on

PROBLEM_TYPES = tuple(one for one in tuple(globals().values()) if isinstance(one, ProblemType))
"""All that stand above, in their order."""
