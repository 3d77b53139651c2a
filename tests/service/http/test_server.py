"""The server process and its JSON logs. `tests/cli/test_serve.py` runs a complete server."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys

from tarry.service.http.server import (
    _SEND_BUFFER_BYTES,
    JsonFormatter,
    TextFormatter,
    _limit_send_buffer,
)


def make_record(**extra: object) -> logging.LogRecord:
    """Return a log record with `extra` attributes."""
    values = {"name": "tarry.service", "levelname": "WARNING", "msg": "parked %s", "args": ("a",)}
    return logging.makeLogRecord({**values, "created": 1.5, **extra})


def test_record_is_one_json_line() -> None:
    """A record is formatted as JSON with epoch milliseconds and its extra attributes."""
    line = JsonFormatter().format(make_record(lane="https:a:443", cause=ValueError("no")))

    assert "\n" not in line
    assert {
        "at": 1500,
        "level": "warning",
        "logger": "tarry.service",
        "pid": os.getpid(),
        "message": "parked a",
        "lane": "https:a:443",
        "cause": "no",
    } == json.loads(line)


def test_exception_is_a_field() -> None:
    """The traceback is part of the JSON line."""
    try:
        raise ValueError("broken")
    except ValueError:
        line = JsonFormatter().format(make_record(exc_info=sys.exc_info()))

    assert json.loads(line)["error"].endswith("ValueError: broken")


def test_text_lines_cannot_be_forged() -> None:
    """Line breaks, escape sequences and invisible characters of a client are escaped."""
    path = "/x\n2026-11-19 00:00:00,000 ERROR FORGED\r\x1b[31m\u202e\u2028\udc80\x85 \xe9"
    record = make_record()
    record.msg, record.args = "store unavailable, request=%s", (path,)
    formatter = TextFormatter("%(levelname)s %(message)s")
    expected = (
        "INFO store unavailable, request=/x\\n2026-11-19 00:00:00,000 ERROR FORGED\\r\\x1b[31m"
        "\\u202e\\u2028\\udc80\\x85 \xe9"
    )
    assert expected == formatter.format(record).replace(record.levelname, "INFO")
    try:
        raise ValueError(path)
    except ValueError:
        record = make_record(exc_info=sys.exc_info())
    first, *lines = formatter.format(record).split("\n")
    assert first.startswith(record.levelname)
    assert lines
    assert all(line.startswith("  ") for line in lines)
    assert "\x1b" not in "".join(lines)


def test_accepted_connections_have_a_small_send_buffer() -> None:
    """The kernel does not buffer a whole page for a client that does not read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _limit_send_buffer(listener)
        with (
            socket.create_connection(listener.getsockname()),
            listener.accept()[0] as connection,
        ):
            size = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert _SEND_BUFFER_BYTES <= size <= 2 * _SEND_BUFFER_BYTES
