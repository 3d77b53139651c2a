"""What the API refuses, and how: problem details that name the field and the rule."""

from __future__ import annotations

import re
from math import ceil
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.wire.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

_AT = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_TYPES = re.compile(r"`([a-z| ]+)`")
_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


class Refused(Exception):
    """A request that gets a problem for an answer; nothing was stored."""

    def __init__(self, problem: Problem, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(problem.detail)
        self.problem: Problem = problem
        self.headers: list[tuple[bytes, bytes]] = list(headers)


def invalid(field: str, detail: str, status: int = 422) -> Refused:
    """A field breaks a rule; `field` is its path in the JSON, or the name of a parameter."""
    return Refused(Problem(status, "Invalid request", detail, more={"field": field}))


def unreadable(detail: str) -> Refused:
    """The body is not JSON."""
    return Refused(Problem(400, "Malformed JSON", detail))


def too_deep() -> Refused:
    """The JSON has more levels than can be followed, here or where it is looked at later."""
    return unreadable("The JSON is nested too deeply.")


def missing(what: str) -> Refused:
    """There is no such thing, or it is another tenant's, which is the same."""
    return Refused(Problem(404, "Not found", f"There is no {what}."))


def conflict(title: str, detail: str, **more: Any) -> Refused:
    """It is there, but not in a state for this."""
    return Refused(Problem(409, title, detail, more=more))


def reused_key() -> Refused:
    """The idempotency key came with something else before."""
    detail = (
        "idempotencyKey belongs to a task with other content. Send a new key with a new task, and "
        "what was sent first with a retry."
    )
    return Refused(
        Problem(422, "idempotencyKey is already used", detail, more={"field": "idempotencyKey"})
    )


def too_large(limit: int) -> Refused:
    """The body is longer than it may be."""
    detail = f"The request may have {limit} bytes. Larger bodies go by `bodyRef`."
    return Refused(Problem(413, "Content is too large", detail), [(b"connection", b"close")])


def not_json() -> Refused:
    """The content type is another."""
    detail = "Send JSON, with the header `Content-Type: application/json`."
    return Refused(
        Problem(415, "Unsupported media type", detail), [(b"accept", b"application/json")]
    )


def unauthorized(detail: str) -> Refused:
    """There is no key, or not a valid one."""
    challenge = (b"www-authenticate", b'Bearer realm="tarry"')
    return Refused(Problem(401, "API key needed", detail), [challenge])


def foreign(origin: str) -> Refused:
    """A page of another site asks through somebody's browser."""
    detail = f"Requests from pages of {origin} are not accepted."
    return Refused(Problem(403, "Cross-site request", detail))


def not_allowed(allowed: str) -> Refused:
    """The path has other methods."""
    problem = Problem(405, "Method not allowed", f"This path takes {allowed}.")
    return Refused(problem, [(b"allow", allowed.encode())])


def too_many(detail: str, seconds: float) -> Refused:
    """A quota of the tenant is used up."""
    return Refused(Problem(429, "Too many requests", detail), [retry_after(seconds)])


def unavailable(detail: str, seconds: float = 1.0, **more: Any) -> Refused:
    """The service cannot do it now; the same request may do better later."""
    problem = Problem(503, "Service unavailable", detail, more=more)
    return Refused(problem, [retry_after(seconds)])


def broken() -> Refused:
    """A mistake of ours."""
    return Refused(Problem(500, "Internal error", "The service failed; its log says why."))


def retry_after(seconds: float) -> tuple[bytes, bytes]:
    """Return the header, in whole seconds, at least one."""
    return b"retry-after", str(max(1, ceil(seconds))).encode()


def misread(error: Exception, form: type[msgspec.Struct]) -> Refused:
    """Turn what a decoder said about a document into a problem that names the field."""
    if isinstance(error, RecursionError):
        return too_deep()
    if isinstance(error, UnicodeDecodeError):
        return unreadable("The JSON is not UTF-8.")
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return unreadable(f"{text}.")
    at = _AT.search(text)
    where = "" if at is None else at[1]
    said = text if at is None else text[: at.start()]
    if unknown := _UNKNOWN.fullmatch(said):
        field = _within(where, unknown[1])
        # Of a nested form the fields are not at hand, and its documentation is.
        known = "" if where else f" The fields are {', '.join(form.__struct_encode_fields__)}."
        return invalid(field, f"There is no field {field}.{known}")
    if required := _MISSING.fullmatch(said):
        field = _within(where, required[1])
        return invalid(field, f"{field} is missing.")
    rule = _TYPES.sub(_in_json, said)
    rule = rule[:1].lower() + rule[1:]
    return invalid(where, f"{where or 'The document'} is invalid: {rule}.")


def _within(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _in_json(match: re.Match[str]) -> str:
    return " or ".join(_NAMES.get(name, name) for name in match[1].split(" | "))
