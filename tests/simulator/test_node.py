"""Servers at work: queues, slowness, crashes, and each way to fail."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.outcome import SUCCESS, Kind, Outcome
from tarry.simulator.distributions import Fixed
from tarry.simulator.meter import Meter
from tarry.simulator.node import DROPPED, ERROR, REFUSED, Node, Worker
from tarry.simulator.scenario import Failure, Server
from tarry.simulator.world import World
from tests.simulator.engine import Answer, Asker, Script

quarters = st.integers(0, 12).map(lambda number: number / 4)


def worker_of(server: Server, seed: int = 0) -> tuple[World, Worker]:
    """Return a server at work, and its world."""
    world = World(seed)
    return world, Worker(server, world)


def taken(node: Node, now: float, asker: Asker | None = None, number: int = 1) -> Answer | None:
    """Return the answer that a request gets at once, if any."""
    answer = node.take(now, Asker() if asker is None else asker, number)
    return None if answer is None else Answer(answer[0], number, answer[1])


def ends(node: Node, times: list[float]) -> list[float | str]:
    """Return when each of the requests is answered; what is not a success has its detail."""
    answers = [taken(node, now) for now in times]
    return [
        "never"
        if answer is None
        else answer.when
        if answer.outcome is SUCCESS
        else answer.outcome.detail
        for answer in answers
    ]


# --- work ----------------------------------------------------------------------------------------


def test_without_a_bound_all_requests_run_side_by_side() -> None:
    """Each takes its latency, however many there are."""
    _, worker = worker_of(Server(latency=Fixed(1.0)))

    assert [1.0, 1.0, 1.5] == ends(worker, [0.0, 0.0, 0.5])
    assert [3, 1, 0] == [worker.load(now) for now in (0.5, 1.0, 1.5)]


def test_one_worker_does_one_after_the_other() -> None:
    """A request waits for the one before it, and a free worker for nobody."""
    _, worker = worker_of(Server(latency=Fixed(1.0), concurrency=1))

    assert [1.0, 2.0, 3.0, 6.0] == ends(worker, [0.0, 0.0, 0.5, 5.0])


def test_workers_work_side_by_side() -> None:
    """With two workers, the third request takes the place of whoever is ready first."""
    _, worker = worker_of(Server(latency=Script(4.0, 1.0, 1.0, 1.0), concurrency=2))

    assert [4.0, 1.0, 2.0, 3.0] == ends(worker, [0.0] * 4)


@given(
    workers=st.integers(1, 4),
    work=st.lists(st.tuples(quarters, quarters), min_size=1, max_size=30),
)
def test_first_come_first_served(workers: int, work: list[tuple[float, float]]) -> None:
    """No worker does two at a time, none idles while one waits, and nobody overtakes."""
    latency = Script(*(takes for _, takes in work))
    _, worker = worker_of(Server(latency=latency, concurrency=workers))
    now, done = 0.0, []
    for gap, takes in work:
        now += gap
        answer = taken(worker, now)
        assert answer is not None
        done.append((now, answer.when - takes, answer.when))

    begins, finishes = [begin for _, begin, _ in done], {end for _, _, end in done}
    assert sorted(begins) == begins
    for arrival, begin, _ in done:
        assert begin == arrival or (begin > arrival and begin in finishes)
        assert sum(first <= begin < last for _, first, last in done) <= workers


def test_load_counts_the_queue_too() -> None:
    """Requests are in progress from their arrival until they are answered."""
    _, worker = worker_of(Server(latency=Fixed(1.0), concurrency=1))
    ends(worker, [0.0, 0.0, 0.0])

    assert [3, 2, 1, 0] == [worker.load(now) for now in (0.0, 1.0, 2.5, 3.0)]


def test_a_full_queue_rejects() -> None:
    """What finds every place taken is answered at once, and costs no work."""
    _, worker = worker_of(Server(latency=Fixed(1.0), concurrency=2, queue=1))

    assert [1.0, 1.0, 2.0, "503", "503"] == ends(worker, [0.0] * 5)
    assert [2.0, 3.0, "503"] == ends(worker, [1.0] * 3)


def test_without_a_queue_nobody_waits() -> None:
    """A queue of 0 leaves the workers alone."""
    _, worker = worker_of(Server(latency=Fixed(1.0), concurrency=1, queue=0))

    assert [1.0, "503", 2.0] == ends(worker, [0.0, 0.5, 1.0])


@pytest.mark.parametrize(("retry_after", "expected"), [(None, None), (0.25, 0.25), (7.0, 7.0)])
def test_a_rejection_says_when_to_come_back(
    retry_after: float | None, expected: float | None
) -> None:
    """The hint of a 503 is the server's `retry_after`, if it has one."""
    _, worker = worker_of(
        Server(latency=Fixed(1.0), concurrency=1, queue=0, retry_after=retry_after)
    )
    taken(worker, 0.0)

    rejected = taken(worker, 0.0)

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
    _, worker = worker_of(Server(latency=Fixed(1.0), slowdown=0.5))

    assert [1.0, 1.5, 2.0, 7.0] == ends(worker, [0.0, 0.0, 0.0, 6.0])


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_a_share_fails_after_its_work(rate: float) -> None:
    """`failure_rate` of the requests end with an error, when a success would have come."""
    _, worker = worker_of(Server(latency=Fixed(1.0), failure_rate=rate))
    answers = [taken(worker, float(now)) for now in range(10_000)]

    failed = [answer for answer in answers if answer is not None and answer.outcome is ERROR]
    margin = 5 * sqrt(rate * (1 - rate) / 10_000)
    assert pytest.approx(rate, abs=margin) == len(failed) / 10_000
    assert [now + 1.0 for now in range(10_000)] == [answer.when for answer in answers if answer]
    assert (Kind.TRANSIENT, "500") == (ERROR.kind, ERROR.detail)


