"""What the API refuses, and how: problem details that name the field and the rule."""

from __future__ import annotations

import re
from math import ceil
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.core.suggest import suggest
from tarry.service.api import problem_types

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.errors import ConfigurationError
    from tarry.service.api.problem_types import ProblemType
    from tarry.wire.problem import Problem

_AT = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_TYPES = re.compile(r"`([a-z| ]+)`")
_CUT_OFF = r"The JSON ends too soon, or has half of a pair of \u escapes (\ud83d alone)."
_MOST_OF_NAME = 100
_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


class ApiError(Exception):
    """A request that gets a problem for an answer; nothing was stored."""

    def __init__(self, problem: Problem, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(problem.detail)
        self.problem: Problem = problem
        self.headers: list[tuple[bytes, bytes]] = list(headers)


def invalid(field: str, detail: str, status: int = 422) -> ApiError:
    """A field breaks a rule; `field` is its path in the JSON, or the name of a parameter."""
    return ApiError(problem_types.INVALID.problem(detail, status, field=field))


def from_configuration_error(field: str, error: ConfigurationError) -> ApiError:
    """Turn a rule of another part into a problem about a field."""
    return invalid(field, f"{str(error).rstrip('.')}.")


def unknown_field(where: str, name: str, fields: Iterable[str]) -> ApiError:
    """There is no such field there; say which was probably meant, or else which there are."""
    name, fields = name[:_MOST_OF_NAME], list(fields)
    field = _within(where, name)
    said = f"There is no field {field}."
    if close := suggest(name, fields):
        said += f" Did you mean {close}?"
    elif fields:
        said += f" The fields are {', '.join(fields)}."
    return invalid(field, said)


def malformed(detail: str) -> ApiError:
    """The body is not JSON."""
    return ApiError(problem_types.MALFORMED.problem(detail))


def empty_body() -> ApiError:
    """There is no body where one is needed."""
    return malformed("The body is empty: send JSON.")


def unexpected_body(query: Sequence[str]) -> ApiError:
    """There is a body where none is read; `query` are the names that go into the query."""
    instead = f" Its query takes {', '.join(query)}." if query else ""
    return invalid("body", f"This takes no body.{instead}")


def nested_too_deeply() -> ApiError:
    """The JSON has more levels than can be followed, here or where it is looked at later."""
    return malformed("The JSON is nested too deeply.")


def no_such(what: str) -> ApiError:
    """There is no such thing, or it is another tenant's, which is the same."""
    return not_found(f"There is no such {what}.")


def not_found(detail: str) -> ApiError:
    """There is something, but not this of it."""
    return ApiError(problem_types.NOT_FOUND.problem(detail))


def conflict(kind: ProblemType, detail: str, **more: Any) -> ApiError:
    """It is there, but not in a state for this."""
    return ApiError(kind.problem(detail, **more))


def idempotency_key_reused() -> ApiError:
    """The idempotency key came with something else before."""
    detail = (
        "idempotencyKey belongs to a task with other content. Send a new key with a new task, and "
        "what was sent first with a retry."
    )
    return ApiError(problem_types.KEY_REUSED.problem(detail, field="idempotencyKey"))


def too_large(limit: int) -> ApiError:
    """The body is longer than it may be."""
    detail = f"The request may have {limit} bytes. Larger bodies go by `bodyRef`."
    return ApiError(problem_types.TOO_LARGE.problem(detail), [(b"connection", b"close")])


def unsupported_media_type() -> ApiError:
    """The content type is another."""
    return ApiError(
        problem_types.NOT_JSON.problem(problem_types.NOT_JSON.help),
        [(b"accept", b"application/json")],
    )


def unauthorized(detail: str) -> ApiError:
    """There is no key, or not a valid one."""
    challenge = (b"www-authenticate", b'Bearer realm="tarry"')
    return ApiError(problem_types.KEY_NEEDED.problem(detail), [challenge])


def cross_site(origin: str) -> ApiError:
    """A page of another site asks through somebody's browser."""
    return ApiError(
        problem_types.CROSS_SITE.problem(f"Requests from pages of {origin} are not accepted.")
    )


def wrong_host(host: str) -> ApiError:
    """The name that a request was sent to is none of this service's."""
    detail = (
        f"Requests to {host} are not served: without API keys only those to loopback are. "
        "The operator can allow the name (allow_host)."
    )
    return ApiError(problem_types.HOST.problem(detail))


def method_not_allowed(allowed: str) -> ApiError:
    """The path has other methods."""
    problem = problem_types.NOT_ALLOWED.problem(f"This path takes {allowed}.")
    return ApiError(problem, [(b"allow", allowed.encode())])


def too_many_requests(detail: str, seconds: float) -> ApiError:
    """A quota of the tenant is used up."""
    return ApiError(problem_types.QUOTA.problem(detail), [retry_after_header(seconds)])


def unavailable(detail: str, seconds: float = 1.0, **more: Any) -> ApiError:
    """The service cannot do it now; the same request may do better later."""
    return ApiError(
        problem_types.UNAVAILABLE.problem(detail, **more), [retry_after_header(seconds)]
    )


def internal_error() -> ApiError:
    """A mistake of ours."""
    return ApiError(problem_types.BROKEN.problem("The service failed; its log says why."))


def retry_after_header(seconds: float) -> tuple[bytes, bytes]:
    """Return the header, in whole seconds, at least one."""
    return b"retry-after", str(max(1, ceil(seconds))).encode()


def from_decode_error(error: Exception, form: type[msgspec.Struct]) -> ApiError:
    """Turn what a decoder said about a document into a problem that names the field."""
    if isinstance(error, RecursionError):
        return nested_too_deeply()
    if isinstance(error, UnicodeDecodeError):
        return malformed("The JSON is not UTF-8.")
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return malformed(_CUT_OFF if text == "Input data was truncated" else f"{text}.")
    at = _AT.search(text)
    where = "" if at is None else at[1].replace("[...]", "")
    said = text if at is None else text[: at.start()]
    if unknown := _UNKNOWN.fullmatch(said):
        return unknown_field(where, unknown[1], _fields_at(form, where))
    if required := _MISSING.fullmatch(said):
        field = _within(where, required[1])
        return invalid(field, f"{field} is missing.")
    if values := _values_at(form, where):
        return invalid(where, f"{where} must be {' or '.join(values)}.")
    rule = _TYPES.sub(_in_json, said)
    rule = rule[:1].lower() + rule[1:]
    return invalid(where, f"{where or 'The document'} is invalid: {rule}.")


def _types_at(form: type[msgspec.Struct], where: str) -> list[Any]:
    """Return the types that stand at a path in a form."""
    found: list[Any] = [msgspec.inspect.type_info(form)]
    for name in filter(None, where.split(".")):
        fields = [field for one in found for field in getattr(one, "fields", ())]
        types = [field.type for field in fields if field.encode_name == name]
        found = [each for one in types for each in getattr(one, "types", (one,))]
    return found


def _fields_at(form: type[msgspec.Struct], where: str) -> list[str]:
    found = _types_at(form, where)
    return [field.encode_name for one in found for field in getattr(one, "fields", ())]


def _values_at(form: type[msgspec.Struct], where: str) -> list[str]:
    return [str(value) for one in _types_at(form, where) for value in getattr(one, "values", ())]


def _within(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _in_json(match: re.Match[str]) -> str:
    return " or ".join(_NAMES.get(name, name) for name in match[1].split(" | "))
