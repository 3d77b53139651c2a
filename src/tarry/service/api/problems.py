"""Errors of the API: each becomes a response with problem details (RFC 9457).

Responses, the OpenAPI document and `GET /docs` use one list of problem types. The `type` of a
problem is a link to its row on `GET /docs`, which explains the problem and how to solve it. The
functions return the exception, so that the caller writes `raise problems.too_large(limit)`.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tarry.core.text import suggest
from tarry.errors import ConfigurationError, short_repr
from tarry.wire.http import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


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

# Parts of msgspec's messages, such as: Object missing required field `x` - at `$.tasks[...]`
_JSON_PATH = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_PYTHON_TYPES = re.compile(r"`([a-z| ]+)`")
_JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_TRUNCATED = r"The JSON is truncated, or has half of a \u surrogate pair (\ud83d alone)."
_MAX_NAME_CHARS = 100
"""Length at which an unknown field name is cut off in a message."""
_NO_VALUE = object()


class ApiError(Exception):
    """The response is a problem. Nothing was stored, unless the problem says otherwise."""

    def __init__(self, problem: Problem, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(problem.detail)
        self.problem: Problem = problem
        self.headers: list[tuple[bytes, bytes]] = list(headers)


def invalid(field: str, rule: str, value: object = _NO_VALUE, *, status: int = 422) -> ApiError:
    """Return the error for a field that breaks a rule.

    `field` is a path in the JSON, or the name of a parameter or header. `rule` continues a sentence
    that begins with the field, as in "maxAttempts must be at least 1, got 0.". The problem has this
    sentence as its detail, and `field`, `rule` and `value` as extension members.
    """
    members = {"field": field, "rule": rule}
    detail = f"{field or 'The document'} {rule}"
    if value is not _NO_VALUE:
        members["value"] = _format_value(value)
        detail += f", got {members['value']}"
    if not detail.endswith("?"):
        detail += "."
    return ApiError(INVALID.problem(detail, status, **members))


def from_configuration_error(field: str, error: ConfigurationError) -> ApiError:
    """Return the error for `field`, whose value was rejected with a ConfigurationError."""
    if error.has_value:
        return invalid(field, error.rule, error.value)
    return invalid(field, error.rule)


@contextmanager
def blame_field(field: str) -> Iterator[None]:
    """Turn a ConfigurationError into the error for `field`."""
    try:
        yield
    except ConfigurationError as error:
        raise from_configuration_error(field, error) from None


def unknown_field(parent: str, name: str, known_names: Iterable[str]) -> ApiError:
    """Return the error for a field that does not exist; it suggests the most similar name."""
    name, known_names = name[:_MAX_NAME_CHARS], list(known_names)
    rule = "is not a known field"
    if similar := suggest(name, known_names):
        rule += f"; did you mean {similar}?"
    elif known_names:
        rule += f"; the fields are {', '.join(known_names)}"
    return invalid(_join_path(parent, name), rule)


def malformed(detail: str) -> ApiError:
    """Return the error for a body that is not JSON."""
    return ApiError(MALFORMED.problem(detail))


def unexpected_body(query_names: Sequence[str]) -> ApiError:
    """Return the error for a body that the operation does not read."""
    rule = "must be empty"
    if query_names:
        rule += f"; the query parameters are {', '.join(query_names)}"
    return invalid("body", rule)


def nested_too_deeply() -> ApiError:
    """Return the error for JSON that is nested too deeply to be decoded or encoded."""
    return malformed("The JSON is nested too deeply.")


def no_such(resource: str) -> ApiError:
    """Return the error for a resource that does not exist or belongs to another tenant."""
    return not_found(f"There is no such {resource}.")


def not_found(detail: str) -> ApiError:
    """Return a 404 error."""
    return ApiError(NOT_FOUND.problem(detail))


def conflict(problem_type: ProblemType, detail: str, **more: Any) -> ApiError:
    """Return the error for an operation that is not possible in the current state."""
    return ApiError(problem_type.problem(detail, **more))


def idempotency_key_reused() -> ApiError:
    """Return the error for an idempotency key that was used with a different task."""
    detail = (
        "idempotencyKey was already used with a different task. Resend the original task, or use "
        "a new key."
    )
    return ApiError(KEY_REUSED.problem(detail, field="idempotencyKey"))


def malformed_key_header(detail: str) -> ApiError:
    """Return the error for an `Idempotency-Key` header that cannot be parsed."""
    problem = INVALID.problem(detail, 400, field="Idempotency-Key")
    return ApiError(problem)


def too_large(max_bytes: int) -> ApiError:
    """Return the error for a body of more than `max_bytes`."""
    detail = f"The request may have at most {max_bytes} bytes. Use `bodyRef` for larger bodies."
    return ApiError(TOO_LARGE.problem(detail), [(b"connection", b"close")])


def unsupported_media_type() -> ApiError:
    """Return the error for a content type other than JSON."""
    problem = NOT_JSON.problem(NOT_JSON.help)
    return ApiError(problem, [(b"accept", b"application/json")])


def unauthorized(detail: str) -> ApiError:
    """Return the error for a missing or invalid API key."""
    challenge = (b"www-authenticate", b'Bearer realm="tarry"')
    return ApiError(KEY_NEEDED.problem(detail), [challenge])


def cross_site(origin: str) -> ApiError:
    """Return the error for a request that a web page of another origin sent."""
    detail = f"Requests from web pages of {origin} are not accepted."
    return ApiError(CROSS_SITE.problem(detail))


def wrong_host(host: str) -> ApiError:
    """Return the error for a `Host` that does not belong to this service."""
    detail = (
        f"Requests to {host} are not accepted: without API keys, the host must be a loopback "
        "name. The operator can allow other names (allow_host)."
    )
    return ApiError(WRONG_HOST.problem(detail))


def method_not_allowed(allowed: str) -> ApiError:
    """Return the error for a method that the path does not support."""
    problem = METHOD_NOT_ALLOWED.problem(f"This path supports {allowed}.")
    return ApiError(problem, [(b"allow", allowed.encode())])


def too_many_requests(detail: str, retry_after_s: float) -> ApiError:
    """Return the error for a tenant that has reached a quota."""
    return ApiError(QUOTA.problem(detail), [retry_after_header(retry_after_s)])


def unavailable(detail: str, retry_after_s: float = 1.0, **more: Any) -> ApiError:
    """Return the error (503) for a request that may succeed if it is sent again later."""
    problem = UNAVAILABLE.problem(detail, **more)
    return ApiError(problem, [retry_after_header(retry_after_s)])


def internal_error() -> ApiError:
    """Return the error for a bug in the service."""
    return ApiError(INTERNAL_ERROR.problem("The service failed; see its log."))


def retry_after_header(seconds: float) -> tuple[bytes, bytes]:
    """Return the `Retry-After` header: `seconds` rounded up, at least 1."""
    return b"retry-after", str(max(1, ceil(seconds))).encode()


def from_decode_error(error: Exception, document_type: type[object]) -> ApiError:
    """Return the error for a document that msgspec could not decode, with the invalid field."""
    if isinstance(error, RecursionError):
        return nested_too_deeply()
    if isinstance(error, UnicodeDecodeError):
        return malformed("The JSON is not UTF-8.")
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return malformed(_TRUNCATED if text == "Input data was truncated" else f"{text}.")
    path_match = _JSON_PATH.search(text)
    path = "" if path_match is None else path_match[1].replace("[...]", "")
    message = text if path_match is None else text[: path_match.start()]
    if unknown := _UNKNOWN_FIELD.fullmatch(message):
        return unknown_field(path, unknown[1], _field_names_at(document_type, path))
    if missing := _MISSING_FIELD.fullmatch(message):
        return invalid(_join_path(path, missing[1]), "is missing")
    if choices := _choices_at(document_type, path):
        return invalid(path, f"must be {' or '.join(choices)}")
    rule = _PYTHON_TYPES.sub(_to_json_types, message)
    return invalid(path, f"is invalid: {rule[:1].lower()}{rule[1:]}")


def _types_at(document_type: type[object], path: str) -> list[Any]:
    """Return the types that msgspec allows at a path of a document (several for a union)."""
    types: list[Any] = [msgspec.inspect.type_info(document_type)]
    for name in filter(None, path.split(".")):
        fields = [field for struct in types for field in getattr(struct, "fields", ())]
        field_types = [field.type for field in fields if field.encode_name == name]
        types = [member for union in field_types for member in getattr(union, "types", (union,))]
    return types


def _field_names_at(document_type: type[object], path: str) -> list[str]:
    structs = _types_at(document_type, path)
    return [field.encode_name for struct in structs for field in getattr(struct, "fields", ())]


def _choices_at(document_type: type[object], path: str) -> list[str]:
    types = _types_at(document_type, path)
    return [str(value) for literal in types for value in getattr(literal, "values", ())]


def _join_path(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _to_json_types(match: re.Match[str]) -> str:
    return " or ".join(_JSON_TYPES.get(name, name) for name in match[1].split(" | "))


def _format_value(value: object) -> str:
    """Return a rejected value as text for a message; null, true and false are written as JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return short_repr(value)
