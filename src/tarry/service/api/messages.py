"""Requests and responses of the API, and the decoding of JSON bodies and queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from tarry.service.api import problems
from tarry.service.tenant_shares import TenantShares
from tarry.wire.http import PROBLEM_MEDIA_TYPE
from tarry.wire.tasks import MAX_PAGE_SIZE

if TYPE_CHECKING:
    from asyncio import Task
    from collections.abc import Awaitable, Callable, Generator, Mapping

    from tarry.wire.http import Receive, Scope, Send

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

MAX_BUFFERED_BODY_BYTES = 256 << 20
"""Limit for all incomplete request bodies; see `TenantShares`. Many slow clients could otherwise
use up the memory, or those of one tenant could keep other tenants from sending large bodies."""

IS_ABANDONED = "tarry.is_abandoned"
"""The key of the function in an ASGI scope that returns whether the client has disconnected."""
HEADER_FIELDS = "tarry.header_fields"
"""The optional key in an ASGI scope for the headers as a dict, see `ApiRequest.headers`."""
_MAX_QUERY_BYTES = 8192
_MAX_QUERY_FIELDS = 100
_READ_METHODS = frozenset({"GET", "HEAD"})
_encode = msgspec.json.Encoder().encode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_COMMON_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
_COMMON_HEADER_LINES = b"".join([b"%b: %b\r\n" % header for header in _COMMON_HEADERS])
_JSON_CONTENT_TYPE = (b"content-type", b"application/json")
_PROBLEM_CONTENT_TYPE = (b"content-type", PROBLEM_MEDIA_TYPE.encode())
_NO_CONTENT = 204
_MAX_BODY_PART_BYTES = 65_536
"""A larger body is sent in parts. Each part waits until the client has read most of the previous
parts. uvicorn would otherwise copy the whole body to the write buffer of the connection."""


PageLimit: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)]
PageCursor: TypeAlias = Annotated[str, Meta(max_length=1024)]


_buffered_body_bytes = TenantShares(MAX_BUFFERED_BODY_BYTES)  # of all requests of this process


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of an operation that has no parameters."""


class PageQuery(
    msgspec.Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True
):
    """The page of a list to return."""

    limit: PageLimit = 100
    cursor: PageCursor | None = None


class Disconnected(Exception):
    """The client closed the connection before its request had arrived completely."""


class Change(NamedTuple):
    """A change that a request has made, for the log of operators' actions."""

    target: str | Mapping[str, Any]
    """The id or the name of the changed object, or the filter that matches the changed objects."""
    before: Mapping[str, Any] | None
    """The values that have changed; None: the object did not exist."""
    after: Mapping[str, Any] | None