def test_what_arrives_is_counted_whatever_becomes_of_it() -> None:
    """A meter at a server sees successes, rejections and refusals alike."""
    world, worker = worker_of(
        Server(latency=Fixed(1.0), concurrency=1, queue=0, failures=(Failure(start=5.0, end=6.0),))
    )
    worker.meter = Meter(10.0, 1.0)
    world.run(5.0)

    ends(worker, [0.0, 0.0, 5.5])

    assert [2, 0, 0, 0, 0, 1] == worker.meter._requests[:6]


# --- crashes -------------------------------------------------------------------------------------

FRAGILE = Server(latency=Fixed(1.0), crash_above=2, restart_after=5.0)


def test_one_request_too_many_kills_the_server() -> None:
    """It drops what it had in the order of arrival, and the new one too."""
    _, worker = worker_of(FRAGILE)
    asker = Asker()
    taken(worker, 0.0, asker, 1)
    taken(worker, 0.25, asker, 2)

    assert Answer(0.5, 3, DROPPED) == taken(worker, 0.5, asker, 3)

    assert [Answer(0.5, 1, DROPPED), Answer(0.5, 2, DROPPED)] == asker.answers
    assert (1, 0) == (worker.crashes, worker.load(0.5))


def test_a_dead_server_refuses_until_it_is_back() -> None:
    """No connection is made for `restart_after` seconds, and then all is as before."""
    _, worker = worker_of(FRAGILE)
    ends(worker, [0.0, 0.0, 0.0])

    refused = ["connection refused"] * 3
    assert [*refused, 6.0, 6.0] == ends(worker, [0.0, 3.0, 4.99, 5.0, 5.0])
    assert 1 == worker.crashes
    assert ["connection reset"] == ends(worker, [5.5])
    assert 2 == worker.crashes


def test_what_was_answered_before_the_crash_stays_answered() -> None:
    """Only requests in progress are lost; one that ends in that very moment is not."""
    _, worker = worker_of(Server(latency=Script(1.0, 2.0, 9.0, 9.0, 9.0), crash_above=2))
    asker = Asker()
    for number, now in enumerate([0.0, 0.0, 1.0, 2.0, 2.0], 1):
        taken(worker, now, asker, number)

    assert 1 == worker.crashes
    assert [3, 4] == [answer.number for answer in asker.answers]


def test_after_a_crash_every_worker_is_free() -> None:
    """A new process has no queue."""
    server = Server(latency=Fixed(2.0), concurrency=1, crash_above=3, restart_after=1.0)
    _, worker = worker_of(server)
    ends(worker, [0.0] * 4)

    assert [3.0, 5.0] == ends(worker, [1.0, 1.0])


def test_a_fragile_server_forgets_whom_it_has_answered() -> None:
    """After thousands of requests it remembers few, and loses only those in progress."""
    _, worker = worker_of(FRAGILE)
    asker = Asker()
    for number in range(5_000):
        taken(worker, number * 1.0, asker, number)
        assert len(worker._open) <= 1_003

    taken(worker, 4_999.25, asker, 5_000)
    taken(worker, 4_999.5, asker, 5_001)

    assert [4_999, 5_000] == [answer.number for answer in asker.answers]


