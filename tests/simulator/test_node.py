"""Servers at work: queues, slowness, crashes and cold starts."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.outcome import SUCCESS, Kind, Outcome
from tarry.simulator.distributions import Fixed
from tarry.simulator.event_loop import EventLoop
from tarry.simulator.metrics import MetricsRecorder
from tarry.simulator.node import DROPPED, INTERNAL_ERROR, REFUSED, Node
from tarry.simulator.scenario import Failure, Server
from tests.simulator.harness import (
    DISCARDED,
    ReceivedResponse,
    RecordingRequester,
    ScriptedDistribution,
    immediate_response,
    make_leaf_node,
    response_times,
)

quarters = st.integers(0, 12).map(lambda number: number / 4)


# --- work ----------------------------------------------------------------------------------------


def test_without_a_bound_all_requests_run_side_by_side() -> None:
    """Each takes its latency, however many there are."""
    _, worker = make_leaf_node(Server(latency=Fixed(1.0)))

    assert [1.0, 1.0, 1.5] == response_times(worker, [0.0, 0.0, 0.5])
    assert [3, 1, 0] == [worker.load(now) for now in (0.5, 1.0, 1.5)]


def test_one_worker_does_one_after_the_other() -> None:
    """A request waits for the one before it, and a free worker for nobody."""
    _, worker = make_leaf_node(Server(latency=Fixed(1.0), concurrency=1))

    assert [1.0, 2.0, 3.0, 6.0] == response_times(worker, [0.0, 0.0, 0.5, 5.0])


def test_workers_work_side_by_side() -> None:
    """With two workers, the third request takes the place of whoever is ready first."""
    _, worker = make_leaf_node(
        Server(latency=ScriptedDistribution(4.0, 1.0, 1.0, 1.0), concurrency=2)
    )

    assert [4.0, 1.0, 2.0, 3.0] == response_times(worker, [0.0] * 4)


@given(
    workers=st.integers(1, 4),
    work=st.lists(st.tuples(quarters, quarters), min_size=1, max_size=30),
)
def test_first_come_first_served(workers: int, work: list[tuple[float, float]]) -> None:
    """No worker does two at a time, none idles while one waits, and nobody overtakes."""
    latency = ScriptedDistribution(*(takes for _, takes in work))
    _, worker = make_leaf_node(Server(latency=latency, concurrency=workers))
    now, done = 0.0, []
    for gap, takes in work:
        now += gap
        answer = immediate_response(worker, now)
        assert answer is not None
        done.append((now, answer.when - takes, answer.when))

    starts, finishes = [begin for _, begin, _ in done], {end for _, _, end in done}
    assert sorted(starts) == starts
    for arrival, begin, _ in done:
        assert begin == arrival or (begin > arrival and begin in finishes)
        assert sum(first <= begin < last for _, first, last in done) <= workers


def test_load_counts_the_queue_too() -> None:
    """Requests are in progress from their arrival until they are answered."""
    _, worker = make_leaf_node(Server(latency=Fixed(1.0), concurrency=1))
    response_times(worker, [0.0, 0.0, 0.0])

    assert [3, 2, 1, 0] == [worker.load(now) for now in (0.0, 1.0, 2.5, 3.0)]


def test_a_full_queue_rejects() -> None:
    """What finds every place taken is answered at once, and costs no work."""
    _, worker = make_leaf_node(Server(latency=Fixed(1.0), concurrency=2, queue=1))

    assert [1.0, 1.0, 2.0, "503", "503"] == response_times(worker, [0.0] * 5)
    assert [2.0, 3.0, "503"] == response_times(worker, [1.0] * 3)


def test_without_a_queue_nobody_waits() -> None:
    """A queue of 0 leaves the workers alone."""
    _, worker = make_leaf_node(Server(latency=Fixed(1.0), concurrency=1, queue=0))

    assert [1.0, "503", 2.0] == response_times(worker, [0.0, 0.5, 1.0])


@pytest.mark.parametrize(("retry_after", "expected"), [(None, None), (0.25, 0.25), (7.0, 7.0)])
def test_a_rejection_says_when_to_come_back(
    retry_after: float | None, expected: float | None
) -> None:
    """The hint of a 503 is the server's `retry_after`, if it has one."""
    _, worker = make_leaf_node(
        Server(latency=Fixed(1.0), concurrency=1, queue=0, retry_after=retry_after)
    )
    immediate_response(worker, 0.0)

    rejected = immediate_response(worker, 0.0)

    assert rejected is not None
    assert (0.0, Kind.TRANSIENT, "503") == (
        rejected.when,
        rejected.outcome.kind,
        rejected.outcome.detail,
    )
    hint = rejected.outcome.hint
    assert expected == (None if hint is None else hint.delay)


