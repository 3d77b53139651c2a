"""Log lines as JSON objects."""

from __future__ import annotations

import logging

import msgspec

_encode = msgspec.json.Encoder(enc_hook=str).encode
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """Formats a record with its `extra` attributes as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line of a record."""
        line: dict[str, object] = {
            "at": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {
            name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _encode(line).decode()
