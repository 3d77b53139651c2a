"""Each way in which a server fails, and what becomes of its requests."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from tarry.core.outcome import SUCCESS
from tarry.simulator.distributions import Exponential, Fixed
from tarry.simulator.event_loop import EventLoop
from tarry.simulator.node import DROPPED, LeafNode
from tarry.simulator.scenario import Failure, Server
from tests.simulator.harness import (
    DISCARDED,
    ReceivedResponse,
    RecordingRequester,
    immediate_response,
    make_leaf_node,
    response_times,
)


def during(kind: str, **more: Any) -> Server:
    """Return a server that fails from 2 to 4."""
    return Server(latency=Fixed(1.0), failures=(Failure(start=2.0, end=4.0, kind=kind, **more),))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("error", "503"),
        ("refuse", "connection refused"),
        ("hang", "never"),
        ("freeze", "never"),
    ],
)
def test_a_failure_holds_from_its_start_until_before_its_end(kind: str, expected: str) -> None:
    """Requests of that time fail in its way, the ones before and after do not."""
    _, worker = make_leaf_node(during(kind))

    assert [2.75, expected, expected, 5.0] == response_times(worker, [1.75, 2.0, 3.75, 4.0])


@pytest.mark.parametrize(("kind", "when"), [("error", 3.0), ("refuse", 3.0)])
def test_a_failure_that_is_told_is_told_at_once(kind: str, when: float) -> None:
    """An error and a refusal take no work."""
    _, worker = make_leaf_node(during(kind))

    answer = immediate_response(worker, 3.0)

    assert answer is not None
    assert (when, 0) == (answer.when, worker.load(3.0))


@pytest.mark.parametrize(("retry_after", "expected"), [(None, None), (1.5, 1.5)])
def test_an_error_says_when_to_come_back(retry_after: float | None, expected: float | None) -> None:
    """The hint is the failure's `retry_after`, not the server's."""
    failure = Failure(end=4.0, kind="error", retry_after=retry_after)
    _, worker = make_leaf_node(Server(retry_after=9.0, failures=(failure,)))

    answer = immediate_response(worker, 3.0)

    assert answer is not None
    hint = answer.outcome.hint
    assert expected == (None if hint is None else hint.delay)


def test_a_refusal_drops_what_is_in_progress() -> None:
    """When a server goes away, its clients lose their connections."""
    loop, worker = make_leaf_node(during("refuse"))
    requester = RecordingRequester()
    immediate_response(worker, 0.0, requester, 1)
    immediate_response(worker, 1.0, requester, 2)
    immediate_response(worker, 1.5, requester, 3)

    loop.run(3.0)

    assert [ReceivedResponse(2.0, 3, DROPPED)] == requester.responses
    assert 0 == worker.crashes


@pytest.mark.parametrize("kind", ["error", "hang"])
def test_other_failures_let_the_work_in_progress_end(kind: str) -> None:
    """An error or a hang is that of requests which come in their time."""
    loop, worker = make_leaf_node(during(kind))
    requester = RecordingRequester()
    assert ReceivedResponse(2.5, 1, SUCCESS) == immediate_response(worker, 1.5, requester)

    loop.run(9.0)

    assert [] == requester.responses


def test_a_frozen_server_drops_all_when_the_time_is_over() -> None:
    """It holds whoever comes, and loses them in the order of their coming."""
    loop, worker = make_leaf_node(during("freeze"))
    requester = RecordingRequester()
    loop.run(2.0)
    for number, now in enumerate([2.0, 3.0, 3.5], 1):
        assert immediate_response(worker, now, requester, number) is None

    loop.run(4.0)
    assert [] == requester.responses
    loop.run(9.0)

    assert [ReceivedResponse(4.0, number, DROPPED) for number in (1, 2, 3)] == requester.responses
    assert [10.0] == response_times(worker, [9.0])


def test_a_frozen_server_holds_what_is_in_progress_too() -> None:
    """The answers that were planned never leave it; those that had left are not taken back."""
    loop, worker = make_leaf_node(during("freeze"))
    requester = RecordingRequester()
    for number, now in enumerate([0.5, 1.0, 1.25, 1.5], 1):
        immediate_response(worker, now, requester, number)
    loop.run(3.0)
    assert [] == requester.responses
    assert (2, 0) == (worker.in_progress(3.0), worker.load(3.0))

    loop.run(9.0)

    assert [
        ReceivedResponse(4.0, DISCARDED + number, DROPPED) for number in (3, 4)
    ] == requester.responses
    assert 0 == worker.in_progress(9.0)


def test_after_a_freeze_every_worker_is_free_and_cold() -> None:
    """When it is over, the server has started anew."""
    frozen = Failure(start=2.0, end=4.0, kind="freeze")
    loop, worker = make_leaf_node(
        Server(latency=Fixed(5.0), concurrency=1, warmup=10.0, cold_factor=2.0, failures=(frozen,))
    )
    response_times(worker, [0.0, 0.0])
    loop.run(4.0)

    assert [14.0] == response_times(worker, [4.0])


def test_a_server_that_dies_while_it_is_frozen_drops_what_it_holds_then() -> None:
    """Nobody waits for a process that is gone."""
    failures = (Failure(start=3.0, end=5.0), Failure(start=2.0, end=9.0, kind="freeze"))
    loop, worker = make_leaf_node(Server(latency=Fixed(2.0), failures=failures))
    requester = RecordingRequester()
    immediate_response(worker, 1.0, requester, 1)
    loop.run(2.5)
    immediate_response(worker, 2.5, requester, 2)
    loop.run(20.0)

    assert [
        ReceivedResponse(3.0, DISCARDED + 1, DROPPED),
        ReceivedResponse(3.0, 2, DROPPED),
    ] == requester.responses


def test_what_another_freeze_holds_stays_held() -> None:
    """The end of one freeze drops nothing that a longer one holds."""
    failures = (
        Failure(start=1.0, end=9.0, kind="freeze"),
        Failure(start=2.0, end=4.0, kind="freeze"),
    )
    loop, worker = make_leaf_node(Server(latency=Fixed(5.0), failures=failures))
    requester = RecordingRequester()
    immediate_response(worker, 0.5, requester, 1)
    loop.run(3.0)
    immediate_response(worker, 3.0, requester, 2)
    loop.run(9.0)
    assert ([], 2) == (requester.responses, worker.in_progress(8.0))

    loop.run(20.0)

    assert [
        ReceivedResponse(9.0, DISCARDED + 1, DROPPED),
        ReceivedResponse(9.0, 2, DROPPED),
    ] == requester.responses


def test_a_crash_drops_what_is_held() -> None:
    """A server that holds some requests and dies of the others loses them all, once."""
    frozen = Failure(end=50.0, kind="freeze", rate=0.5)
    loop, worker = make_leaf_node(Server(latency=Fixed(100.0), crash_above=5, failures=(frozen,)))
    requester = RecordingRequester()
    last = 0
    while not worker.crashes:
        last += 1
        immediate_response(worker, 1.0, requester, last)
    loop.run(60.0)

    assert {(1.0, number) for number in range(1, last)} == {
        (answer.when, answer.number) for answer in requester.responses
    }
    assert (last - 1, 0) == (len(requester.responses), worker.in_progress(60.0))
    assert last > 6


def test_servers_do_not_share_their_dice() -> None:
    """Two servers of one world draw other latencies and other failures."""
    server = Server(latency=Exponential(1.0), failure_rate=0.5)
    loop = EventLoop(0)
    one, other, again = (LeafNode(name, server, loop) for name in ("one", "other", "one"))
    answers = [
        [immediate_response(worker, float(now)) for now in range(50)]
        for worker in (one, other, again)
    ]
    times = [[answer.when for answer in each if answer] for each in answers]
    fates = [[answer.outcome for answer in each if answer] for each in answers]

    assert (times[0], fates[0]) == (times[2], fates[2])
    assert set() == set(times[0]) & set(times[1])
    assert fates[0] != fates[1]


def test_a_server_may_freeze_twice() -> None:
    """Each time loses its own requests, once."""
    frozen = (Failure(end=1.0, kind="freeze"), Failure(start=2.0, end=3.0, kind="freeze"))
    loop, worker = make_leaf_node(Server(failures=frozen))
    requester = RecordingRequester()
    immediate_response(worker, 0.0, requester, 1)
    loop.run(2.0)
    immediate_response(worker, 2.0, requester, 2)
    loop.run(9.0)

    assert [
        ReceivedResponse(1.0, 1, DROPPED),
        ReceivedResponse(3.0, 2, DROPPED),
    ] == requester.responses


def test_a_server_that_hangs_never_answers() -> None:
    """Nobody is told anything, also when the time is over."""
    loop, worker = make_leaf_node(during("hang"))
    requester = RecordingRequester()
    assert immediate_response(worker, 3.0, requester) is None

    loop.run(100.0)

    assert [] == requester.responses


@pytest.mark.parametrize("kind", ["error", "refuse", "hang", "freeze"])
def test_a_failure_may_strike_a_share(kind: str) -> None:
    """With a rate below 1 the others are served, and nothing in progress is dropped."""
    loop, worker = make_leaf_node(during(kind, rate=0.25))
    requester = RecordingRequester()
    immediate_response(worker, 1.5, requester)
    loop.run(3.0)
    assert [] == requester.responses

    served = response_times(worker, [3.0] * 10_000).count(4.0)

    assert pytest.approx(0.75, abs=5 * sqrt(0.25 * 0.75 / 10_000)) == served / 10_000


def test_the_first_failure_that_strikes_decides() -> None:
    """Where two failures meet, the one named first comes first."""
    both = (Failure(end=4.0, kind="error"), Failure(start=2.0, end=6.0, kind="hang"))
    _, worker = make_leaf_node(Server(failures=both))

    assert ["503", "503", "never", 6.0] == response_times(worker, [1.0, 3.0, 5.0, 6.0])
