"""Errors of the API. Each becomes a response with problem details (RFC 9457).

The `type` of a problem is a link to its row on the page `GET /docs`, which explains the solution.
The functions return the exception, so that the caller writes `raise problems.too_large(limit)`.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tarry.core.text import suggest
from tarry.errors import ConfigurationError, short_repr
from tarry.wire.http import Problem

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    Headers = Sequence[tuple[bytes, bytes]]


class ApiError(Exception):
    """Ends a request with the response `problem`. Nothing was stored unless it says otherwise."""

    def __init__(self, problem: Problem, headers: Headers) -> None:
        super().__init__(problem.detail)
        self.problem: Problem = problem
        self.headers: Headers = headers


class ProblemType(NamedTuple):
    """A type of problem (RFC 9457, 3.1.1): the members that all its problems have in common."""

    name: str
    statuses: tuple[int, ...]
    """The HTTP statuses that such a problem can have, the default first."""
    title: str
    help: str
    """What the problem means and how to solve it."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Headers of every response with such a problem."""

    @property
    def anchor(self) -> str:
        """The id of its row on the page `GET /docs`."""
        return f"problem-{self.name}"

    @property
    def type(self) -> str:
        """The URI reference that identifies the type. It never changes."""
        return f"/docs#{self.anchor}"

    def problem(self, detail: str, status: int | None = None, **extensions: Any) -> Problem:
        """Return a problem of this type."""
        status = status or self.statuses[0]
        return Problem(status, self.title, detail, self.type, extensions=extensions)

    def error(
        self, detail: str, *, status: int | None = None, headers: Headers = (), **extensions: Any
    ) -> ApiError:
        """Return the error for a problem of this type."""
        return ApiError(self.problem(detail, status, **extensions), (*self.headers, *headers))


# fmt: off
NOT_HTTP = ProblemType("not-http", (400, 501, 505), "Invalid HTTP request",
    "The bytes received are not a valid HTTP/1.1 request, or need a feature that is not supported. "
    "`detail` has the reason. Check your client and any proxy in between.")
MALFORMED = ProblemType("malformed", (400,), "Malformed JSON",
    "The body is not JSON in UTF-8, or is nested too deeply. `detail` has the reason.")
INVALID = ProblemType("invalid", (422, 400), "Invalid request",
    "A field, parameter or header is invalid. `field` names it; `rule` says what is wrong.")
API_KEY_REQUIRED = ProblemType("api-key-required", (401,), "API key required",
    "The API key is missing, unknown or revoked. Create one with `tarry keys create`.",
    ((b"www-authenticate", b'Bearer realm="tarry"'),))
CROSS_SITE = ProblemType("cross-site", (403,), "Cross-site request",
    "A web page of another origin sent this request. Send it from a program or the same origin.")
OPERATOR_REQUIRED = ProblemType("operator-required", (403,), "Operator required",
    "The operation concerns all tenants. Use a key of the tenant in the setting `operator`.")
ROLE_REQUIRED = ProblemType("role-required", (403,), "Role required",
    "The API key may not do this. Use a key with the role `requiredRole`, or one that includes it.")
NOT_FOUND = ProblemType("not-found", (404,), "Not found",
    "The resource does not exist, belongs to another tenant, or is past its retention time.")
METHOD_NOT_ALLOWED = ProblemType("method-not-allowed", (405,), "Method not allowed",
    "The path does not support this method. The `Allow` header lists the methods it supports.")
TIMEOUT = ProblemType("timeout", (408,), "Request Timeout",
    "The request did not arrive within `head_timeout_ms` and `body_timeout_ms`. Send it again.")
ALREADY_FINISHED = ProblemType("already-finished", (409,), "Already finished",
    "The task or replay is finished or being cancelled. Create a new one.")
POLICY_EXISTS = ProblemType("policy-exists", (409,), "policyId already exists",
    "A policy with this id and different fields exists. `PUT` creates a new version of it.")
POLICY_IN_USE = ProblemType("policy-in-use", (409,), "Policy is in use",
    "Unfinished tasks use this policy. Wait until they are finished, or cancel them.")
