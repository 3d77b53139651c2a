"""What becomes of answers that failed: let go before a wait, and still whole if they come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import aiohttp
import httpx
import pytest
import requests

import tarry
from tarry import Policy, Reason
from tarry.adapters.aiohttp import RetryMiddleware
from tarry.adapters.http import headers
from tarry.adapters.httpx import AsyncRetryTransport, RetryTransport
from tarry.adapters.requests import RetryAdapter
from tarry.runtime.clocks import system
from tarry.testing import captured_events, scripted_random
from tests.adapters.clients import Answer, Client
from tests.adapters.conftest import Server

pytestmark = pytest.mark.usefixtures("_hurry")


# --- let go ---------------------------------------------------------------------------------------


def test_answer_that_stalls_holds_nobody_up(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer whose end does not come is given up at once, and its connection with it."""
    monkeypatch.setattr(headers, "DRAIN_TIMEOUT_S", 0.1)
    with client.open(timeout=60.0) as talker, tarry.deadline(120):
        answer = talker.send("GET", server.url("stall,200"))

    assert Answer(200, "answer 2") == answer
    assert 0 == server.flaky.waited_for


def test_answers_in_chunks_keep_their_connection(server: Server, client: Client) -> None:
    """An answer that does not say how long it is is read as well, while it is short."""
    with client.open() as talker:
        answer = talker.send("GET", server.url("chunks"))

    assert (Answer(503, "answer 4"), 1) == (answer, server.opened)


def test_answer_that_turns_out_to_be_long(server: Server, client: Client) -> None:
    """It is not read to its end, and the next attempt has a new connection."""
    with client.open() as talker:
        answer = talker.send("GET", server.url("many,200"))

    assert (Answer(200, "answer 2"), 2) == (answer, server.opened)


