"""One request and its answer, in plain ASGI: what every operation of the API shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from tarry.service.api import problems
from tarry.wire.tasks import MOST_IN_PAGE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.wire.asgi import Receive, Scope

Q = TypeVar("Q", bound=msgspec.Struct)

_MOST_QUERY = 8192
_READING = frozenset({"GET", "HEAD"})

MAX_PARTIAL_BODY_BYTES = 256 << 20
"""Bytes of bodies that come in pieces and are not complete, of all requests together."""


class _Arriving:
    """Bodies of which a part is here: many that are slow would fill the memory."""

    size = 0


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing may be asked."""


class PageQuery(
    msgspec.Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True
):
    """Which part of a list."""

    limit: Annotated[int, Meta(ge=1, le=MOST_IN_PAGE)] = 100
    cursor: Annotated[str, Meta(max_length=1024)] | None = None


class Disconnected(Exception):
    """The client went away before its request had arrived."""


class ApiRequest:
    """A request: who asks, and for what."""

    __slots__ = ("_receive", "fields", "params", "scope", "tenant", "whole")

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        fields: dict[bytes, bytes],
        whole: bytes | None = None,
    ) -> None:
        self.scope: Scope = scope
        self._receive = receive
        self.whole: bytes | None = whole
        """Its body, where it arrived together with its head."""
        self.fields: dict[bytes, bytes] = fields
        """Its header fields; of one that comes more than once, the last line."""
        self.tenant: str = ""
        self.params: Mapping[str, str] = scope.get("path_params") or {}

    def lines(self, name: bytes) -> list[bytes]:
        """Return the values of all lines of a header field."""
        if name not in self.fields:
            return []
        return [value for field, value in self.scope["headers"] if field == name]

    def check_json(self, limit: int) -> None:
        """Refuse a body that does not say that it is JSON, or is larger than a limit.

        What goes by its body does not go by a query: one that is there was meant to change it.
        """
        if self.scope.get("query_string"):
            self._parsed(NoQuery)
        kind = self.fields.get(b"content-type", b"")
        # Not even an absent type passes: pages of other sites can send that without being asked.
        if kind != b"application/json" and not _is_json(kind):
            raise problems.unsupported_media_type()
        if self.whole is None:
            length = self.fields.get(b"content-length", b"")
            is_long = length.isdigit() and float(length) > limit  # int refuses 4,300 digits
        else:
            is_long = len(self.whole) > limit
        if is_long:
            raise problems.too_large(limit)

    async def json(self, limit: int) -> bytes:
        """Return the whole body, which must say that it is JSON, up to a limit."""
        self.check_json(limit)
        if self.whole is not None:
            return self.whole
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
                if _Arriving.size > MAX_PARTIAL_BODY_BYTES:
                    raise problems.unavailable("Too many large requests arrive at the same time.")
                chunks.append(chunk)
                if not message.get("more_body"):
                    return b"".join(chunks)
                message = await self._receive()
        finally:
            _Arriving.size -= size

    async def document(self, decoder: msgspec.json.Decoder[Q], limit: int) -> Q:
        """Return the body as a form."""
        return decode_json(decoder, await self.json(limit))

    def query(self, form: type[Q]) -> Q:
        """Return the query of a request that goes by it, as a form.

        A body was meant to change what is done, and is refused where something is done.
        """
        fields = self.fields
        has_body = fields.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in fields
        if has_body and self.scope["method"] not in _READING:
            raise problems.unexpected_body(form.__struct_encode_fields__)
        return self._parsed(form)

    def _parsed(self, form: type[Q]) -> Q:
        raw: bytes = self.scope.get("query_string", b"")
        if len(raw) > _MOST_QUERY:
            raise problems.invalid("query", f"The query may have {_MOST_QUERY} bytes.")
        try:
            pairs = parse_qsl(
                raw.decode("ascii"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=100,
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
            raise problems.from_decode_error(error, form) from None
        for name, attribute in zip(
            form.__struct_encode_fields__, form.__struct_fields__, strict=True
        ):
            if name in found and getattr(made, attribute) is None:  # it was the text "null"
                raise problems.invalid(name, f"{name} must have a value, or be left out.")
        return made


def decode_json(decoder: msgspec.json.Decoder[Q], body: bytes | msgspec.Raw) -> Q:
    """Return a JSON document as a form, or refuse it by the name of its field."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not bytes(body).strip():
            raise problems.empty_body() from None
        raise problems.from_decode_error(error, decoder.type) from None


def _is_json(kind: bytes) -> bool:
    return kind.partition(b";")[0].strip().lower() == b"application/json"
