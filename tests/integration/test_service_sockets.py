"""Connections to a running service that stay open: half a request, a wait, a stream; and requests
to another host.
"""

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
SIZED = b"Content-Length: %d\r\n\r\n" % len(TASK)
GET = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HURRY = ("--set", "head_timeout_ms=300", "--set", "body_timeout_ms=300")


@pytest.fixture(scope="module")
def impatient_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run a service with short timeouts."""
    with service(tmp_path_factory.mktemp("impatient_service"), *HURRY) as running:
        yield running


@contextmanager
def connect(running: Service) -> Iterator[socket.socket]:
    """Open a connection with a timeout of one minute."""
    with socket.create_connection(("127.0.0.1", running.port), 60) as wire:
        yield wire


def read_to_end(wire: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    answer = b""
    while more := wire.recv(65536):
        answer += more
    return answer


def waiting_request(task_id: str, seconds: int) -> bytes:
    """Return a request that waits for the result of a task."""
    head = f"GET /retry-tasks/{task_id} HTTP/1.1\r\nHost: localhost\r\nPrefer: wait={seconds}"
    return f"{head}\r\n\r\n".encode()


def parse_problem(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Return the status and the problem of a response."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    "sent",
    [
        POST[:10],
        POST,
        POST + SIZED,
        POST + SIZED + TASK[:9],
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n",
    ],
    ids=["request line", "head", "no body", "half a body", "half a chunk"],
)
def test_half_a_request_is_408(impatient_service: Service, sent: bytes) -> None:
    """Its connection is closed, and nothing is stored."""
    with connect(impatient_service) as wire:
        wire.sendall(sent)
        status, problem = parse_problem(read_to_end(wire))
    assert (408, "/docs#problem-timeout") == (status, problem["type"])
    assert [] == impatient_service.all_tasks()


def test_a_silent_connection_is_closed(impatient_service: Service) -> None:
    """Without a response."""
    with connect(impatient_service) as wire:
        assert b"" == read_to_end(wire)


def test_half_a_request_after_a_complete_one_is_408(impatient_service: Service) -> None:
    """Each request of a connection has its own timeout."""
    with connect(impatient_service) as wire:
        wire.sendall(GET + POST)
        first, _, second = read_to_end(wire).partition(b'{"status":"ok"}')
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 408 ")


def test_a_body_after_the_response_times_out(impatient_service: Service) -> None:
    """The connection is closed without a second response."""
    with connect(impatient_service) as wire:
        wire.sendall(POST.replace(b"application/json", b"text/plain") + SIZED)
        answer = read_to_end(wire)
    assert answer.startswith(b"HTTP/1.1 415 ")
    assert 1 == answer.count(b"HTTP/1.1 ")


def test_a_response_may_take_longer_than_the_request_timeout(impatient_service: Service) -> None:
    """Neither a complete request nor half a request pipelined behind it is cut off."""
    task = impatient_service.post(targetUrl="http://127.0.0.1:1/", delayMs=3_600_000)
    with connect(impatient_service) as wire:
        wire.sendall(waiting_request(task["taskId"], 2) + POST)
        first, _, second = read_to_end(wire).partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert b"preference-applied: wait=2" in first
    assert 1 == second.count(b"HTTP/1.1 408 ")
    assert 200 == impatient_service.request("DELETE", f"/retry-tasks/{task['taskId']}")[0]


def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    """The first is complete, others are pipelined behind it, and the last arrives in two parts."""
    with service(tmp_path) as running, connect(running) as wire:
        post = POST + SIZED + TASK
        wire.sendall(post * 3 + GET + post[:-9])
        wire.sendall(post[-9:] + GET.replace(b"Host", b"Connection: close\r\nHost"))
        answers = read_to_end(wire).split(b"HTTP/1.1 ")[1:]
        assert [b"201", b"201", b"201", b"200", b"201", b"200"] == [one[:3] for one in answers]
        assert 4 == len(running.all_tasks())


def test_waits_and_streams_do_not_delay_the_shutdown(tmp_path: Path) -> None:
    """Waiting requests are answered and streams end; the exit code is 0."""
    with service(tmp_path, "--set", "drain_ms=3600000") as running:
        task = running.post(targetUrl="http://127.0.0.1:1/", delayMs=3_600_000)
        with connect(running) as listening, connect(running) as waiting:
            listening.sendall(GET.replace(b"/healthz", b"/events"))
            waiting.sendall(waiting_request(task["taskId"], 60))
            assert 200 == running.request("GET", "/healthz")[0]  # so the others have been read
            assert 0 == running.stop()
            assert read_to_end(waiting).startswith(b"HTTP/1.1 200 ")
            assert read_to_end(listening).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", [b"/events", b"/openapi.json"])
def test_a_client_that_does_not_read_does_not_delay_the_shutdown(
    tmp_path: Path, path: bytes
) -> None:
    """Its connection is aborted; the exit code is 0."""
    with service(tmp_path, "--set", "drain_ms=3600000") as running, socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect(("127.0.0.1", running.port))
        wire.sendall(GET.replace(b"/healthz", path) * (1 if path == b"/events" else 500))
        assert 200 == running.request("GET", "/healthz")[0]  # so it has been read
        tasks = [{"targetUrl": "http://127.0.0.1:1/", "delayMs": 3_600_000}] * 1000
        for _ in range(30 if path == b"/events" else 0):
            assert 200 == running.request("POST", "/retry-tasks/batch", {"tasks": tasks})[0]
        assert 0 == running.stop()
    assert "ERROR" not in (tmp_path / "log").read_text()


def test_half_a_request_does_not_delay_the_shutdown(tmp_path: Path) -> None:
    """Its connection is closed before its own timeout."""
    patient = ("--set", "body_timeout_ms=3600000")
    with service(tmp_path, *patient) as running, connect(running) as wire:
        wire.sendall(POST + SIZED + TASK[:10])
        assert 200 == running.request("GET", "/healthz")[0]  # so it has been read
        assert 0 == running.stop()
        assert 408 == parse_problem(read_to_end(wire))[0]


def test_another_host_is_not_served_without_keys(tmp_path: Path) -> None:
    """DNS rebinding is rejected; the operator can allow a host name."""
    with service(tmp_path, "--set", "allow_host=tarry.internal") as running:
        for host, status in (("evil.example", 421), ("tarry.internal", 200), ("localhost", 200)):
            headers = {"host": f"{host}:{running.port}"}
            assert status == running.request("GET", "/retry-tasks", headers=headers)[0]
