"""One request and its answer, in plain ASGI: what every operation of the API shares."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec

from tarry.errors import ConfigurationError, Overloaded, StoreUnavailable
from tarry.service.api import problems
from tarry.service.api.problems import Refused
from tarry.wire.problem import MEDIA_TYPE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from tarry.wire.asgi import Receive, Scope, Send

Q = TypeVar("Q", bound=msgspec.Struct)

_logger = logging.getLogger("tarry.service")
_encode = msgspec.json.Encoder().encode
_MOST_QUERY = 8192
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_COMMON = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
_JSON = (b"content-type", b"application/json")


MOST_UNREAD = 256 << 20
"""Bytes of bodies that come in pieces and are not complete, of all requests together."""


class _Arriving:
    """Bodies of which a part is here: many that are slow would fill the memory."""

    size = 0


class Disconnected(Exception):
    """The client went away before its request had arrived."""


class Asked:
    """A request: who asks, and for what."""

    __slots__ = ("_receive", "fields", "params", "scope", "tenant")

    def __init__(self, scope: Scope, receive: Receive, fields: dict[bytes, bytes]) -> None:
        self.scope: Scope = scope
        self._receive = receive
        self.fields: dict[bytes, bytes] = fields
        """Its header fields; of one that comes more than once, the last line."""
        self.tenant: str = ""
        self.params: Mapping[str, str] = scope.get("path_params") or {}

    def lines(self, name: bytes) -> list[bytes]:
        """Return the values of all lines of a header field."""
        if name not in self.fields:
            return []
        return [value for field, value in self.scope["headers"] if field == name]

    async def json(self, limit: int) -> bytes:
        """Return the whole body, which must say that it is JSON, up to a limit."""
        kind = self.fields.get(b"content-type", b"")
        # Not even an absent type passes: pages of other sites can send that without being asked.
        if kind != b"application/json" and not _is_json(kind):
            raise problems.not_json()
        length = self.fields.get(b"content-length", b"")
        if length.isdigit() and float(length) > limit:  # int refuses more than 4,300 digits
            raise problems.too_large(limit)
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            body: bytes = message.get("body", b"")
            if len(body) > limit:
                raise problems.too_large(limit)
            return body
        chunks: list[bytes] = []
        size = 0
        try:
            while True:
                if message["type"] == "http.disconnect":
                    raise Disconnected
                chunk = message.get("body", b"")
                size += len(chunk)
                _Arriving.size += len(chunk)
                if size > limit:
                    raise problems.too_large(limit)
                if _Arriving.size > MOST_UNREAD:
                    raise problems.unavailable("Too many large requests arrive at the same time.")
                chunks.append(chunk)
                if not message.get("more_body"):
                    return b"".join(chunks)
                message = await self._receive()
        finally:
            _Arriving.size -= size

    async def document(self, decoder: msgspec.json.Decoder[Q], limit: int) -> Q:
        """Return the body as a form."""
        return decode(decoder, await self.json(limit))

    def query(self, form: type[Q]) -> Q:
        """Return the query as a form."""
        raw: bytes = self.scope.get("query_string", b"")
        if len(raw) > _MOST_QUERY:
            raise problems.invalid("query", f"The query may have {_MOST_QUERY} bytes.")
        try:
            pairs = parse_qsl(
                raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100
            )
        except ValueError:
            detail = "The query must be name=value pairs with UTF-8 in percent escapes."
            raise problems.invalid("query", detail, 400) from None
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
            raise problems.invalid(twice, f"{twice} must be given once.")
        try:
            made = msgspec.convert(found, form, strict=False)
        except msgspec.ValidationError as error:
            raise problems.misread(error, form) from None
        for name, attribute in zip(
            form.__struct_encode_fields__, form.__struct_fields__, strict=True
        ):
            if name in found and getattr(made, attribute) is None:  # it was the text "null"
                raise problems.invalid(name, f"{name} must have a value, or be left out.")
        return made


class Answer:
    """A response in full."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.status: int = status
        self.body: bytes = body
        self.headers: list[tuple[bytes, bytes]] = headers

    async def send(self, send: Send, *, bodiless: bool = False) -> None:
        """Send it; a HEAD request gets all but the body."""
        headers = [*self.headers, *_COMMON]
        if self.status != 204:  # noqa: PLR2004 - No Content
            headers.append((b"content-length", b"%d" % len(self.body)))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if bodiless else self.body})


