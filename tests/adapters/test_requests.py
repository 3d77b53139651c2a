"""Behaviour specific to requests: urllib3, files as bodies, forms of a timeout."""

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
    """Open a session whose adapter has no options."""
    with session_with(RetryAdapter()) as session:
        yield session


def session_with(adapter: RetryAdapter) -> requests.Session:
    """Return a session with an adapter."""
    session = requests.Session()
    session.trust_env = False
    session.mount("http://", adapter)
    return session


def record(error: BaseException) -> tuple[Reason, int]:
    """Return the record of a call that raises."""
    found = tarry.record_of(error)
    assert found is not None
    return found.reason, found.attempts


@pytest.mark.parametrize("given", [3, urllib3.Retry(3), urllib3.Retry(0)])
def test_urllib3_retries_raise(given: Any) -> None:
    """Two layers of retries multiply, so max_retries is rejected."""
    with pytest.raises(tarry.ConfigurationError, match="max_retries must be 0"):
        RetryAdapter(max_retries=given)

    assert 0 == RetryAdapter(max_retries=0).max_retries.total


# --- bodies ---------------------------------------------------------------------------------------


def test_response_is_streamed(server: FlakyServerView, session: requests.Session) -> None:
    """The first half of a response is available before the server sends the second."""
    with session.get(server.url("503,stream"), stream=True, timeout=10) as response:
        pieces = response.iter_content(5)
        first = next(pieces)
        server.resume()
        rest = b"".join(pieces)

    assert (b"first", b"later") == (first, rest)


def test_file_is_rewound(server: FlakyServerView, session: requests.Session) -> None:
    """A file is sent again from the position where the first attempt began."""
    file = io.BytesIO(b"skipped, the rest")
    file.seek(9)

    response = session.put(server.url("503,drop,200"), data=file, timeout=10)

    assert 200 == response.status_code
    assert [b"the rest"] * 3 == [seen.body for seen in server.seen]


def test_unseekable_file(server: FlakyServerView, session: requests.Session) -> None:
    """A pipe is sent once, and a note explains that."""
    reader, writer = os.pipe()
    os.write(writer, b"once")
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe, pytest.raises(requests.ConnectionError) as caught:
        session.put(server.url("drop,200"), data=pipe, timeout=10)

    assert (Reason.NOT_REPEATABLE, 1) == record(caught.value)
    assert "its body cannot be sent a second time" in caught.value.__notes__[-1]


def test_copies_do_not_share_a_file(server: FlakyServerView) -> None:
    """Two copies cannot read one file in parallel, so it is sent once."""
    with session_with(RetryAdapter(hedging=Hedging(after=3600))) as session:
        session.put(server.url("503,200"), data=io.BytesIO(b"report"), timeout=10)

    assert [b"report"] == [seen.body for seen in server.seen]


def test_form_with_a_file(server: FlakyServerView, session: requests.Session) -> None:
    """A form is bytes, so it is sent again completely."""
    files = {"report": io.BytesIO(b"report")}
    session.put(server.url("503,200"), data={"a": "b"}, files=files, timeout=10)

    assert [True] * 2 == [b"report\r\n" in seen.body for seen in server.seen]


# --- timeouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "bounded"),
    [
        (None, (2.0, 2.0)),
        (5, (2.0, 2.0)),
        (1, (1, 1)),
        ((1, None), (1, 2.0)),
        ((None, 1.5), (2.0, 1.5)),
        ((9, 9), (2.0, 2.0)),
    ],
)
def test_timeouts_are_limited(given: Any, bounded: tuple[float, float]) -> None:
    """Connecting and reading are limited by the attempt; shorter timeouts are kept."""
    assert bounded == adapter._limit_timeout(given, 2.0)


@pytest.mark.parametrize(("total", "bounded"), [(None, 2.0), (5, 2.0), (1, 1)])
def test_urllib3_timeouts_are_limited(total: float | None, bounded: float) -> None:
    """A urllib3 timeout keeps its parts; its total is limited in a copy."""
    given = urllib3.Timeout(total=total, connect=0.5)

    actual = adapter._limit_timeout(given, 2.0)

    assert (bounded, 0.5) == (actual.total, actual.connect_timeout)
    assert total == given.total


# --- errors ---------------------------------------------------------------------------------------


def test_unreachable_proxy(unreachable_url: str, session: requests.Session) -> None:
    """A proxy that was not reached has sent nothing, so any method is retried."""
    with pytest.raises(requests.exceptions.ProxyError) as caught:
        session.post("http://example.test", proxies={"http": unreachable_url}, timeout=10)

    assert (Reason.ATTEMPTS, 4) == record(caught.value)


def test_url_without_a_host(session: requests.Session) -> None:
    """An invalid request is not retried."""
    request = requests.Request("GET", "http://example.test").prepare()
    request.url = "http:///nowhere"

    with pytest.raises(requests.exceptions.InvalidURL) as caught:
        session.send(request)

    assert (Reason.PERMANENT, 1) == record(caught.value)


def test_user_request_is_not_changed(server: FlakyServerView, session: requests.Session) -> None:
    """The headers of an attempt are set on a copy of the request."""
    request = requests.Request("GET", server.url("503,200")).prepare()
    before = dict(request.headers)

    response = session.send(request, timeout=10)

    assert before == dict(request.headers)
    assert request is response.request


def test_redirect_resets_the_attempt_number(
    server: FlakyServerView, session: requests.Session
) -> None:
    """The headers of a redirected request do not contain the attempt number."""
    there = server.url("200").replace("&", "%26")
    session.get(server.url(f"503,307:location={there}", run="-first"), timeout=10)

    assert [None] == server.received("X-Retry-Attempt")


def test_key_belongs_to_the_request_object(server: FlakyServerView) -> None:
    """Sending the same request object again uses the same key."""
    with session_with(
        RetryAdapter(idempotency_key="auto", policy=Policy(max_attempts=1))
    ) as session:
        request = requests.Request("POST", server.url("503,200")).prepare()
        session.send(request)
        session.send(request)

    first, second = server.received("Idempotency-Key")
    assert first == second


def pickled(session: requests.Session) -> Any:
    """Return a pickled and unpickled object."""
    return pickle.loads(pickle.dumps(session))  # noqa: S301 - it is our own


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_session_can_be_pickled(server: FlakyServerView, copied: Any) -> None:
    """An unpickled session keeps its arguments, and starts with new breakers and budgets."""
    adapter = RetryAdapter(policy=Policy(max_attempts=2), idempotency_key="auto", pool_maxsize=3)
    with copied(session_with(adapter)) as session:
        response = session.post(server.url("503"), timeout=10)

    assert (503, 2) == (response.status_code, len(server.seen))
    assert 3 == session.adapters["http://"]._pool_maxsize