def test_load_slows_down() -> None:
    """Each other request in progress at the arrival adds its part."""
    _, worker = make_leaf_node(Server(latency=Fixed(1.0), slowdown=0.5))

    assert [1.0, 1.5, 2.0, 7.0] == response_times(worker, [0.0, 0.0, 0.0, 6.0])


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_a_share_fails_after_its_work(rate: float) -> None:
    """`failure_rate` of the requests end with an error, when a success would have come."""
    _, worker = make_leaf_node(Server(latency=Fixed(1.0), failure_rate=rate))
    answers = [immediate_response(worker, float(now)) for now in range(10_000)]

    failed = [
        answer for answer in answers if answer is not None and answer.outcome is INTERNAL_ERROR
    ]
    margin = 5 * sqrt(rate * (1 - rate) / 10_000)
    assert pytest.approx(rate, abs=margin) == len(failed) / 10_000
    assert [now + 1.0 for now in range(10_000)] == [answer.when for answer in answers if answer]
    assert (Kind.TRANSIENT, "500") == (INTERNAL_ERROR.kind, INTERNAL_ERROR.detail)


def test_what_arrives_is_counted_whatever_becomes_of_it() -> None:
    """A meter at a server sees successes, rejections and refusals alike."""
    loop, worker = make_leaf_node(
        Server(latency=Fixed(1.0), concurrency=1, queue=0, failures=(Failure(start=5.0, end=6.0),))
    )
    worker.metrics = MetricsRecorder(10.0, 1.0)
    loop.run(5.0)

    response_times(worker, [0.0, 0.0, 5.5])

    assert [2, 0, 0, 0, 0, 1] == worker.metrics._requests[:6]


# --- crashes -------------------------------------------------------------------------------------

FRAGILE = Server(latency=Fixed(1.0), crash_above=2, restart_after=5.0)


def test_one_request_too_many_kills_the_server() -> None:
    """It drops what it had in the order of arrival, and the new one too."""
    _, worker = make_leaf_node(FRAGILE)
    requester = RecordingRequester()
    immediate_response(worker, 0.0, requester, 1)
    immediate_response(worker, 0.25, requester, 2)

    assert ReceivedResponse(0.5, 3, DROPPED) == immediate_response(worker, 0.5, requester, 3)

    assert [
        ReceivedResponse(0.5, 1, DROPPED),
        ReceivedResponse(0.5, 2, DROPPED),
    ] == requester.responses
    assert (1, 0) == (worker.crashes, worker.load(0.5))


def test_a_dead_server_refuses_until_it_is_back() -> None:
    """No connection is made for `restart_after` seconds, and then all is as before."""
    _, worker = make_leaf_node(FRAGILE)
    response_times(worker, [0.0, 0.0, 0.0])

    refused = ["connection refused"] * 3
    assert [*refused, 6.0, 6.0] == response_times(worker, [0.0, 3.0, 4.99, 5.0, 5.0])
    assert 1 == worker.crashes
    assert ["connection reset"] == response_times(worker, [5.5])
    assert 2 == worker.crashes


def test_what_was_answered_before_the_crash_stays_answered() -> None:
    """Only requests in progress are lost; one that ends in that very moment is not."""
    _, worker = make_leaf_node(
        Server(latency=ScriptedDistribution(1.0, 2.0, 9.0, 9.0, 9.0), crash_above=2)
    )
    requester = RecordingRequester()
    for number, now in enumerate([0.0, 0.0, 1.0, 2.0, 2.0], 1):
        immediate_response(worker, now, requester, number)

    assert 1 == worker.crashes
    assert [3, 4] == [answer.number for answer in requester.responses]


def test_after_a_crash_every_worker_is_free() -> None:
    """A new process has no queue."""
    server = Server(latency=Fixed(2.0), concurrency=1, crash_above=3, restart_after=1.0)
    _, worker = make_leaf_node(server)
    response_times(worker, [0.0] * 4)

    assert [3.0, 5.0] == response_times(worker, [1.0, 1.0])


def test_a_fragile_server_forgets_whom_it_has_answered() -> None:
    """After thousands of requests it remembers few, and loses only those in progress."""
    _, worker = make_leaf_node(FRAGILE)
    requester = RecordingRequester()
    for number in range(5_000):
        immediate_response(worker, number * 1.0, requester, number)
        assert len(worker._unanswered) <= 1_003

    immediate_response(worker, 4_999.25, requester, 5_000)
    immediate_response(worker, 4_999.5, requester, 5_001)

    assert [4_999, 5_000] == [answer.number for answer in requester.responses]


def test_a_sturdy_server_remembers_nobody() -> None:
    """Where nothing can be dropped, nothing is kept."""
    _, worker = make_leaf_node(Server(latency=Fixed(1.0)))
    response_times(worker, [0.0] * 10)

    assert [] == worker._unanswered