class Stream(Protocol):
    """An answer without an end."""

    async def run(self, receive: Receive, send: Send) -> None:
        """Send until one side ends it."""
        ...


def told(status: int, value: object, *headers: tuple[bytes, bytes]) -> Answer:
    """Answer with JSON."""
    return Answer(status, _encode(value), [_JSON, *headers])


def empty(status: int = 204, *headers: tuple[bytes, bytes]) -> Answer:
    """Answer with a status alone."""
    return Answer(status, b"", list(headers))


def refusal(refused: Refused) -> Answer:
    """Answer with a problem."""
    kind = (b"content-type", MEDIA_TYPE.encode())
    return Answer(refused.problem.status, refused.problem.to_json(), [kind, *refused.headers])


def decode(decoder: msgspec.json.Decoder[Q], body: bytes | msgspec.Raw) -> Q:
    """Return a JSON document as a form, or refuse it by the name of its field."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not bytes(body).strip():
            raise problems.bodiless() from None
        raise problems.misread(error, decoder.type) from None


class Endpoint:
    """What stands behind one path: an ASGI application that knows its methods."""

    def __init__(
        self,
        handlers: dict[str, Callable[[Asked], Awaitable[Answer | Stream]]],
        tenant_of: Callable[[Asked], Awaitable[str]] | None,
        check_host: Callable[[dict[bytes, bytes]], None] | None = None,
    ) -> None:
        self._handlers = dict(handlers)
        if "GET" in handlers:
            self._handlers["HEAD"] = handlers["GET"]
        self._tenant_of = tenant_of
        self._check_host = check_host
        self._allowed = ", ".join(sorted({*self._handlers, "OPTIONS"}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Whatever goes wrong is an answer."""
        try:
            answer = await self._answer(scope, receive)
        except Disconnected:
            return
        except Refused as refused:
            answer = refusal(refused)
        except RecursionError:
            answer = refusal(problems.too_deep())
        except StoreUnavailable as error:
            _logger.info("%s %s: %s", scope["method"], scope["path"], error)
            detail = "The store is out of order. What was sent may have been kept: send it again."
            answer = refusal(problems.unavailable(detail))
        except Overloaded as error:
            answer = refusal(problems.unavailable(f"{error}.", error.retry_after))
        except Exception:
            _logger.exception("%s %s failed", scope["method"], scope["path"])
            answer = refusal(problems.broken())
        if isinstance(answer, Answer):
            await answer.send(send, bodiless=scope["method"] == "HEAD")
        else:
            await answer.run(receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Answer | Stream:
        method: str = scope["method"]
        handler = self._handlers.get(method)
        if handler is None:
            if method == "OPTIONS":
                return empty(204, (b"allow", self._allowed.encode()))
            raise problems.not_allowed(self._allowed)
        fields = dict(scope["headers"])
        if self._check_host is not None:
            self._check_host(fields)
        if b"origin" in fields and method not in _SAFE:
            _check_origin(fields)
        asked = Asked(scope, receive, fields)
        if self._tenant_of is not None:
            asked.tenant = await self._tenant_of(asked)
        return await handler(asked)


def _check_origin(fields: dict[bytes, bytes]) -> None:
    """Refuse what a page of another site asks a browser to send: here is no cookie, but no key
    either on loopback.
    """
    origin = fields[b"origin"]
    if origin.rpartition(b"://")[2] != fields.get(b"host"):
        raise problems.foreign(origin.decode("latin-1")[:100])


def _is_json(kind: bytes) -> bool:
    return kind.partition(b";")[0].strip().lower() == b"application/json"


def named(field: str, error: ConfigurationError) -> Refused:
    """Turn a rule of another part into a problem about a field."""
    return problems.invalid(field, f"{str(error).rstrip('.')}.")
