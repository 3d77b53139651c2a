"""Incomplete requests, waiting requests and streams of a running service, and the Host check."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service import Service, service

POST = b"POST /retry-tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
TASK = b'{"targetUrl": "http://127.0.0.1:1/", "delayMs": 3600000}'
CONTENT_LENGTH = b"Content-Length: %d\r\n\r\n" % len(TASK)
GET = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
SHORT_TIMEOUTS = ("--set", "head_timeout_ms=300", "--set", "body_timeout_ms=300")


@pytest.fixture(scope="module")
def short_timeout_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run a service with short timeouts."""
    with service(
        tmp_path_factory.mktemp("short_timeout_service"), *SHORT_TIMEOUTS
    ) as running_service:
        yield running_service


@contextmanager
def connect(running_service: Service) -> Iterator[socket.socket]:
    """Open a connection with a timeout of one minute."""
    with socket.create_connection(("127.0.0.1", running_service.port), 60) as connection:
        yield connection


def read_to_end(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    response = b""
    while data := connection.recv(65536):
        response += data
    return response


def waiting_request(task_id: str, seconds: int) -> bytes:
    """Return a request that waits for the result of a task."""
    head = f"GET /retry-tasks/{task_id} HTTP/1.1\r\nHost: localhost\r\nPrefer: wait={seconds}"
    return f"{head}\r\n\r\n".encode()


def parse_problem(response: bytes) -> tuple[int, dict[str, Any]]:
    """Return the status and the problem of a response."""
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    "sent",
    [
        POST[:10],
        POST,
        POST + CONTENT_LENGTH,
        POST + CONTENT_LENGTH + TASK[:9],
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n",
    ],
    ids=["request line", "headers", "no body", "partial body", "partial chunk"],
)
def test_an_incomplete_request_is_408(short_timeout_service: Service, sent: bytes) -> None:
    """After the timeout the connection is closed, and no task is stored."""
    with connect(short_timeout_service) as connection:
        connection.sendall(sent)
        status, problem = parse_problem(read_to_end(connection))
    assert (408, "/docs#problem-timeout") == (status, problem["type"])
    assert [] == short_timeout_service.all_tasks()


def test_a_silent_connection_is_closed(short_timeout_service: Service) -> None:
    """A connection without a request is closed without a response."""
    with connect(short_timeout_service) as connection:
        assert b"" == read_to_end(connection)


def test_an_incomplete_request_after_a_complete_request_is_408(
    short_timeout_service: Service,
) -> None:
    """Each request of a connection has its own timeout."""
    with connect(short_timeout_service) as connection:
        connection.sendall(GET + POST)
        first, _, second = read_to_end(connection).partition(b'{"status":"ok"}')
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 408 ")


def test_a_body_after_the_response_times_out(short_timeout_service: Service) -> None:
    """After the response, a missing body closes the connection without a second response."""
    with connect(short_timeout_service) as connection:
        connection.sendall(POST.replace(b"application/json", b"text/plain") + CONTENT_LENGTH)
        response = read_to_end(connection)
    assert response.startswith(b"HTTP/1.1 415 ")
    assert 1 == response.count(b"HTTP/1.1 ")


def test_a_response_may_take_longer_than_the_request_timeout(
    short_timeout_service: Service,
) -> None:
    """A pipelined incomplete request times out only after the response of the first request."""
    task = short_timeout_service.post(targetUrl="http://127.0.0.1:1/", delayMs=3_600_000)
    with connect(short_timeout_service) as connection:
        connection.sendall(waiting_request(task["taskId"], 2) + POST)
        first, _, second = read_to_end(connection).partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert b"preference-applied: wait=2" in first
    assert 1 == second.count(b"HTTP/1.1 408 ")
    assert 200 == short_timeout_service.request("DELETE", f"/retry-tasks/{task['taskId']}")[0]


def test_a_client_may_close_its_sending_half(tmp_path: Path) -> None:
    """The request gets its response, without a wait for the result of the task."""
    with service(tmp_path) as running_service, connect(running_service) as connection:
        connection.sendall(POST + b"Prefer: wait=60\r\n" + CONTENT_LENGTH + TASK)
        connection.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1 201 " == read_to_end(connection)[:13]
        assert 1 == len(running_service.all_tasks())


def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    """Pipelined requests, one of them in two parts, get their responses in order."""
    with service(tmp_path) as running_service, connect(running_service) as connection:
        post = POST + CONTENT_LENGTH + TASK
        connection.sendall(post * 3 + GET + post[:-9])
        connection.sendall(post[-9:] + GET.replace(b"Host", b"Connection: close\r\nHost"))
        responses = read_to_end(connection).split(b"HTTP/1.1 ")[1:]
        assert [b"201", b"201", b"201", b"200", b"201", b"200"] == [
            response[:3] for response in responses
        ]
        assert 4 == len(running_service.all_tasks())


def test_waits_and_streams_do_not_delay_the_shutdown(tmp_path: Path) -> None:
    """Waiting requests are answered, streams end, and the exit code is 0."""
    with service(tmp_path, "--set", "drain_ms=3600000") as running_service:
        task = running_service.post(targetUrl="http://127.0.0.1:1/", delayMs=3_600_000)
        with connect(running_service) as listening, connect(running_service) as waiting:
            listening.sendall(GET.replace(b"/healthz", b"/events"))
            waiting.sendall(waiting_request(task["taskId"], 60))
            assert (
                200 == running_service.request("GET", "/healthz")[0]
            )  # the earlier requests have been read
            assert 0 == running_service.stop()
            assert read_to_end(waiting).startswith(b"HTTP/1.1 200 ")
            assert read_to_end(listening).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", [b"/events", b"/openapi.json"])
def test_a_client_that_does_not_read_does_not_delay_the_shutdown(
    tmp_path: Path, path: bytes
) -> None:
    """The connection is aborted, and the exit code is 0."""
    with (
        service(tmp_path, "--set", "drain_ms=3600000") as running_service,
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", running_service.port))
        connection.sendall(GET.replace(b"/healthz", path) * (1 if path == b"/events" else 500))
        assert (
            200 == running_service.request("GET", "/healthz")[0]
        )  # the earlier request has been read
        tasks = [{"targetUrl": "http://127.0.0.1:1/", "delayMs": 3_600_000}] * 1000
        for _ in range(30 if path == b"/events" else 0):
            assert 200 == running_service.request("POST", "/retry-tasks/batch", {"tasks": tasks})[0]
        assert 0 == running_service.stop()
    assert "ERROR" not in (tmp_path / "log").read_text()


def test_an_incomplete_request_does_not_delay_the_shutdown(tmp_path: Path) -> None:
    """The connection is closed before the timeout of the request."""
    long_timeout = ("--set", "body_timeout_ms=3600000")
    with (
        service(tmp_path, *long_timeout) as running_service,
        connect(running_service) as connection,
    ):
        connection.sendall(POST + CONTENT_LENGTH + TASK[:10])
        assert (
            200 == running_service.request("GET", "/healthz")[0]
        )  # the earlier request has been read
        assert 0 == running_service.stop()
        assert 408 == parse_problem(read_to_end(connection))[0]


def test_another_host_is_not_served_without_keys(tmp_path: Path) -> None:
    """Another `Host` gets a 421, which prevents DNS rebinding, unless `allow_host` has it."""
    with service(tmp_path, "--set", "allow_host=tarry.internal") as running_service:
        for host, status in (("evil.example", 421), ("tarry.internal", 200), ("localhost", 200)):
            headers = {"host": f"{host}:{running_service.port}"}
            assert status == running_service.request("GET", "/retry-tasks", headers=headers)[0]