# --- cold starts ---------------------------------------------------------------------------------


def test_a_new_process_is_cold_and_warms_up() -> None:
    """Work takes `cold_factor` times as long at first, and less so from second to second."""
    away = Failure(start=1.0, end=5.0)
    loop, worker = make_leaf_node(
        Server(latency=Fixed(1.0), warmup=10.0, cold_factor=3.0, failures=(away,))
    )

    assert [1.0] == response_times(worker, [0.0])
    loop.run(5.0)
    assert [8.0, 12.0, 14.0, 16.0, 101.0] == response_times(worker, [5.0, 10.0, 12.5, 15.0, 100.0])


def test_a_crash_leaves_it_cold_too() -> None:
    """The warm-up counts from the moment at which it is back."""
    server = Server(
        latency=Fixed(1.0), crash_above=1, restart_after=4.0, warmup=4.0, cold_factor=2.0
    )
    _, worker = make_leaf_node(server)

    assert [1.0, "connection reset", 6.0, 9.0] == response_times(worker, [0.0, 0.0, 4.0, 8.0])


def test_the_warmup_is_that_of_the_moment_at_which_work_begins() -> None:
    """What waits in a queue until caches are warmer takes less long than its arrival would say."""
    away = Failure(end=5.0)
    loop, worker = make_leaf_node(
        Server(latency=Fixed(1.0), concurrency=1, warmup=10.0, cold_factor=3.0, failures=(away,))
    )
    loop.run(5.0)

    # They begin at 5, 8 and 10.4: 0 %, 30 % and 54 % of the way from 3 to 1.
    assert pytest.approx([8.0, 10.4, 12.32]) == response_times(worker, [5.0, 5.0, 5.0])


def test_without_a_warmup_it_is_never_cold() -> None:
    """`cold_factor` alone says for how many seconds: none."""
    loop, worker = make_leaf_node(
        Server(latency=Fixed(1.0), cold_factor=9.0, failures=(Failure(end=5.0),))
    )
    loop.run(5.0)

    assert [6.0] == response_times(worker, [5.0])


@pytest.mark.parametrize("inner_first", [True, False])
def test_of_two_outages_the_later_end_counts(inner_first: bool) -> None:
    """An outage within an outage brings nobody back early, nor warm."""
    inner, outer = Failure(start=2.0, end=3.0), Failure(start=1.0, end=8.0)
    failures = (inner, outer) if inner_first else (outer, inner)
    server = Server(
        latency=Fixed(1.0), concurrency=1, warmup=10.0, cold_factor=3.0, failures=failures
    )
    loop, worker = make_leaf_node(server)
    loop.run(8.0)

    assert [11.0] == response_times(worker, [8.0])


# --- whatever happens ----------------------------------------------------------------------------


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
    share: float,
) -> None:
    """Whatever a fragile server goes through, nobody gets two answers."""
    server = Server(
        latency=ScriptedDistribution(*(takes for _, takes in work)),
        concurrency=concurrency,
        queue=None if concurrency is None else queue,
        crash_above=3,
        restart_after=1.0,
        failures=(
            Failure(start=4.0, end=6.0),
            Failure(start=8.0, end=9.0, kind="freeze", rate=share),
        ),
    )
    loop, worker = make_leaf_node(server, seed)
    told: list[ReceivedResponse] = []
    planned: dict[int, ReceivedResponse | None] = {}
    now = 0.0
    for number, (gap, _) in enumerate(work):
        now += gap
        loop.run(now)
        planned[number] = immediate_response(worker, now, RecordingRequester(told), number)
    loop.run(1_000.0)

    dropped = {answer.number % DISCARDED: answer for answer in told}
    assert len(told) == len(dropped)
    for number, plan in planned.items():
        if plan is None:
            assert dropped[number].when <= 9.0
        elif number in dropped:
            assert SUCCESS is plan.outcome
            assert dropped[number].when < plan.when or 9.0 == dropped[number].when
        else:
            assert plan.outcome in (SUCCESS, REFUSED, DROPPED) or "503" == plan.outcome.detail


def test_a_node_is_one_kind_or_another() -> None:
    """What all servers share does no work by itself."""
    node = Node("server", Server(), EventLoop(0))

    for act in (
        lambda: node.load(0.0),
        lambda: node.handle(0.0, RecordingRequester(), 1),
        lambda: node.pending_requests(0.0),
        lambda: node.restart(1.0),
    ):
        with pytest.raises(NotImplementedError):
            act()


def test_what_servers_answer_can_be_repeated() -> None:
    """Each failure that a server gives is one that a policy may retry."""
    for outcome in (REFUSED, DROPPED, INTERNAL_ERROR):
        assert isinstance(outcome, Outcome)
        assert (True, False) == (outcome.safe and outcome.counts_as_failure, outcome.retried)
