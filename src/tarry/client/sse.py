"""Parser for the service's event stream (server-sent events, section 9.2 of the HTML standard)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.client.errors import ServiceError
from tarry.wire.tasks import ServiceEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAM_READ_TIMEOUT_S = 60.0
"""A stream on which no byte arrives for this long counts as lost, because the service sends a
comment every 15 seconds."""
MAX_RECONNECT_DELAY_S = 1.0
"""Upper bound of the random delay before a lost stream is opened again."""

_MAX_EVENT_BYTES = 1 << 18
"""Many times the size of a real event. Bounds the memory that a broken stream can use."""

_decode_event = msgspec.json.Decoder(ServiceEvent).decode


class EventStreamParser:
    """Splits the bytes of one stream into events; chunks may end anywhere within an event."""

    def __init__(self) -> None:
        self._incomplete_line = b""
        self._data_lines: list[bytes] = []
        self._data_size = 0

    def feed(self, chunk: bytes) -> Iterator[ServiceEvent]:
        """Yield the events that this chunk completes."""
        text = self._incomplete_line + chunk
        # A CR at the end may be the first half of a CRLF, so it waits for the next chunk.
        trailing_cr = b"\r" if text.endswith(b"\r") else b""
        text = text.removesuffix(trailing_cr)
        lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._incomplete_line = lines.pop() + trailing_cr
        for line in lines:
            if line:
                self._add_line(line)
            elif self._data_lines:
                data = b"\n".join(self._data_lines)
                self._data_lines, self._data_size = [], 0
                yield _parse_event(data)
        if len(self._incomplete_line) + self._data_size > _MAX_EVENT_BYTES:
            msg = f"an event from the service has more than {_MAX_EVENT_BYTES} bytes"
            raise ServiceError(msg)

    def _add_line(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        # `event:` is ignored because the data repeats it, `id:` because streams cannot be resumed.
        if field == b"data":
            self._data_lines.append(value.removeprefix(b" "))
            self._data_size += len(value)


def _parse_event(data: bytes) -> ServiceEvent:
    try:
        return _decode_event(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"an event from the service cannot be parsed: {error}"
        raise ServiceError(msg) from error
