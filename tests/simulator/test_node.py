"""Leaf nodes: queues, slowdown, crashes and cold starts."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.outcome import SUCCESS, Kind, Outcome
from tarry.simulator.distributions import Fixed
from tarry.simulator.metrics import MetricsRecorder
from tarry.simulator.node import DROPPED, INTERNAL_ERROR, REFUSED
from tarry.simulator.scenario import Failure, Server
from tests.simulator.harness import (
    REPLACEMENT_OFFSET,
    ReceivedResponse,
    RecordingRequester,
    ScriptedDistribution,
    immediate_response,
    make_leaf_node,
    response_times,
    summarize,
)

quarters = st.integers(0, 12).map(lambda number: number / 4)


def test_one_worker_runs_one_request_at_a_time() -> None:
    """A request waits for the previous one, and a free worker starts at once."""
    _, node = make_leaf_node(Server(latency=Fixed(1.0), concurrency=1))

    assert [1.0, 2.0, 3.0, 6.0] == response_times(node, [0.0, 0.0, 0.5, 5.0])


def test_rate_limit_admits_a_number_of_requests_in_any_second() -> None:
    """The third request within a second is rejected; a rejected request does not count."""
    server = Server(latency=Fixed(0.1), rate_limit=2.5, reject_status=429, retry_after=1.0)
    _, node = make_leaf_node(server)

    outcomes = []
    for now in (0.0, 0.5, 0.9, 0.99, 1.0, 1.4, 1.5):
        response = immediate_response(node, now)
        assert response is not None
        outcomes.append(response.outcome)

    assert [True, True, False, False, True, False, True] == [each is SUCCESS for each in outcomes]
    assert Kind.THROTTLED is outcomes[2].kind


@given(
    workers=st.integers(1, 4),
    work=st.lists(st.tuples(quarters, quarters), min_size=1, max_size=30),
)
def test_first_come_first_served(workers: int, work: list[tuple[float, float]]) -> None:
    """Requests start in order, as soon as a worker is free, and each worker runs one at a time."""
    latency = ScriptedDistribution(*(duration for _, duration in work))
    _, node = make_leaf_node(Server(latency=latency, concurrency=workers))
    now, done = 0.0, []
    for gap, duration in work:
        now += gap
        response = immediate_response(node, now)
        assert response is not None
        done.append((now, response.when - duration, response.when))

    starts, ends = [start for _, start, _ in done], {end for _, _, end in done}
    assert sorted(starts) == starts
    for arrival, start, _ in done:
        assert start == arrival or (start > arrival and start in ends)
        assert sum(other <= start < end for _, other, end in done) <= workers


def test_load_counts_the_queue_too() -> None:
    """Queued requests count as load from their arrival to their response."""
    _, node = make_leaf_node(Server(latency=Fixed(1.0), concurrency=1))
    response_times(node, [0.0, 0.0, 0.0])

    assert [3, 2, 1, 0] == [node.load_at(now) for now in (0.0, 1.0, 2.5, 3.0)]


def test_a_full_queue_rejects() -> None:
    """A request that finds the queue full is rejected at once and costs no work."""
    _, node = make_leaf_node(Server(latency=Fixed(1.0), concurrency=2, queue=1))

    assert [1.0, 1.0, 2.0, "503", "503"] == response_times(node, [0.0] * 5)
    assert [2.0, 3.0, "503"] == response_times(node, [1.0] * 3)


def test_without_a_queue_no_request_waits() -> None:
    """With a queue of 0, a request is rejected when all workers are busy."""
    _, node = make_leaf_node(Server(latency=Fixed(1.0), concurrency=1, queue=0))

    assert [1.0, "503", 2.0] == response_times(node, [0.0, 0.5, 1.0])


@pytest.mark.parametrize(("retry_after", "expected"), [(None, None), (0.25, 0.25), (7.0, 7.0)])
def test_rejection_has_the_retry_after_hint(
    retry_after: float | None, expected: float | None
) -> None:
    """A rejection has the `retry_after` of the server as its hint, if there is one."""
    _, node = make_leaf_node(
        Server(latency=Fixed(1.0), concurrency=1, queue=0, retry_after=retry_after)
    )
    immediate_response(node, 0.0)

    rejected = immediate_response(node, 0.0)

    assert rejected is not None
    assert (0.0, Kind.TRANSIENT, "503") == (
        rejected.when,
        rejected.outcome.kind,
        rejected.outcome.detail,
    )
    hint = rejected.outcome.hint
    assert expected == (None if hint is None else hint.delay)


def test_requests_in_progress_slow_down_a_request() -> None:
    """Each other request in progress at the arrival adds the slowdown."""
    _, node = make_leaf_node(Server(latency=Fixed(1.0), slowdown=0.5))

    assert [1.0, 1.5, 2.0, 7.0] == response_times(node, [0.0, 0.0, 0.0, 6.0])


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_share_of_requests_fails_after_its_latency(rate: float) -> None:
    """A share of `failure_rate` of the requests fails, at the time of a success."""
    _, node = make_leaf_node(Server(latency=Fixed(1.0), failure_rate=rate))
    responses = [immediate_response(node, float(now)) for now in range(10_000)]

    failed = [
        response
        for response in responses
        if response is not None and response.outcome is INTERNAL_ERROR
    ]
    margin = 5 * sqrt(rate * (1 - rate) / 10_000)
    assert pytest.approx(rate, abs=margin) == len(failed) / 10_000
    assert [now + 1.0 for now in range(10_000)] == [
        response.when for response in responses if response
    ]
    assert (Kind.TRANSIENT, "500") == (INTERNAL_ERROR.kind, INTERNAL_ERROR.detail)


def test_every_arriving_request_is_counted() -> None:
    """Successes, rejections and refusals are all counted."""
    loop, node = make_leaf_node(
        Server(latency=Fixed(1.0), concurrency=1, queue=0, failures=(Failure(start=5.0, end=6.0),))
    )
    node.metrics = MetricsRecorder(10.0, 1.0)
    loop.run(5.0)

    response_times(node, [0.0, 0.0, 5.5])

    assert [2, 0, 0, 0, 0, 1] == summarize(node.metrics).series["requests"][:6]


# --- crashes -------------------------------------------------------------------------------------

FRAGILE = Server(latency=Fixed(1.0), crash_above=2, restart_after=5.0)


def test_one_request_too_many_crashes_the_server() -> None:
    """A crash drops all requests in the order of arrival, and the one that caused it."""
    _, node = make_leaf_node(FRAGILE)
    requester = RecordingRequester()
    immediate_response(node, 0.0, requester, 1)
    immediate_response(node, 0.25, requester, 2)

    assert ReceivedResponse(0.5, 3, DROPPED) == immediate_response(node, 0.5, requester, 3)

    assert [
        ReceivedResponse(0.5, 1, DROPPED),
        ReceivedResponse(0.5, 2, DROPPED),
    ] == requester.responses
    assert (1, 0) == (node.crash_count, node.load_at(0.5))


def test_crashed_server_refuses_until_its_restart() -> None:
    """For `restart_after` seconds connections are refused."""
    _, node = make_leaf_node(FRAGILE)
    response_times(node, [0.0, 0.0, 0.0])

    refused = ["connection refused"] * 3
    assert [*refused, 6.0, 6.0] == response_times(node, [0.0, 3.0, 4.99, 5.0, 5.0])
    assert 1 == node.crash_count
    assert ["connection reset"] == response_times(node, [5.5])
    assert 2 == node.crash_count


def test_crash_drops_only_requests_in_progress() -> None:
    """A request that ends at the moment of the crash is not dropped."""
    _, node = make_leaf_node(
        Server(latency=ScriptedDistribution(1.0, 2.0, 9.0, 9.0, 9.0), crash_above=2)
    )
    requester = RecordingRequester()
    for number, now in enumerate([0.0, 0.0, 1.0, 2.0, 2.0], 1):
        immediate_response(node, now, requester, number)

    assert 1 == node.crash_count
    assert [3, 4] == [response.number for response in requester.responses]


def test_after_a_crash_every_worker_is_free() -> None:
    """After a restart there is no queue."""
    server = Server(latency=Fixed(2.0), concurrency=1, crash_above=3, restart_after=1.0)
    _, node = make_leaf_node(server)
    response_times(node, [0.0] * 4)

    assert [3.0, 5.0] == response_times(node, [1.0, 1.0])


def test_answered_requests_are_removed() -> None:
    """A node stores at most about 1,000 answered requests, and a crash drops none of them."""
    _, node = make_leaf_node(FRAGILE)
    requester = RecordingRequester()
    for number in range(5_000):
        immediate_response(node, number * 1.0, requester, number)
        assert len(node._recent_requests) <= 1_003

    immediate_response(node, 4_999.25, requester, 5_000)
    immediate_response(node, 4_999.5, requester, 5_001)

    assert [4_999, 5_000] == [response.number for response in requester.responses]


# --- cold starts ---------------------------------------------------------------------------------


def test_restarted_server_is_cold_and_warms_up() -> None:
    """After a restart requests take `cold_factor` times as long, decreasing over the warm-up."""
    outage = Failure(start=1.0, end=5.0)
    loop, node = make_leaf_node(
        Server(latency=Fixed(1.0), warmup=10.0, cold_factor=3.0, failures=(outage,))
    )

    assert [1.0] == response_times(node, [0.0])
    loop.run(5.0)
    assert [8.0, 12.0, 14.0, 16.0, 101.0] == response_times(node, [5.0, 10.0, 12.5, 15.0, 100.0])


def test_cold_factor_is_that_of_the_start_of_work() -> None:
    """A queued request has the cold factor of the time when its work starts."""
    outage = Failure(end=5.0)
    loop, node = make_leaf_node(
        Server(latency=Fixed(1.0), concurrency=1, warmup=10.0, cold_factor=3.0, failures=(outage,))
    )
    loop.run(5.0)

    # Work starts at 5, 8 and 10.4 s, after 0 %, 30 % and 54 % of the warm-up.
    assert pytest.approx([8.0, 10.4, 12.32]) == response_times(node, [5.0, 5.0, 5.0])


@pytest.mark.parametrize("inner_first", [True, False])
def test_outage_within_an_outage_has_no_effect(inner_first: bool) -> None:
    """The server restarts, cold, at the end of the longer outage."""
    inner, outer = Failure(start=2.0, end=3.0), Failure(start=1.0, end=8.0)
    failures = (inner, outer) if inner_first else (outer, inner)
    server = Server(
        latency=Fixed(1.0), concurrency=1, warmup=10.0, cold_factor=3.0, failures=failures
    )
    loop, node = make_leaf_node(server)
    loop.run(8.0)

    assert [11.0] == response_times(node, [8.0])


def test_freeze_without_requests_ends_during_another_freeze() -> None:
    """A freeze that affected no request may end while another freeze lasts."""
    partial = Failure(start=1.0, end=3.0, kind="freeze", rate=0.5)
    full = Failure(start=2.0, end=10.0, kind="freeze")
    loop, node = make_leaf_node(Server(failures=(partial, full)))
    loop.run(20.0)

    assert 0 == node.in_progress_at(20.0)


# --- properties ----------------------------------------------------------------------------------


@given(
    st.integers(0, 1_000),
    st.lists(st.tuples(quarters, quarters), min_size=1, max_size=40),
    st.sampled_from([None, 1, 2, 4]),
    st.sampled_from([None, 3, 5]),
    st.sampled_from([0.5, 1.0]),
)
def test_every_request_is_answered_or_dropped_exactly_once(
    seed: int,
    work: list[tuple[float, float]],
    concurrency: int | None,
    queue: int | None,
    freeze_rate: float,
) -> None:
    """Each request gets exactly one response, also after crashes, outages and freezes."""
    server = Server(
        latency=ScriptedDistribution(*(duration for _, duration in work)),
        concurrency=concurrency,
        queue=None if concurrency is None else queue,
        crash_above=3,
        restart_after=1.0,
        failures=(
            Failure(start=4.0, end=6.0),
            Failure(start=8.0, end=9.0, kind="freeze", rate=freeze_rate),
        ),
    )
    loop, node = make_leaf_node(server, seed)
    responses: list[ReceivedResponse] = []
    planned: dict[int, ReceivedResponse | None] = {}
    now = 0.0
    for number, (gap, _) in enumerate(work):
        now += gap
        loop.run(now)
        planned[number] = immediate_response(node, now, RecordingRequester(responses), number)
    loop.run(1_000.0)

    dropped = {response.number % REPLACEMENT_OFFSET: response for response in responses}
    assert len(responses) == len(dropped)
    for number, plan in planned.items():
        if plan is None:
            assert dropped[number].when <= 9.0
        elif number in dropped:
            assert SUCCESS is plan.outcome
            assert dropped[number].when < plan.when or 9.0 == dropped[number].when
        else:
            assert plan.outcome in (SUCCESS, REFUSED, DROPPED) or "503" == plan.outcome.detail


def test_failures_of_servers_are_retryable() -> None:
    """Each failure that a server returns may be retried and counts as a failure."""
    for outcome in (REFUSED, DROPPED, INTERNAL_ERROR):
        assert isinstance(outcome, Outcome)
        assert (True, False) == (
            outcome.repeatable and outcome.counts_as_failure,
            outcome.retried_below,
        )
