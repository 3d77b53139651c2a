"""All types of problem details (RFC 9457) that the service returns.

Responses, the OpenAPI document and `GET /docs` use this one list. The `type` of a problem is a
link to its row on `GET /docs`, which explains the problem and how to solve it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tarry.wire.problem import Problem


class ProblemType(NamedTuple):
    """A type of problem (RFC 9457, 3.1.1): the parts that all its problems have in common."""

    name: str
    statuses: tuple[int, ...]
    """The HTTP statuses of such a problem, the usual one first."""
    title: str
    help: str
    """What the problem means and how to solve it."""

    @property
    def anchor(self) -> str:
        """The id of the row on `GET /docs`."""
        return f"problem-{self.name}"

    @property
    def type(self) -> str:
        """The URI reference that identifies the type. It never changes."""
        return f"/docs#{self.anchor}"

    def problem(self, detail: str, status: int | None = None, **more: Any) -> Problem:
        """Return a problem of this type."""
        return Problem(status or self.statuses[0], self.title, detail, self.type, extensions=more)


# fmt: off
NOT_HTTP = ProblemType(
    "not-http", (400,), "Bad Request",
    "The bytes received are not an HTTP request. Check your client and any proxy in between.",
)
MALFORMED = ProblemType(
    "malformed", (400,), "Malformed JSON",
    "The body is not JSON in UTF-8, or is nested too deeply. `detail` has the reason.",
)
INVALID = ProblemType(
    "invalid", (422, 400), "Invalid request",
    "A field, parameter or header is invalid. `field` names it, `rule` has the rule.",
)
KEY_NEEDED = ProblemType(
    "key-needed", (401,), "API key needed",
    "The API key is missing, unknown or revoked. Create one with `tarry keys create`.",
)
CROSS_SITE = ProblemType(
    "cross-site", (403,), "Cross-site request",
    "A web page of another origin sent this request. Send it from a program or the same origin.",
)
NOT_FOUND = ProblemType(
    "not-found", (404,), "Not found",
    "The resource does not exist, belongs to another tenant, or is past its retention time.",
)
METHOD_NOT_ALLOWED = ProblemType(
    "method-not-allowed", (405,), "Method not allowed",
    "The path does not support this method. The `Allow` header lists the methods it supports.",
)
TIMEOUT = ProblemType(
    "timeout", (408,), "Request Timeout",
    "The request did not arrive within `head_timeout_ms` and `body_timeout_ms`. Send it again.",
)
ALREADY_FINISHED = ProblemType(
    "already-finished", (409,), "Already finished",
    "The task or replay is finished or being cancelled. Create a new one.",
)
POLICY_EXISTS = ProblemType(
    "policy-exists", (409,), "policyId already exists",
    "A policy with this id and different fields exists. `PUT` creates a new version of it.",
)
POLICY_IN_USE = ProblemType(
    "policy-in-use", (409,), "Policy is in use",
    "Unfinished tasks use this policy. Wait until they are finished, or cancel them.",
)
POLICY_BUILT_IN = ProblemType(
    "policy-built-in", (409,), "Policy cannot be deleted",
    "The policy is built in. `PUT` creates a policy of yours that replaces it.",
)
TOO_LARGE = ProblemType(
    "too-large", (413,), "Content is too large",
    "The request is larger than `max_body_bytes`. Use `bodyRef`, or split the batch.",
)
NOT_JSON = ProblemType(
    "not-json", (415,), "Unsupported media type",
    "Send JSON, with the header `Content-Type: application/json`.",
)
WRONG_HOST = ProblemType(
    "wrong-host", (421,), "Misdirected Request",
    "Without API keys, the `Host` header must be a loopback name or listed in `allow_host`.",
)
KEY_REUSED = ProblemType(
    "key-reused", (422,), "idempotencyKey is already used",
    "The idempotencyKey was used with a different task. Use a new key for a new task.",
)
QUOTA = ProblemType(
    "quota", (429,), "Too many requests",
    "The tenant has reached `tenant_rate` or `tenant_pending`. Wait for `Retry-After`.",
)
HEADERS_TOO_LARGE = ProblemType(
    "headers-too-large", (431,), "Request Header Fields Too Large",
    "Request line and headers, or the trailers, are too large. Send fewer or shorter ones.",
)
INTERNAL_ERROR = ProblemType(
    "internal-error", (500,), "Internal error",
    "A bug in the service; see its log. The request may have been stored: send it again with the "
    "same idempotencyKey.",
)
UNAVAILABLE = ProblemType(
    "unavailable", (503,), "Service unavailable",
    "The store or another component fails, or the service is overloaded. Wait for "
    "`Retry-After`, then send the same request again.",
)
# fmt: on

PROBLEM_TYPES = tuple(
    problem_type
    for problem_type in tuple(globals().values())
    if isinstance(problem_type, ProblemType)
)
"""All of the above, in the same order."""