def test_a_sturdy_server_remembers_nobody() -> None:
    """Where nothing can be dropped, nothing is kept."""
    _, worker = worker_of(Server(latency=Fixed(1.0)))
    ends(worker, [0.0] * 10)

    assert [] == worker._open


# --- cold starts ---------------------------------------------------------------------------------


def test_a_new_process_is_cold_and_warms_up() -> None:
    """Work takes `cold` times as long at first, and less so from second to second."""
    away = Failure(start=1.0, end=5.0)
    world, worker = worker_of(Server(latency=Fixed(1.0), warmup=10.0, cold=3.0, failures=(away,)))

    assert [1.0] == ends(worker, [0.0])
    world.run(5.0)
    assert [8.0, 12.0, 14.0, 16.0, 101.0] == ends(worker, [5.0, 10.0, 12.5, 15.0, 100.0])


def test_a_crash_leaves_it_cold_too() -> None:
    """The warm-up counts from the moment at which it is back."""
    server = Server(latency=Fixed(1.0), crash_above=1, restart_after=4.0, warmup=4.0, cold=2.0)
    _, worker = worker_of(server)

    assert [1.0, "connection reset", 6.0, 9.0] == ends(worker, [0.0, 0.0, 4.0, 8.0])


def test_without_a_warmup_it_is_never_cold() -> None:
    """`cold` alone says for how many seconds: none."""
    world, worker = worker_of(Server(latency=Fixed(1.0), cold=9.0, failures=(Failure(end=5.0),)))
    world.run(5.0)

    assert [6.0] == ends(worker, [5.0])


@pytest.mark.parametrize("inner_first", [True, False])
def test_of_two_outages_the_later_end_counts(inner_first: bool) -> None:
    """An outage within an outage brings nobody back early, nor warm."""
    inner, outer = Failure(start=2.0, end=3.0), Failure(start=1.0, end=8.0)
    failures = (inner, outer) if inner_first else (outer, inner)
    server = Server(latency=Fixed(1.0), concurrency=1, warmup=10.0, cold=3.0, failures=failures)
    world, worker = worker_of(server)
    world.run(8.0)

    assert [11.0] == ends(worker, [8.0])


# --- failures ------------------------------------------------------------------------------------


def during(kind: str, **more: float) -> Server:
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
    _, worker = worker_of(during(kind))

    assert [2.75, expected, expected, 5.0] == ends(worker, [1.75, 2.0, 3.75, 4.0])


@pytest.mark.parametrize(("kind", "when"), [("error", 3.0), ("refuse", 3.0)])
def test_a_failure_that_is_told_is_told_at_once(kind: str, when: float) -> None:
    """An error and a refusal take no work."""
    _, worker = worker_of(during(kind))

    answer = taken(worker, 3.0)

    assert answer is not None
    assert (when, 0) == (answer.when, worker.load(3.0))


@pytest.mark.parametrize(("retry_after", "expected"), [(None, None), (1.5, 1.5)])
def test_an_error_says_when_to_come_back(retry_after: float | None, expected: float | None) -> None:
    """The hint is the failure's `retry_after`, not the server's."""
    failure = Failure(end=4.0, kind="error", retry_after=retry_after)
    _, worker = worker_of(Server(retry_after=9.0, failures=(failure,)))

    answer = taken(worker, 3.0)

    assert answer is not None
    hint = answer.outcome.hint
    assert expected == (None if hint is None else hint.delay)


def test_a_refusal_drops_what_is_in_progress() -> None:
    """When a server goes away, its clients lose their connections."""
    world, worker = worker_of(during("refuse"))
    asker = Asker()
    taken(worker, 0.0, asker, 1)
    taken(worker, 1.0, asker, 2)
    taken(worker, 1.5, asker, 3)

    world.run(3.0)

    assert [Answer(2.0, 3, DROPPED)] == asker.answers
    assert 0 == worker.crashes


@pytest.mark.parametrize("kind", ["error", "hang", "freeze"])
def test_other_failures_let_the_work_in_progress_end(kind: str) -> None:
    """Only a refusal ends what was begun before it."""
    world, worker = worker_of(during(kind))
    asker = Asker()
    assert Answer(2.5, 1, SUCCESS) == taken(worker, 1.5, asker)

    world.run(9.0)

    assert [] == asker.answers


