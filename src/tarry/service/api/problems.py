"""Errors of the API: each becomes a response with problem details (RFC 9457).

The functions return the exception, so that the caller writes `raise problems.too_large(limit)`.
"""

from __future__ import annotations

import json
import re
from math import ceil
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.core.suggest import suggest
from tarry.errors import short_repr
from tarry.service.api import problem_types

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.errors import ConfigurationError
    from tarry.service.api.problem_types import ProblemType
    from tarry.wire.problem import Problem

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
    return ApiError(problem_types.INVALID.problem(detail, status, **members))


def from_configuration_error(field: str, error: ConfigurationError) -> ApiError:
    """Return the error for `field`, whose value was rejected with a ConfigurationError."""
    if error.has_value:
        return invalid(field, error.rule, error.value)
    return invalid(field, error.rule)


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
    return ApiError(problem_types.MALFORMED.problem(detail))


def empty_body() -> ApiError:
    """Return the error for a missing body."""
    return malformed("The body is empty. Send JSON.")


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
    return ApiError(problem_types.NOT_FOUND.problem(detail))


def conflict(problem_type: ProblemType, detail: str, **more: Any) -> ApiError:
    """Return the error for an operation that is not possible in the current state."""
    return ApiError(problem_type.problem(detail, **more))


def idempotency_key_reused() -> ApiError:
    """Return the error for an idempotency key that was used with a different task."""
    detail = (
        "idempotencyKey was already used with a different task. Resend the original task, or use "
        "a new key."
    )
    return ApiError(problem_types.KEY_REUSED.problem(detail, field="idempotencyKey"))


def malformed_key_header(detail: str) -> ApiError:
    """Return the error for an `Idempotency-Key` header that cannot be parsed."""
    problem = problem_types.INVALID.problem(detail, 400, field="Idempotency-Key")
    return ApiError(problem)


def too_large(max_bytes: int) -> ApiError:
    """Return the error for a body of more than `max_bytes`."""
    detail = f"The request may have at most {max_bytes} bytes. Use `bodyRef` for larger bodies."
    return ApiError(problem_types.TOO_LARGE.problem(detail), [(b"connection", b"close")])


def unsupported_media_type() -> ApiError:
    """Return the error for a content type other than JSON."""
    problem = problem_types.NOT_JSON.problem(problem_types.NOT_JSON.help)
    return ApiError(problem, [(b"accept", b"application/json")])


def unauthorized(detail: str) -> ApiError:
    """Return the error for a missing or invalid API key."""
    challenge = (b"www-authenticate", b'Bearer realm="tarry"')
    return ApiError(problem_types.KEY_NEEDED.problem(detail), [challenge])


def cross_site(origin: str) -> ApiError:
    """Return the error for a request that a web page of another origin sent."""
    detail = f"Requests from web pages of {origin} are not accepted."
    return ApiError(problem_types.CROSS_SITE.problem(detail))


def wrong_host(host: str) -> ApiError:
    """Return the error for a `Host` that does not belong to this service."""
    detail = (
        f"Requests to {host} are not accepted: without API keys, the host must be a loopback "
        "name. The operator can allow other names (allow_host)."
    )
    return ApiError(problem_types.WRONG_HOST.problem(detail))


def method_not_allowed(allowed: str) -> ApiError:
    """Return the error for a method that the path does not support."""
    problem = problem_types.METHOD_NOT_ALLOWED.problem(f"This path supports {allowed}.")
    return ApiError(problem, [(b"allow", allowed.encode())])


def too_many_requests(detail: str, retry_after_s: float) -> ApiError:
    """Return the error for a tenant that has reached a quota."""
    return ApiError(problem_types.QUOTA.problem(detail), [retry_after_header(retry_after_s)])


def unavailable(detail: str, retry_after_s: float = 1.0, **more: Any) -> ApiError:
    """Return the error (503) for a request that may succeed if it is sent again later."""
    problem = problem_types.UNAVAILABLE.problem(detail, **more)
    return ApiError(problem, [retry_after_header(retry_after_s)])


def internal_error() -> ApiError:
    """Return the error for a bug in the service."""
    return ApiError(problem_types.INTERNAL_ERROR.problem("The service failed; see its log."))


def retry_after_header(seconds: float) -> tuple[bytes, bytes]:
    """Return the `Retry-After` header: `seconds` rounded up, at least 1."""
    return b"retry-after", str(max(1, ceil(seconds))).encode()


def from_decode_error(error: Exception, document_type: type[msgspec.Struct]) -> ApiError:
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


def _types_at(document_type: type[msgspec.Struct], path: str) -> list[Any]:
    """Return the types that msgspec allows at a path of a document (several for a union)."""
    types: list[Any] = [msgspec.inspect.type_info(document_type)]
    for name in filter(None, path.split(".")):
        fields = [field for struct in types for field in getattr(struct, "fields", ())]
        field_types = [field.type for field in fields if field.encode_name == name]
        types = [member for union in field_types for member in getattr(union, "types", (union,))]
    return types


def _field_names_at(document_type: type[msgspec.Struct], path: str) -> list[str]:
    structs = _types_at(document_type, path)
    return [field.encode_name for struct in structs for field in getattr(struct, "fields", ())]


def _choices_at(document_type: type[msgspec.Struct], path: str) -> list[str]:
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