class ApiRequest(msgspec.Struct, eq=False):
    """One request, with the tenant that sent it."""

    scope: Scope
    receive: Receive
    headers: dict[bytes, bytes]
    """Values by lower-case name. A repeated header has only its last value here."""
    body: bytes | None = None
    """The complete body if it arrived together with the headers, else None."""
    tenant: str = ""
    changes: list[Change] = []
    """What the request has changed so far, see `report_change`."""

    def report_change(
        self,
        target: str | Mapping[str, Any],
        before: Mapping[str, Any] | None,
        after: Mapping[str, Any] | None,
    ) -> None:
        """Report a change to the log of operators' actions."""
        self.changes.append(Change(target, before, after))

    @property
    def is_abandoned(self) -> bool:
        """Whether the client has disconnected, or has closed the sending half of its connection."""
        return IS_ABANDONED in self.scope and self.scope[IS_ABANDONED]()

    def path_parameter(self, name: str) -> str:
        """Return a parameter of the path, such as `taskId`."""
        return str(self.scope["path_params"][name])

    def header_values(self, name: bytes) -> list[bytes]:
        """Return all values of a header that may be repeated."""
        return [value for header, value in self.scope["headers"] if header == name]

    def check_json_body(self, max_bytes: int) -> None:
        """Raise ApiError if there is a query, or the body is too large or not declared as JSON."""
        if self.scope.get("query_string"):
            self.parse_query_string(NoQuery)
        self.check_declared_json(max_bytes)

    def check_declared_json(self, max_bytes: int) -> None:
        """Raise ApiError if the body is too large or not declared as JSON."""
        content_type = self.headers.get(b"content-type", b"")
        # A missing content type is rejected too, because a web page of another site could send such
        # a request without a CORS preflight.
        if content_type != b"application/json":
            media_type = content_type.partition(b";")[0].strip().lower()
            if media_type != b"application/json":
                raise problems.NOT_JSON.error(problems.NOT_JSON.help)
        if self.body is None:
            length = self.headers.get(b"content-length", b"")
            # float, because int() raises ValueError above 4,300 digits
            is_too_large = length.isdigit() and float(length) > max_bytes
        else:
            is_too_large = len(self.body) > max_bytes
        if is_too_large:
            raise problems.too_large(max_bytes)

    async def read_body(self, max_bytes: int) -> bytes:
        """Wait for the complete JSON body, and return it without decoding it."""
        self.check_json_body(max_bytes)
        return await self.read_any_body(max_bytes)

    async def read_body_and_query(self, max_bytes: int, query_type: type[S]) -> tuple[bytes, S]:
        """Like `read_body`, for an operation that also has query parameters."""
        query = self.parse_query_string(query_type)
        self.check_declared_json(max_bytes)
        return await self.read_any_body(max_bytes), query

    async def read_any_body(self, max_bytes: int) -> bytes:
        """Wait for the complete body, whatever its media type is, and return it."""
        if self.body is not None:
            return self.body
        chunks: list[bytes] = []
        size = 0
        try:
            while True:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                chunk: bytes = message.get("body", b"")
                size += len(chunk)
                if size > max_bytes:
                    raise problems.too_large(max_bytes)
                if not message.get("more_body"):
                    return b"".join((*chunks, chunk)) if chunks else chunk
                if not _buffered_body_bytes.is_available(self.tenant):
                    raise problems.unavailable("Too many large requests arrive at the same time.")
                chunks.append(chunk)
                _buffered_body_bytes.acquire(self.tenant, len(chunk))
        finally:
            if chunks:
                _buffered_body_bytes.release(self.tenant, sum(map(len, chunks)))

    def parse_query(self, query_type: type[S]) -> S:
        """Return the query parameters of a request, which must not have a body."""
        headers = self.headers
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        # With GET and HEAD a body is ignored, because some clients send one.
        if has_body and self.scope["method"] not in _READ_METHODS:
            names = ", ".join(query_type.__struct_encode_fields__)
            rule = f"must be empty: use the query parameters {names}" if names else "must be empty"
            raise problems.invalid("body", rule)
        return self.parse_query_string(query_type)

    def parse_query_string(self, query_type: type[S]) -> S:
        """Return the query parameters of a request that may also have a body."""
        raw: bytes = self.scope.get("query_string", b"")
        if len(raw) > _MAX_QUERY_BYTES:
            raise problems.invalid("query", f"must have at most {_MAX_QUERY_BYTES} bytes")
        try:
            text, limit = raw.decode("ascii"), _MAX_QUERY_FIELDS
            pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=limit)
        except ValueError:
            rule = "must be name=value pairs, percent-encoded in UTF-8"
            raise problems.invalid("query", rule, status=400) from None
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise problems.invalid(repeated, "must be given only once")
        try:
            query = msgspec.convert(values, query_type, strict=False)
        except msgspec.ValidationError as error:
            raise problems.from_decode_error(error, query_type) from None
        for field in msgspec.structs.fields(query_type):
            name = field.encode_name
            # With strict=False, msgspec converts the text "null" to None.
            if name in values and getattr(query, field.name) is None:
                raise problems.invalid(name, "must have a value or be omitted")
        return query