def test_a_frozen_server_drops_all_when_the_time_is_over() -> None:
    """It holds whoever comes, and loses them in the order of their coming."""
    world, worker = worker_of(during("freeze"))
    asker = Asker()
    world.run(2.0)
    for number, now in enumerate([2.0, 3.0, 3.5], 1):
        assert taken(worker, now, asker, number) is None

    world.run(4.0)
    assert [] == asker.answers
    world.run(9.0)

    assert [Answer(4.0, number, DROPPED) for number in (1, 2, 3)] == asker.answers
    assert [10.0] == ends(worker, [9.0])


def test_a_server_may_freeze_twice() -> None:
    """Each time loses its own requests, once."""
    frozen = (Failure(end=1.0, kind="freeze"), Failure(start=2.0, end=3.0, kind="freeze"))
    world, worker = worker_of(Server(failures=frozen))
    asker = Asker()
    taken(worker, 0.0, asker, 1)
    world.run(2.0)
    taken(worker, 2.0, asker, 2)
    world.run(9.0)

    assert [Answer(1.0, 1, DROPPED), Answer(3.0, 2, DROPPED)] == asker.answers


def test_a_server_that_hangs_never_answers() -> None:
    """Nobody is told anything, also when the time is over."""
    world, worker = worker_of(during("hang"))
    asker = Asker()
    assert taken(worker, 3.0, asker) is None

    world.run(100.0)

    assert [] == asker.answers


@pytest.mark.parametrize("kind", ["error", "refuse", "hang", "freeze"])
def test_a_failure_may_strike_a_share(kind: str) -> None:
    """With a rate below 1 the others are served, and nothing in progress is dropped."""
    world, worker = worker_of(during(kind, rate=0.25))
    asker = Asker()
    taken(worker, 1.5, asker)
    world.run(3.0)
    assert [] == asker.answers

    served = ends(worker, [3.0] * 10_000).count(4.0)

    assert pytest.approx(0.75, abs=5 * sqrt(0.25 * 0.75 / 10_000)) == served / 10_000


def test_the_first_failure_that_strikes_decides() -> None:
    """Where two failures meet, the one named first comes first."""
    both = (Failure(end=4.0, kind="error"), Failure(start=2.0, end=6.0, kind="hang"))
    _, worker = worker_of(Server(failures=both))

    assert ["503", "503", "never", 6.0] == ends(worker, [1.0, 3.0, 5.0, 6.0])


@given(
    st.integers(0, 1_000),
    st.lists(st.tuples(quarters, quarters), min_size=1, max_size=40),
    st.sampled_from([None, 1, 2, 4]),
    st.sampled_from([None, 0, 2]),
)
def test_every_request_is_answered_or_dropped_exactly_once(
    seed: int, work: list[tuple[float, float]], concurrency: int | None, queue: int | None
) -> None:
    """Whatever a fragile server goes through, nobody gets two answers."""
    server = Server(
        latency=Script(*(takes for _, takes in work)),
        concurrency=concurrency,
        queue=None if concurrency is None else queue,
        crash_above=3,
        restart_after=1.0,
        failures=(
            Failure(start=4.0, end=6.0),
            Failure(start=8.0, end=9.0, kind="freeze", rate=0.5),
        ),
    )
    world, worker = worker_of(server, seed)
    told: list[Answer] = []
    planned: dict[int, Answer | None] = {}
    now = 0.0
    for number, (gap, _) in enumerate(work):
        now += gap
        world.run(now)
        planned[number] = taken(worker, now, Asker(told), number)
    world.run(1_000.0)

    dropped = {answer.number: answer for answer in told}
    assert len(told) == len(dropped)
    for number, plan in planned.items():
        if plan is None:
            assert Answer(9.0, number, DROPPED) == dropped[number]
        elif number in dropped:
            assert SUCCESS is plan.outcome
            assert dropped[number].when < plan.when
        else:
            assert plan.outcome in (SUCCESS, REFUSED, DROPPED) or "503" == plan.outcome.detail


def test_a_node_is_one_kind_or_another() -> None:
    """What all servers share does no work by itself."""
    node = Node(Server(), World(0), None)

    for act in (
        lambda: node.load(0.0),
        lambda: node.take(0.0, Asker(), 1),
        lambda: node.drop_all(0.0, 1.0),
    ):
        with pytest.raises(NotImplementedError):
            act()


def test_what_servers_answer_can_be_repeated() -> None:
    """Each failure that a server gives is one that a policy may retry."""
    for outcome in (REFUSED, DROPPED, ERROR):
        assert isinstance(outcome, Outcome)
        assert (True, False) == (outcome.safe and outcome.counts, outcome.retried)