POLICY_BUILT_IN = ProblemType("policy-built-in", (409,), "Policy cannot be deleted",
    "The policy is built in. `PUT` creates a policy of yours that replaces it.")
TOO_MANY_SECRETS = ProblemType("too-many-secrets", (409,), "Too many signing secrets",
    "The tenant or the lane has the maximum number of signing secrets. Delete one of them first.")
TOO_LARGE = ProblemType("too-large", (413,), "Content is too large",
    "The body is larger than `max_body_bytes`, or the batch is larger than 16 MiB. Raise the "
    "setting, or split the batch.",
    ((b"connection", b"close"),))
NOT_JSON = ProblemType("not-json", (415,), "Unsupported media type",
    "Send JSON, with the header `Content-Type: application/json`.",
    ((b"accept", b"application/json"),))
WRONG_HOST = ProblemType("wrong-host", (421,), "Misdirected Request",
    "Without API keys, the `Host` header must be a loopback name or listed in `allow_host`.")
WRONG_ROLE = ProblemType("wrong-role", (421,), "Misdirected Request",
    "This process of the service does not serve the operation, because of its setting `role`. "
    "Send the request to a process that `detail` names.")
IDEMPOTENCY_KEY_REUSED = ProblemType(
    "idempotency-key-reused", (422,), "idempotencyKey is already used",
    "The idempotencyKey was used with a different task. Use a new key for a new task.")
TENANT_LIMIT = ProblemType("tenant-limit", (429,), "Tenant limit reached",
    "The tenant has reached a limit, such as the setting `tenant_rate` or `tenant_pending`. "
    "`detail` names the limit. Wait for `Retry-After`.")
HEADERS_TOO_LARGE = ProblemType("headers-too-large", (431,), "Request Header Fields Too Large",
    "Request line and headers, or the trailers, are too large. Send fewer or shorter ones.")
INTERNAL_ERROR = ProblemType("internal-error", (500,), "Internal error",
    "A bug in the service; see its log. The request may have been stored: send it again with the "
    "same idempotencyKey.")
UNAVAILABLE = ProblemType("unavailable", (503,), "Service unavailable",
    "The store or another component fails, or the service is overloaded. Wait for "
    "`Retry-After`, then send the same request again.")
# fmt: on

PROBLEM_TYPES = tuple(value for value in [*globals().values()] if isinstance(value, ProblemType))
"""All problem types, in the order of their definition."""

# Parts of msgspec's messages, such as: Object missing required field `x` - at `$.tasks[...]`
_JSON_PATH = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_PYTHON_TYPES = re.compile(r"`([a-z| ]+)`")
_JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_TRUNCATED = r"The JSON ends too early, or has half of a surrogate pair (such as \ud83d alone)."
_MAX_NAME_CHARS = 100
"""Length after which the name of an unknown field is cut off in a message."""
_NO_VALUE = object()


def invalid(field: str, rule: str, value: object = _NO_VALUE, *, status: int = 422) -> ApiError:
    """Return the error for an invalid `field`: the path of a JSON field, a parameter or a header.

    `rule` continues a sentence that begins with the field, as in "maxAttempts must be at least 1,
    got 0.". This sentence is the detail; `field`, `rule` and `value` are extension members.
    """
    members: dict[str, Any] = {"field": field, "rule": rule}
    detail = f"{field or 'The document'} {rule}"
    if value is not _NO_VALUE:
        is_json = value is None or isinstance(value, bool)
        members["value"] = json.dumps(value) if is_json else short_repr(value)
        detail += f", got {members['value']}"
    if not detail.endswith("?"):
        detail += "."
    return INVALID.error(detail, status=status, **members)


def from_configuration_error(field: str, error: ConfigurationError) -> ApiError:
    """Return the ApiError for `field`, whose value has caused a ConfigurationError."""
    return invalid(field, error.rule, error.value if error.has_value else _NO_VALUE)


@contextmanager
def convert_errors(field: str) -> Generator[None]:
    """Convert a ConfigurationError of the `with` block to the ApiError for `field`."""
    try:
        yield
    except ConfigurationError as error:
        raise from_configuration_error(field, error) from None