class ApiResponse(msgspec.Struct, eq=False):
    """A complete response: status, headers and body."""

    status: int
    body: bytes
    headers: list[tuple[bytes, bytes]]

    def encode_http1(self, more_lines: bytes) -> bytes:
        """Return the HTTP/1.1 response without its status line.

        `more_lines` are the encoded lines of headers to add, see `encode_header_lines`.
        """
        lines, body = encode_header_lines(self.headers), self.body
        parts = (more_lines, lines, _COMMON_HEADER_LINES, len(body), body)
        return b"%b%b%bcontent-length: %d\r\n\r\n%b" % parts

    async def send(self, scope: Scope, send: Send) -> None:
        """Send the response through ASGI. The response to a HEAD request has no body."""
        headers = [*self.headers, *_COMMON_HEADERS]
        if self.status != _NO_CONTENT:
            headers.append((b"content-length", b"%d" % len(self.body)))
        body = b"" if scope["method"] == "HEAD" else self.body
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        begin = 0
        while len(body) - begin > _MAX_BODY_PART_BYTES:
            part = body[begin : begin + _MAX_BODY_PART_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})
            begin += _MAX_BODY_PART_BYTES
        await send({"type": "http.response.body", "body": body[begin:]})


class PendingResponse(msgspec.Struct, eq=False):
    """A response that is not ready yet: `build_response` builds it when `result` is available.

    For `POST /retry-tasks`, `result` is a future: for speed, `Endpoint.handle_buffered` adds a
    callback to it, and starts no asyncio task. Other callers await the PendingResponse.
    """

    result: Awaitable[Any]
    build_response: Callable[[Any], ApiResponse]

    def __await__(self) -> Generator[Any, Any, ApiResponse]:
        return self.build_response((yield from self.result.__await__()))


BufferedRequestHandler: TypeAlias = (
    "Callable[[Scope, bytes, Callable[[ApiResponse], None]], Task[Any] | None]"
)
"""`Endpoint.handle_buffered`. Arguments: scope, complete body, callback for the response."""


class ResponseStream(Protocol):
    """A response whose body is sent in parts, without a known length."""

    async def run(self, receive: Receive, send: Send) -> None:
        """Send the response; return when the client or the service ends it."""
        ...


def decode_json(
    decoder: msgspec.json.Decoder[T],
    body: bytes | msgspec.Raw,
    document_type: type[object] | None = None,
) -> T:
    """Return the decoded JSON, or raise an ApiError that names the invalid field.

    The error lists valid fields or values of `document_type` (by default, the decoder's type).
    """
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            return decoder.decode(_write_whole_numbers_as_integers(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not bytes(body).strip():
            raise problems.MALFORMED.error("The body is empty. Send JSON.") from None
        raise problems.from_decode_error(error, document_type or decoder.type) from None


def _write_whole_numbers_as_integers(body: bytes | msgspec.Raw) -> bytes:
    """Replace numbers such as 5000.0 and 5e3: integers in JSON Schema, but floats in msgspec.

    The field `body` of a task stays as it is.
    """
    return _encode(
        {
            name: value if name == "body" else _to_integers(msgspec.json.decode(value))
            for name, value in _decode_fields(body).items()
        }
    )


def _to_integers(value: Any) -> Any:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {name: _to_integers(field) for name, field in fields.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def encode_header_lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return headers as HTTP/1.1 lines; raise ValueError if a header contains a line break."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    # A line break in a header would inject another header.
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
        raise ValueError(f"a response header contains a line break: {lines!r}")
    return lines


def json_response(status: int, document: object, *headers: tuple[bytes, bytes]) -> ApiResponse:
    """Return a response whose body is `document` as JSON."""
    return ApiResponse(status, _encode(document), [_JSON_CONTENT_TYPE, *headers])


def problem_response(error: problems.ApiError) -> ApiResponse:
    """Return the response for an error: its problem details (RFC 9457) and headers."""
    problem = error.problem
    return ApiResponse(problem.status, problem.to_json(), [_PROBLEM_CONTENT_TYPE, *error.headers])
