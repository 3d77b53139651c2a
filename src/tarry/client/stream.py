"""The service's live events, from the bytes of a stream (server-sent events, HTML 9.2). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.client.errors import ServiceError
from tarry.wire.tasks import EventNews

if TYPE_CHECKING:
    from collections.abc import Iterator

SILENCE = 60.0
"""Seconds without a byte after which a stream is lost: the service sends one every 15."""
PAUSE = 1.0
"""Seconds before a stream that was lost is opened again, at most."""

_LONGEST = 1 << 18
"""Bytes of one event: many times what one has."""


_event = msgspec.json.Decoder(EventNews).decode


class EventParser:
    """Takes the bytes of one stream as they come, and gives the events that are complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[EventNews]:
        """Return the events that end in these bytes."""
        text = self._rest + chunk
        # A CR at the end may be half of a CRLF.
        held = b"\r" if text.endswith(b"\r") else b""
        lines = text.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                data, self._data, self._size = b"\n".join(self._data), [], 0
                yield _decoded(data)
        if len(self._rest) + self._size > _LONGEST:
            msg = f"an event of the service has more than {_LONGEST} bytes"
            raise ServiceError(msg)

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        if field == b"data":  # the kind is in the data too, and streams do not go on from an id
            self._data.append(value.removeprefix(b" "))
            self._size += len(value)


def _decoded(data: bytes) -> EventNews:
    try:
        return _event(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"an event of the service cannot be read: {error}"
        raise ServiceError(msg) from error
