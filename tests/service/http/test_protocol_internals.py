"""The parts of uvicorn that `tarry.service.http` relies on, although they are not a public API.

When a test here fails after an update of uvicorn: adapt `service/http/protocol.py`
or `server.py`, and only then raise the upper bound of uvicorn in pyproject.toml.
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
    "data_received": ["data"],
    "shutdown": [],
    "on_message_begin": [],
    "on_headers_complete": [],
    "on_body": ["body"],
    "on_message_complete": [],
    "on_response_complete": [],
    "send_400_response": ["msg"],
    "timeout_keep_alive_handler": [],
    "_unset_keepalive_if_required": [],
}
CONNECTION_ATTRIBUTES = [
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
PARSER_METHODS = ["get_http_version", "get_method", "should_keep_alive", "should_upgrade"]
FLOW_ATTRIBUTES = ["read_paused", "resume_reading", "write_paused"]
CYCLE_ATTRIBUTES = [
    "body",
    "disconnected",
    "keep_alive",
    "message_event",
    "more_body",
    "response_complete",
    "response_started",
]
STATE_ATTRIBUTES = ["connections", "default_headers", "tasks", "total_requests"]
SERVER_METHODS = {"startup": ["sockets"], "shutdown": ["sockets"], "run": ["sockets"]}


async def serve_nothing(_scope: Any, _receive: Any, _send: Any) -> None:
    """Return without a response."""
    await asyncio.Event().wait()


def moved(owner: object, name: str) -> str:
    """Return the message of a failure."""
    return (
        f"uvicorn {uvicorn.__version__} has no {owner}.{name} as expected: "
        "adapt tarry.service.http and the bound in pyproject.toml"
    )


def parameters(method: Any) -> list[str]:
    """Return the names of the parameters after self."""
    return list(inspect.signature(method).parameters)[1:]


@pytest.mark.parametrize("name", METHODS)
def test_protocol_method(name: str) -> None:
    """Each method that is overridden or called exists, with the same parameters."""
    method = getattr(HttpToolsProtocol, name, None)
    assert method is not None, moved("HttpToolsProtocol", name)
    assert METHODS[name] == parameters(method), moved("HttpToolsProtocol", name)


@pytest.mark.parametrize("name", SERVER_METHODS)
def test_server_method(name: str) -> None:
    """Each method of the server that is overridden or called has the same parameters."""
    assert SERVER_METHODS[name] == parameters(getattr(uvicorn.Server, name)), moved("Server", name)


def test_attributes_while_a_request_arrives() -> None:
    """Connection, parser, flow control, cycle and server state have the used attributes."""

    async def main() -> None:
        config = uvicorn.Config(serve_nothing, interface="asgi3", log_config=None)
        config.load()
        state = ServerState()
        connection: Any = HttpToolsProtocol(config, state, {})
        connection.connection_made(FakeTransport())
        parser = connection.parser
        connection.data_received(GET)

        for name in CONNECTION_ATTRIBUTES:
            assert hasattr(connection, name), moved("HttpToolsProtocol", name)
        for name in PARSER_METHODS:
            assert hasattr(parser, name), moved("HttpRequestParser", name)
        for name in FLOW_ATTRIBUTES:
            assert hasattr(connection.flow, name), moved("FlowControl", name)
        for name in CYCLE_ATTRIBUTES:
            assert hasattr(connection.cycle, name), moved("RequestResponseCycle", name)
        for name in STATE_ATTRIBUTES:
            assert hasattr(state, name), moved("ServerState", name)
        assert isinstance(connection.flow, FlowControl)
        assert (b"/x", [(b"host", b"h")]) == (connection.url, connection.headers)
        for task in tuple(state.tasks):
            task.cancel()

    asyncio.run(main())


def test_a_pipelined_request_is_queued_with_its_application() -> None:
    """`pipeline` has pairs of cycle and application, the next one to serve at its right end."""

    async def main() -> None:
        config = uvicorn.Config(serve_nothing, interface="asgi3", log_config=None)
        config.load()
        state = ServerState()
        connection: Any = HttpToolsProtocol(config, state, {})
        connection.connection_made(FakeTransport())
        connection.data_received(GET + GET.replace(b"/x", b"/2") + GET.replace(b"/x", b"/3"))

        paths = [cycle.scope["path"] for cycle, _app in connection.pipeline]
        assert ["/3", "/2"] == paths, moved("HttpToolsProtocol", "pipeline")
        for task in tuple(state.tasks):
            task.cancel()

    asyncio.run(main())


def test_status_lines() -> None:
    """The fast path writes uvicorn's status lines."""
    assert b"HTTP/1.1 201 Created\r\n" == httptools_impl.STATUS_LINE[201], moved(
        "httptools_impl", "STATUS_LINE"
    )


def test_uvicorn_has_an_upper_bound() -> None:
    """The installed version is below the bound of pyproject.toml: its internals were checked."""
    pyproject = tomllib.loads(Path("pyproject.toml").read_text())
    service = pyproject["project"]["optional-dependencies"]["service"]
    requirement = next(line for line in service if line.startswith("uvicorn"))
    bound = requirement.partition("<")[2]
    assert bound, "uvicorn needs an upper bound in pyproject.toml"
    assert version_of(uvicorn.__version__) < version_of(bound)


def version_of(text: str) -> tuple[int, ...]:
    """Return the numbers of a version."""
    return tuple(map(int, text.split(".")))
