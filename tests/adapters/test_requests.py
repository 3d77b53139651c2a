"""Behaviour specific to requests: urllib3 retries, bodies, timeouts, errors and pickling."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import urllib3

import tarry
from tarry import Hedging, Policy, Reason
from tarry.adapters import requests as adapter
from tarry.adapters.requests import RetryAdapter
from tests.adapters.conftest import FlakyServerView

pytestmark = pytest.mark.usefixtures("_no_waits")


@pytest.fixture
def session() -> Iterator[requests.Session]:
    """Open a session whose adapter has the default options."""
    with make_session(RetryAdapter()) as session:
        yield session


def make_session(adapter: RetryAdapter) -> requests.Session:
    """Return a session with this adapter for http URLs."""
    session = requests.Session()
    session.trust_env = False
    session.mount("http://", adapter)
    return session


def reason_and_attempts(error: BaseException) -> tuple[Reason | None, int]:
    """Return the reason and the number of attempts of a call that raises."""
    record = tarry.record_of(error)
    assert record is not None
    return record.reason, record.attempts


@pytest.mark.parametrize("max_retries", [3, urllib3.Retry(3), urllib3.Retry(0)])
def test_urllib3_retries_raise(max_retries: Any) -> None:
    """Only `max_retries=0` is accepted, because two layers of retries multiply."""
    with pytest.raises(tarry.ConfigurationError, match="max_retries must be 0"):
        RetryAdapter(max_retries=max_retries)

    assert 0 == RetryAdapter(max_retries=0).max_retries.total


# --- bodies ---------------------------------------------------------------------------------------


def test_response_is_streamed(server: FlakyServerView, session: requests.Session) -> None:
    """The first half of a response can be read before the server sends the second half."""
    with session.get(server.url("503,stream"), stream=True, timeout=10) as response:
        chunks = response.iter_content(5)
        first = next(chunks)
        server.resume()
        rest = b"".join(chunks)

    assert (b"first", b"later") == (first, rest)


def test_file_is_rewound(server: FlakyServerView, session: requests.Session) -> None:
    """Every attempt sends a file from the position at which the first attempt began."""
    file = io.BytesIO(b"skipped, the rest")
    file.seek(9)

    response = session.put(server.url("503,drop,200"), data=file, timeout=10)

    assert 200 == response.status_code
    assert [b"the rest"] * 3 == [request.body for request in server.received_requests]


def test_unseekable_file_is_sent_once(server: FlakyServerView, session: requests.Session) -> None:
    """A pipe is sent once, and a note explains why."""
    reader, writer = os.pipe()
    os.write(writer, b"once")
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe, pytest.raises(requests.ConnectionError) as caught:
        session.put(server.url("drop,200"), data=pipe, timeout=10)

    assert (Reason.NOT_REPEATABLE, 1) == reason_and_attempts(caught.value)
    assert "its body cannot be sent a second time" in caught.value.__notes__[-1]


def test_file_is_not_hedged(server: FlakyServerView) -> None:
    """A file is sent once, because two copies cannot read it in parallel."""
    with make_session(RetryAdapter(hedging=Hedging(after=3600))) as session:
        session.put(server.url("503,200"), data=io.BytesIO(b"report"), timeout=10)

    assert [b"report"] == [request.body for request in server.received_requests]


def test_form_with_a_file_is_resent(server: FlakyServerView, session: requests.Session) -> None:
    """A form with a file is resent completely, because requests encodes it as bytes."""
    files = {"report": io.BytesIO(b"report")}
    session.put(server.url("503,200"), data={"a": "b"}, files=files, timeout=10)

    assert [True] * 2 == [b"report\r\n" in request.body for request in server.received_requests]


# --- timeouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (None, (2.0, 2.0)),
        (5, (2.0, 2.0)),
        (1, (1, 1)),
        ((1, None), (1, 2.0)),
        ((None, 1.5), (2.0, 1.5)),
        ((9, 9), (2.0, 2.0)),
    ],
)
def test_timeouts_are_limited(timeout: Any, expected: tuple[float, float]) -> None:
    """The connect and read timeouts are limited to that of the attempt; shorter ones are kept."""
    assert expected == adapter._limit_timeout(timeout, 2.0)


@pytest.mark.parametrize(("total", "expected"), [(None, 2.0), (5, 2.0), (1, 1)])
def test_urllib3_timeouts_are_limited(total: float | None, expected: float) -> None:
    """In a copy of a urllib3 timeout the total is limited; the connect timeout is kept."""
    timeout = urllib3.Timeout(total=total, connect=0.5)

    limited = adapter._limit_timeout(timeout, 2.0)

    assert (expected, 0.5) == (limited.total, limited.connect_timeout)
    assert total == timeout.total


# --- errors ---------------------------------------------------------------------------------------


def test_post_is_retried_if_the_proxy_is_unreachable(
    unreachable_url: str, session: requests.Session
) -> None:
    """If the proxy cannot be reached, nothing was sent, so even a POST is retried."""
    with pytest.raises(requests.exceptions.ProxyError) as caught:
        session.post("http://example.test", proxies={"http": unreachable_url}, timeout=10)

    assert (Reason.ATTEMPTS, 4) == reason_and_attempts(caught.value)


def test_url_without_a_host_is_permanent(session: requests.Session) -> None:
    """A request with an invalid URL is not retried."""
    request = requests.Request("GET", "http://example.test").prepare()
    request.url = "http:///nowhere"

    with pytest.raises(requests.exceptions.InvalidURL) as caught:
        session.send(request)

    assert (Reason.PERMANENT, 1) == reason_and_attempts(caught.value)


def test_user_request_is_not_changed(server: FlakyServerView, session: requests.Session) -> None:
    """The headers of an attempt are set on a copy of the request."""
    request = requests.Request("GET", server.url("503,200")).prepare()
    before = dict(request.headers)

    response = session.send(request, timeout=10)

    assert before == dict(request.headers)
    assert request is response.request


def test_redirected_request_has_no_attempt_number(
    server: FlakyServerView, session: requests.Session
) -> None:
    """A redirect resets the attempt number: the new request has no attempt header."""
    target = server.url("200").replace("&", "%26")
    session.get(server.url(f"503,307:location={target}", run_suffix="-first"), timeout=10)

    assert [None] == server.header_values("X-Retry-Attempt")


def test_key_belongs_to_the_request_object(server: FlakyServerView) -> None:
    """Sending the same request object again uses the same key."""
    with make_session(
        RetryAdapter(idempotency_key="auto", policy=Policy(max_attempts=1))
    ) as session:
        request = requests.Request("POST", server.url("503,200")).prepare()
        session.send(request)
        session.send(request)

    first, second = server.header_values("Idempotency-Key")
    assert first == second


def pickle_and_unpickle(session: requests.Session) -> Any:
    """Return a copy of a session, made with pickle."""
    return pickle.loads(pickle.dumps(session))  # noqa: S301 - the data is trusted


@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickle_and_unpickle])
def test_session_can_be_copied_and_pickled(server: FlakyServerView, make_copy: Any) -> None:
    """A copied or unpickled session keeps the arguments of its adapter."""
    adapter = RetryAdapter(policy=Policy(max_attempts=2), idempotency_key="auto", pool_maxsize=3)
    with make_copy(make_session(adapter)) as session:
        response = session.post(server.url("503"), timeout=10)

    assert (503, 2) == (response.status_code, len(server.received_requests))
    assert 3 == session.adapters["http://"]._pool_maxsize
