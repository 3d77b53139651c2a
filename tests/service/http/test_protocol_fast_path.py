"""The fast path, and the requests that uvicorn handles instead."""

from __future__ import annotations

import asyncio

import pytest

from tarry.service.api.messages import ApiResponse
from tests.service.http.harness import CHUNKED, GET, KEEP_ALIVE_S, POST, FastRoute


@pytest.mark.parametrize("request_", [POST, CHUNKED], ids=["sized", "chunked"])
async def test_a_request_in_one_read_is_served_without_a_task(request_: bytes) -> None:
    """The response is written once and equals the response that uvicorn writes."""
    route, uvicorn_route = FastRoute(), FastRoute()
    for count in (1, 2):
        route.receive(request_)
        (scope, body) = route.requests[-1]
        assert ("POST", "/hot", b"hello") == (scope["method"], scope["path"], body)
        assert (b"x-a", b"1") in scope["headers"]
        assert not route.connection.state.tasks
        route.connection.transport.written.clear()
        route.respond()
        assert 1 == len(route.connection.transport.written)
        assert (
            await uvicorn_route.connection.send(request_.replace(b"/hot", b"/cold"))
            == route.written
        )
        assert count == route.connection.state.total_requests == len(route.requests)
    assert b"HTTP/1.1 201 Created\r\ndate: today\r\n" in route.written
    assert [] == route.connection.protocol.cycle.body_parts  # an idle connection keeps no body


@pytest.mark.parametrize(
    "request_",
    [
        POST.replace(b"POST", b"PUT"),
        POST.replace(b"/hot", b"/hot?a=1"),
        POST.replace(b"/hot", b"/hot/"),
        POST.replace(b"/hot", b"/%68ot"),
        POST.replace(b"/hot", b"http://h/hot"),
        POST.replace(b"HTTP/1.1", b"HTTP/1.0"),
        POST.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"X-A: 1", b"Connection: keep-alive"),
        POST.replace(b"X-A: 1", b"Connection: close"),
        POST.replace(b"X-A: 1", b"connection: x, Close"),
        POST.replace(b"X-A: 1", b"Expect: 100-continue"),
    ],
)
async def test_other_requests_are_handled_by_uvicorn(request_: bytes) -> None:
    """The application receives their body."""
    route = FastRoute()
    assert (await route.connection.send(request_)).endswith(b"\r\n\r\nok")
    assert ([], [b"hello"]) == (route.requests, route.bodies)


@pytest.mark.parametrize("request_", [POST, CHUNKED], ids=["sized", "chunked"])
async def test_a_request_in_two_reads_is_served_once(request_: bytes) -> None:
    """A request split at any byte is received completely and gets one response."""
    paths_taken: set[bool] = set()
    for cut in range(1, len(request_)):
        route = FastRoute()
        route.receive(request_[:cut])
        await asyncio.sleep(0)
        route.receive(request_[cut:])
        await route.connection.wait_until_served()
        paths_taken.add(is_fast := bool(route.requests))
        if is_fast:
            route.respond()
        assert [b"hello"] == [body for _, body in route.requests] + route.bodies
        assert 1 == route.written.count(b"HTTP/1.1 201 ") == route.connection.state.total_requests
    assert {True, False} == paths_taken  # a split within the head leads to either path


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Responses have the order of the requests, of which uvicorn handles all but the first."""
    route = FastRoute()
    route.receive(POST + GET + POST.replace(b"hello", b"again"))
    route.receive(POST.replace(b"hello", b"third"))
    await asyncio.sleep(0)
    assert (1, [], b"") == (len(route.requests), route.bodies, route.written)
    route.respond(b"first")
    await route.connection.wait_until_served()
    assert [b"", b"again", b"third"] == route.bodies
    bodies = [part.partition(b"HTTP")[0] for part in route.written.split(b"\r\n\r\n")[1:]]
    assert [b"first", b"ok", b"ok", b"ok"] == bodies
    route.receive(POST)
    assert 2 == len(route.requests)  # no earlier request is pending


async def test_uvicorn_serves_a_client_that_does_not_read() -> None:
    """While writing is paused, uvicorn handles requests and delays the response."""
    route = FastRoute()
    route.connection.protocol.pause_writing()
    route.receive(POST)
    await asyncio.sleep(0)
    assert ([], b"") == (route.requests, route.written)
    route.connection.protocol.resume_writing()
    await route.connection.wait_until_served()
    assert route.written.endswith(b"\r\n\r\nok")


@pytest.mark.parametrize("error", [None, ConnectionResetError()])
async def test_no_response_is_written_to_a_lost_connection(error: Exception | None) -> None:
    """After the connection is lost, nothing is written and no timer is pending."""
    route = FastRoute()
    route.receive(POST + GET)
    route.connection.transport.close()
    route.connection.protocol.connection_lost(error)
    route.respond()
    assert (b"", 0) == (route.written, route.connection.loop.pending)
    assert not route.connection.state.connections


async def test_shutdown_closes_the_connection_after_the_response() -> None:
    """A running request still gets its response."""
    route = FastRoute()
    route.receive(POST)
    route.connection.protocol.shutdown()
    assert not route.connection.transport.is_closed
    route.respond()
    assert b"\r\nconnection: close\r\n" in route.written
    assert route.written.endswith(b"\r\n\r\nok")
    assert route.connection.transport.is_closed


async def test_the_server_waits_for_tasks_of_the_fast_path() -> None:
    """A task of the fast path is in the server's set of tasks until it is done."""
    route, may_finish = FastRoute(), asyncio.Event()
    route.task = asyncio.create_task(may_finish.wait())
    route.receive(POST)
    assert {route.task} == route.connection.state.tasks
    may_finish.set()
    await route.connection.wait_until_served()
    assert not route.connection.state.tasks


async def test_a_connection_is_idle_after_its_response() -> None:
    """The keep-alive timeout starts at the response, so it does not end a slow request."""
    route = FastRoute()
    for _ in range(2):
        route.receive(POST)
        route.connection.loop.sleep(2 * KEEP_ALIVE_S)
        assert (False, 0) == (route.connection.transport.is_closed, route.connection.loop.pending)
        route.respond()
    route.connection.loop.sleep(KEEP_ALIVE_S)
    assert route.connection.transport.is_closed


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: x", b"a\nb", b"a\rb"])
async def test_a_header_with_a_line_break_is_not_written(value: bytes) -> None:
    """Nothing is written, and the connection is closed."""
    route = FastRoute()
    route.receive(POST)
    route.responders[0](ApiResponse(201, b"ok", [(b"location", value)]))
    assert (b"", True) == (route.written, route.connection.transport.is_closed)