# --- handed out after all -------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["503", "chunks", "long"])
def test_deadline_that_passes_during_the_wait(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """The last answer is still whole if it was short; a long one is gone, and the error says so."""
    now = system.now

    def jump(*_: object) -> None:
        monkeypatch.setattr(system, "now", lambda: now() + 100)

    async def ajump(_: float) -> None:
        jump()

    monkeypatch.setattr(system, "sleep", jump)
    monkeypatch.setattr(system, "async_sleep", ajump)
    with client.open() as talker, tarry.deadline(60):
        if plan == "long":
            with pytest.raises(tarry.DeadlineExceeded, match="the last answer was 503"):
                talker.send("GET", server.url(plan))
        else:
            assert Answer(503, "answer 1") == talker.send("GET", server.url(plan))

    assert 1 == len(server.seen)


Get = Callable[[str, Policy], tuple[Any, bytes]]
"""Returns an answer and its body, as a user reads it who streams."""


def by_httpx(url: str, policy: Policy) -> tuple[Any, bytes]:
    """Raw, as it came."""
    with (
        httpx.Client(transport=RetryTransport(policy=policy)) as client,
        client.stream("GET", url) as response,
    ):
        return response, b"".join(response.iter_raw())


def by_httpx_looped(url: str, policy: Policy) -> tuple[Any, bytes]:
    """Raw, as it came."""

    async def main() -> tuple[Any, bytes]:
        async with (
            httpx.AsyncClient(transport=AsyncRetryTransport(policy=policy)) as client,
            client.stream("GET", url) as response,
        ):
            return response, b"".join([piece async for piece in response.aiter_raw()])

    return asyncio.run(main())


def by_requests(url: str, policy: Policy) -> tuple[Any, bytes]:
    """In pieces."""
    with requests.Session() as session:
        session.mount("http://", RetryAdapter(policy=policy))
        response = session.get(url, stream=True, timeout=10)
        return response, b"".join(response.iter_content(3))


def by_aiohttp(url: str, policy: Policy) -> tuple[Any, bytes]:
    """By `read`, which has its own idea of an answer that was released."""

    async def main() -> tuple[Any, bytes]:
        async with (
            aiohttp.ClientSession(middlewares=(RetryMiddleware(policy=policy),)) as session,
            session.get(url) as response,
        ):
            return response, await response.read()

    return asyncio.run(main())


GETS = pytest.mark.parametrize("get", [by_httpx, by_httpx_looped, by_requests, by_aiohttp])


@GETS
@pytest.mark.parametrize("plan", ["503", "chunks"])
def test_answer_is_as_good_as_new(
    server: Server, get: Get, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that was let go, and is handed out after all, can be streamed."""
    now = system.now

    def late(*_: object) -> float:
        monkeypatch.setattr(system, "now", lambda: now() + 100)
        return 0.0

    response, body = get(server.url(plan), Policy(total_budget=60, jitter=late))

    assert b"answer 1" == body
    record = tarry.record_of(response)
    assert record is not None
    assert (Reason.TOTAL_BUDGET, 1) == (record.reason, record.attempts)


@GETS
def test_answer_says_why_it_is_the_last(server: Server, get: Get) -> None:
    """The record of the call is on the answer, as it would be on an error."""
    response, _ = get(server.url("503,429"), Policy(max_attempts=2))

    record = tarry.record_of(response)
    assert record is not None
    assert (Reason.ATTEMPTS, ["503", "429"]) == (
        record.reason,
        [step.detail for step in record.steps],
    )


@GETS
@pytest.mark.parametrize("plan", ["200", "503,200", "404"])
def test_other_answers_say_nothing(server: Server, get: Get, plan: str) -> None:
    """What succeeded, or was never to be retried, has no record."""
    response, _ = get(server.url(plan), Policy())

    assert None is tarry.record_of(response)


# --- what the server says -------------------------------------------------------------------------

WAITS = [
    "retry-after=7",
    "retry-after-ms=7000",
    "x-ms-retry-after-ms=7000",
    "x-amz-retry-after=7000",
    "retry-after=Tue~ 14 Nov 2023 22:13:27 GMT",
    'ratelimit="minute";r=0;t=7',
    "retry-after=3|retry-after=7",
    'ratelimit="second";r=0;t=1|ratelimit="minute";r=0;t=7',
]


@pytest.mark.parametrize("hint", WAITS)
def test_hint_is_obeyed(
    server: Server, client: Client, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is as long as the server asks for, in whichever form it does."""
    monkeypatch.setattr(system, "unix_time", lambda: 1_700_000_000.0)
    with client.open() as talker, captured_events() as events, scripted_random([0.0]):
        talker.send("GET", server.url(quote(f"503:{hint},200")))

    assert [7.0] == [event.delay for event in events if isinstance(event, tarry.WillWait)]


@pytest.mark.parametrize(
    ("plan", "arrive"),
    [
        ("400:stripe-should-retry=true,200", 2),
        ("503:stripe-should-retry=false,200", 1),
        ("503:x-should-retry=False,200", 1),
        ("503:x-should-retry=true|x-should-retry=false,200", 1),
    ],
)
def test_word_of_the_server(server: Server, client: Client, plan: str, arrive: int) -> None:
    """Whether to retry is the server's to say; of two words, the cautious one holds."""
    with client.open() as talker:
        talker.send("GET", server.url(plan))

    assert arrive == len(server.seen)


# --- events ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "attempts"), [("404", 1), ("503,404", 2)])
def test_permanent_answer_is_no_success(
    server: Server, client: Client, plan: str, attempts: int
) -> None:
    """Listeners hear that an attempt failed, and that the call was given up for good."""
    with client.open() as talker, captured_events() as events:
        talker.send("GET", server.url(plan))

    last, end = events[-2:]
    assert isinstance(last, tarry.AttemptFailed)
    assert isinstance(end, tarry.GaveUp)
    assert (tarry.Kind.PERMANENT, "404") == (last.kind, last.detail)
    assert (Reason.PERMANENT, attempts, "404") == (end.reason, end.attempts, end.detail)
    assert None is end.error  # it is an answer
    assert not any(isinstance(event, tarry.Succeeded) for event in events)