def unknown_field(parent: str, name: str, known_names: Iterable[str]) -> ApiError:
    """Return the error for an unknown field. It suggests a similar known name, or lists all."""
    name, known_names = name[:_MAX_NAME_CHARS], list(known_names)
    rule = "is not a known field"
    if similar := suggest(name, known_names):
        rule += f"; did you mean {similar}?"
    elif known_names:
        rule += f"; the fields are {', '.join(known_names)}"
    return invalid(_join_path(parent, name), rule)


def nested_too_deeply() -> ApiError:
    """Return the error for JSON that is nested too deeply to be decoded or encoded."""
    return MALFORMED.error("The JSON is nested too deeply.")


def no_such(resource: str) -> ApiError:
    """Return the error for a resource that does not exist or belongs to another tenant."""
    return NOT_FOUND.error(f"There is no such {resource}.")


def too_large(max_bytes: int) -> ApiError:
    """Return the error (413) for a body of more than `max_bytes`."""
    return TOO_LARGE.error(
        f"The request may have at most {max_bytes} bytes. Split a batch; for a larger body, raise "
        "the setting `max_body_bytes`, which also limits the object of a `bodyRef`."
    )


def unavailable(detail: str, retry_after_s: float = 1.0, **extensions: Any) -> ApiError:
    """Return the error (503) for a request that may succeed if it is sent again later."""
    return UNAVAILABLE.error(detail, headers=[retry_after(retry_after_s)], **extensions)


def retry_after(seconds: float) -> tuple[bytes, bytes]:
    """Return the `Retry-After` header: `seconds` rounded up, at least 1."""
    return b"retry-after", str(max(1, ceil(seconds))).encode()


def from_decode_error(error: Exception, document_type: type[object]) -> ApiError:
    """Return the error, with the invalid field, for a document that msgspec could not decode."""
    if isinstance(error, RecursionError):
        return nested_too_deeply()
    if isinstance(error, UnicodeDecodeError):
        return MALFORMED.error("The JSON is not UTF-8.")
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return MALFORMED.error(_TRUNCATED if text == "Input data was truncated" else f"{text}.")
    path_match = _JSON_PATH.search(text)
    path = "" if path_match is None else path_match[1].replace("[...]", "")
    message = text if path_match is None else text[: path_match.start()]
    types = _types_at(document_type, path)
    if unknown := _UNKNOWN_FIELD.fullmatch(message):
        fields = [field for type_ in types for field in getattr(type_, "fields", ())]
        return unknown_field(path, unknown[1], [field.encode_name for field in fields])
    if missing := _MISSING_FIELD.fullmatch(message):
        return invalid(_join_path(path, missing[1]), "is missing")
    if choices := [choice for type_ in types for choice in _list_choices(type_)]:
        return invalid(path, f"must be {' or '.join(choices)}")
    if "matching regex" in message:
        for type_ in types:
            if schema := getattr(type_, "extra_json_schema", None):
                return invalid(path, f"must be {schema['description'].rstrip('.')}")
    rule = _PYTHON_TYPES.sub(_to_json_types, message)
    if path.endswith("Ms"):
        rule += "; the unit is milliseconds"
    return invalid(path, f"is invalid: {rule[:1].lower()}{rule[1:]}")


@cache  # 0.9 ms for a task, and a batch can have a thousand invalid tasks
def _type_info(document_type: Any) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(document_type)


def _types_at(document_type: Any, path: str) -> list[Any]:
    """Return the types that msgspec allows at a path of a document (several for a union)."""
    types: list[Any] = [_type_info(document_type)]
    for name in filter(None, path.split(".")):
        fields = [field for type_ in types for field in getattr(type_, "fields", ())]
        field_types = [field.type for field in fields if field.encode_name == name]
        types = [member for type_ in field_types for member in getattr(type_, "types", (type_,))]
    return types


def _list_choices(type_: msgspec.inspect.Type) -> list[str]:
    """Return the values that an enum or a literal type allows; for other types, an empty list."""
    if isinstance(type_, msgspec.inspect.EnumType):
        return [str(member.value) for member in type_.cls]
    return [str(value) for value in getattr(type_, "values", ())]


def _join_path(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _to_json_types(match: re.Match[str]) -> str:
    return " or ".join(_JSON_TYPES.get(name, name) for name in match[1].split(" | "))
