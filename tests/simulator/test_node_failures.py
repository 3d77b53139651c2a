"""Each kind of failure, and its effect on the requests of a server."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from tarry.simulator.distributions import Exponential, Fixed
from tarry.simulator.event_loop import EventLoop
from tarry.simulator.node import DROPPED, LeafNode
from tarry.simulator.scenario import Failure, Server
from tests.simulator.harness import (
    REPLACEMENT_OFFSET,
    ReceivedResponse,
    RecordingRequester,
    immediate_response,
    make_leaf_node,
    response_times,
)


def failing_server(kind: str, **settings: Any) -> Server:
    """Return a server that fails from second 2 to 4."""
    return Server(
        latency=Fixed(1.0), failures=(Failure(start=2.0, end=4.0, kind=kind, **settings),)
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("error", "503"),
        ("refuse", "connection refused"),
        ("hang", "never"),
        ("freeze", "never"),
    ],
)
def test_failure_lasts_from_its_start_until_before_its_end(kind: str, expected: str) -> None:
    """Requests from the start until before the end fail, and all others succeed."""
    _, node = make_leaf_node(failing_server(kind))

    assert [2.75, expected, expected, 5.0] == response_times(node, [1.75, 2.0, 3.75, 4.0])


@pytest.mark.parametrize(("kind", "when"), [("error", 3.0), ("refuse", 3.0)])
def test_error_and_refusal_are_immediate(kind: str, when: float) -> None:
    """An error or a refusal is returned at once and adds no load."""
    _, node = make_leaf_node(failing_server(kind))

    response = immediate_response(node, 3.0)

    assert response is not None
    assert (when, 0) == (response.when, node.load_at(3.0))


@pytest.mark.parametrize(("retry_after", "expected"), [(None, None), (1.5, 1.5)])
def test_error_has_the_retry_after_hint(retry_after: float | None, expected: float | None) -> None:
    """An error has the `retry_after` of the failure as its hint, not that of the server."""
    failure = Failure(end=4.0, kind="error", retry_after=retry_after)
    _, node = make_leaf_node(Server(retry_after=9.0, failures=(failure,)))

    response = immediate_response(node, 3.0)

    assert response is not None
    hint = response.outcome.hint
    assert expected == (None if hint is None else hint.delay)


def test_refusal_drops_requests_in_progress() -> None:
    """A server that starts to refuse connections drops its requests in progress."""
    loop, node = make_leaf_node(failing_server("refuse"))
    requester = RecordingRequester()
    immediate_response(node, 0.0, requester, 1)
    immediate_response(node, 1.0, requester, 2)
    immediate_response(node, 1.5, requester, 3)

    loop.run(3.0)

    assert [ReceivedResponse(2.0, 3, DROPPED)] == requester.responses
    assert 0 == node.crash_count


def test_freeze_includes_requests_in_progress() -> None:
    """A freeze drops requests in progress, and does not affect requests that ended before it."""
    loop, node = make_leaf_node(failing_server("freeze"))
    requester = RecordingRequester()
    for number, now in enumerate([0.5, 1.0, 1.25, 1.5], 1):
        immediate_response(node, now, requester, number)
    loop.run(3.0)
    assert [] == requester.responses
    assert (2, 0) == (node.in_progress_at(3.0), node.load_at(3.0))

    loop.run(9.0)

    assert [
        ReceivedResponse(4.0, REPLACEMENT_OFFSET + number, DROPPED) for number in (3, 4)
    ] == requester.responses
    assert 0 == node.in_progress_at(9.0)


def test_after_a_freeze_every_worker_is_free_and_cold() -> None:
    """At the end of a freeze the server restarts: no worker is busy, and the warm-up begins."""
    frozen = Failure(start=2.0, end=4.0, kind="freeze")
    loop, node = make_leaf_node(
        Server(latency=Fixed(5.0), concurrency=1, warmup=10.0, cold_factor=2.0, failures=(frozen,))
    )
    response_times(node, [0.0, 0.0])
    loop.run(4.0)

    assert [14.0] == response_times(node, [4.0])


def test_outage_during_a_freeze_drops_frozen_requests() -> None:
    """A server that goes down during a freeze drops all requests when it goes down."""
    failures = (Failure(start=3.0, end=5.0), Failure(start=2.0, end=9.0, kind="freeze"))
    loop, node = make_leaf_node(Server(latency=Fixed(2.0), failures=failures))
    requester = RecordingRequester()
    immediate_response(node, 1.0, requester, 1)
    loop.run(2.5)
    immediate_response(node, 2.5, requester, 2)
    loop.run(20.0)

    assert [
        ReceivedResponse(3.0, REPLACEMENT_OFFSET + 1, DROPPED),
        ReceivedResponse(3.0, 2, DROPPED),
    ] == requester.responses


def test_overlapping_freeze_keeps_requests_frozen() -> None:
    """The end of a freeze drops no request while another freeze lasts."""
    failures = (
        Failure(start=1.0, end=9.0, kind="freeze"),
        Failure(start=2.0, end=4.0, kind="freeze"),
    )
    loop, node = make_leaf_node(Server(latency=Fixed(5.0), failures=failures))
    requester = RecordingRequester()
    immediate_response(node, 0.5, requester, 1)
    loop.run(3.0)
    immediate_response(node, 3.0, requester, 2)
    loop.run(9.0)
    assert ([], 2) == (requester.responses, node.in_progress_at(8.0))

    loop.run(20.0)

    assert [
        ReceivedResponse(9.0, REPLACEMENT_OFFSET + 1, DROPPED),
        ReceivedResponse(9.0, 2, DROPPED),
    ] == requester.responses


def test_crash_drops_frozen_requests() -> None:
    frozen = Failure(end=50.0, kind="freeze", rate=0.5)
    loop, node = make_leaf_node(Server(latency=Fixed(100.0), crash_above=5, failures=(frozen,)))
    requester = RecordingRequester()
    sent = 0
    while not node.crash_count:
        sent += 1
        immediate_response(node, 1.0, requester, sent)
    loop.run(60.0)

    assert {(1.0, number) for number in range(1, sent)} == {
        (response.when, response.number) for response in requester.responses
    }
    assert (sent - 1, 0) == (len(requester.responses), node.in_progress_at(60.0))
    assert sent > 6


def test_servers_have_separate_random_sources() -> None:
    """Two servers draw different latencies and failures."""
    server = Server(latency=Exponential(1.0), failure_rate=0.5)
    loop = EventLoop(0)
    first, second, same_name = (
        LeafNode(name, server, loop) for name in ("first", "second", "first")
    )
    responses = [
        [immediate_response(node, float(now)) for now in range(50)]
        for node in (first, second, same_name)
    ]
    times = [[response.when for response in each if response] for each in responses]
    outcomes = [[response.outcome for response in each if response] for each in responses]

    assert (times[0], outcomes[0]) == (times[2], outcomes[2])
    assert set() == set(times[0]) & set(times[1])
    assert outcomes[0] != outcomes[1]


@pytest.mark.parametrize("kind", ["error", "refuse", "hang", "freeze"])
def test_failure_may_affect_a_share_of_requests(kind: str) -> None:
    """A failure with a rate below 1 affects this share, and drops no request in progress."""
    loop, node = make_leaf_node(failing_server(kind, rate=0.25))
    requester = RecordingRequester()
    immediate_response(node, 1.5, requester)
    loop.run(3.0)
    assert [] == requester.responses

    success_count = response_times(node, [3.0] * 10_000).count(4.0)

    assert pytest.approx(0.75, abs=5 * sqrt(0.25 * 0.75 / 10_000)) == success_count / 10_000


def test_first_listed_failure_applies() -> None:
    """Of two failures at the same time, the first in the list applies."""
    both = (Failure(end=4.0, kind="error"), Failure(start=2.0, end=6.0, kind="hang"))
    _, node = make_leaf_node(Server(failures=both))

    assert ["503", "503", "never", 6.0] == response_times(node, [1.0, 3.0, 5.0, 6.0])
