"""Private parts of uvicorn that `tarry.service.http` uses.

When a test here fails after an update of uvicorn, adapt `service/http/protocol.py`
or `server.py` before you raise the upper bound of uvicorn in pyproject.toml.
"""

from __future__ import annotations

import asyncio
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from tests.service.http.harness import GET, FakeTransport

METHODS = {
    # overridden or called method: its parameters after self
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "eof_received": [],
    "shutdown": [],
    "pause_writing": [],
    "resume_writing": [],
    "on_message_begin": [],
    "on_header": ["name", "value"],
    "on_headers_complete": [],
    "on_body": ["body"],
    "on_message_complete": [],
    "on_response_complete": [],
    "timeout_keep_alive_handler": [],
    "_unset_keepalive_if_required": [],
}
CONNECTION_ATTRIBUTES = [
    "client",
    "connections",
    "cycle",
    "expect_100_continue",
    "flow",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "scope",
    "server_state",
    "tasks",
    "timeout_keep_alive",
    "timeout_keep_alive_task",
    "transport",
    "url",
]
PARSER_METHODS = [
    "feed_data",
    "get_http_version",
    "get_method",
    "set_dangerous_leniencies",
    "should_keep_alive",
    "should_upgrade",
]
FLOW_ATTRIBUTES = ["read_paused", "resume_reading", "write_paused"]
CYCLE_ATTRIBUTES = [
    "body",
    "chunked_encoding",
    "disconnected",
    "expected_content_length",
    "keep_alive",
    "message_event",
    "more_body",
    "response_complete",
    "response_started",
    "send",
]
STATE_ATTRIBUTES = ["connections", "default_headers", "tasks", "total_requests"]
SERVER_METHODS = {"startup": ["sockets"], "shutdown": ["sockets"], "run": ["sockets"]}


async def never_respond(_scope: Any, _receive: Any, _send: Any) -> None:
    """Wait until the task is cancelled."""
    await asyncio.Event().wait()


def mismatch_message(owner: object, name: str) -> str:
    """Return the assertion message for a missing or changed attribute of uvicorn."""
    return (
        f"uvicorn {uvicorn.__version__} has no {owner}.{name} as expected: "
        "adapt tarry.service.http and the bound in pyproject.toml"
    )


def parameter_names(method: Any) -> list[str]:
    """Return the names of the parameters after self."""
    return list(inspect.signature(method).parameters)[1:]


@pytest.mark.parametrize("name", METHODS)
def test_protocol_method_has_the_expected_parameters(name: str) -> None:
    """Each method that the service overrides or calls exists with the expected parameters."""
    method = getattr(HttpToolsProtocol, name, None)
    assert method is not None, mismatch_message("HttpToolsProtocol", name)
    assert METHODS[name] == parameter_names(method), mismatch_message("HttpToolsProtocol", name)


@pytest.mark.parametrize("name", SERVER_METHODS)
def test_server_method_has_the_expected_parameters(name: str) -> None:
    """Each server method that the service overrides or calls has the expected parameters."""
    assert SERVER_METHODS[name] == parameter_names(getattr(uvicorn.Server, name)), mismatch_message(
        "Server", name
    )


async def test_used_attributes_exist() -> None:
    """Connection, parser, flow control, cycle and server state have the used attributes."""
    config = uvicorn.Config(never_respond, interface="asgi3", log_config=None)
    config.load()
    state = ServerState()
    connection: Any = HttpToolsProtocol(config, state, {})
    connection.connection_made(FakeTransport())
    parser = connection.parser
    connection.data_received(GET)

    for name in CONNECTION_ATTRIBUTES:
        assert hasattr(connection, name), mismatch_message("HttpToolsProtocol", name)
    for name in PARSER_METHODS:
        assert hasattr(parser, name), mismatch_message("HttpRequestParser", name)
    for name in FLOW_ATTRIBUTES:
        assert hasattr(connection.flow, name), mismatch_message("FlowControl", name)
    for name in CYCLE_ATTRIBUTES:
        assert hasattr(connection.cycle, name), mismatch_message("RequestResponseCycle", name)
    for name in STATE_ATTRIBUTES:
        assert hasattr(state, name), mismatch_message("ServerState", name)
    assert isinstance(connection.flow, FlowControl)
    assert (b"/x", [(b"host", b"h")]) == (connection.url, connection.headers)
    for task in tuple(state.tasks):
        task.cancel()


async def test_server_without_sockets_does_not_listen() -> None:
    """`startup([])` starts the application only; the server then adds its own listeners for TLS."""
    config = uvicorn.Config(never_respond, interface="asgi3", lifespan="off", log_config=None)
    config.load()
    server: Any = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup([])
    assert (True, []) == (server.started, server.servers), mismatch_message("Server", "startup")
    protocol = config.http_protocol_class(  # type: ignore[call-arg]
        config=config, server_state=server.server_state, app_state=server.lifespan.state
    )
    assert isinstance(protocol, asyncio.Protocol)


async def test_a_pipelined_request_is_queued_with_its_application() -> None:
    """`pipeline` contains (cycle, application) pairs; the next pair to serve is the last."""
    config = uvicorn.Config(never_respond, interface="asgi3", log_config=None)
    config.load()
    state = ServerState()
    connection: Any = HttpToolsProtocol(config, state, {})
    connection.connection_made(FakeTransport())
    connection.data_received(GET + GET.replace(b"/x", b"/2") + GET.replace(b"/x", b"/3"))

    paths = [cycle.scope["path"] for cycle, _app in connection.pipeline]
    assert ["/3", "/2"] == paths, mismatch_message("HttpToolsProtocol", "pipeline")
    for task in tuple(state.tasks):
        task.cancel()


def test_status_lines_have_the_expected_format() -> None:
    """`STATUS_LINE`, which the fast path writes, maps a status to a complete line."""
    assert b"HTTP/1.1 201 Created\r\n" == httptools_impl.STATUS_LINE[201], mismatch_message(
        "httptools_impl", "STATUS_LINE"
    )


def test_uvicorn_has_an_upper_bound() -> None:
    """The installed version is below the bound in pyproject.toml."""
    pyproject = tomllib.loads(Path("pyproject.toml").read_text())
    service = pyproject["project"]["optional-dependencies"]["service"]
    requirement = next(line for line in service if line.startswith("uvicorn"))
    bound = requirement.partition("<")[2]
    assert bound, "uvicorn needs an upper bound in pyproject.toml"
    assert parse_version(uvicorn.__version__) < parse_version(bound)


def parse_version(text: str) -> tuple[int, ...]:
    """Return the parts of a version as integers."""
    return tuple(map(int, text.split(".")))
