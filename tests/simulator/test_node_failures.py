"""Each way in which a server fails, and what becomes of its requests."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from tarry.core.outcome import SUCCESS
from tarry.simulator.distributions import Exponential, Fixed
from tarry.simulator.event_loop import World
from tarry.simulator.node import DROPPED, Worker
from tarry.simulator.scenario import Failure, Server
from tests.simulator.harness import HELD, Answer, Asker, ends, taken, worker_of


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


@pytest.mark.parametrize("kind", ["error", "hang"])
def test_other_failures_let_the_work_in_progress_end(kind: str) -> None:
    """An error or a hang is that of requests which come in their time."""
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


def test_a_frozen_server_holds_what_is_in_progress_too() -> None:
    """The answers that were planned never leave it; those that had left are not taken back."""
    world, worker = worker_of(during("freeze"))
    asker = Asker()
    for number, now in enumerate([0.5, 1.0, 1.25, 1.5], 1):
        taken(worker, now, asker, number)
    world.run(3.0)
    assert [] == asker.answers
    assert (2, 0) == (worker.in_progress(3.0), worker.load(3.0))

    world.run(9.0)

    assert [Answer(4.0, HELD + number, DROPPED) for number in (3, 4)] == asker.answers
    assert 0 == worker.in_progress(9.0)


def test_after_a_freeze_every_worker_is_free_and_cold() -> None:
    """When it is over, the server has started anew."""
    frozen = Failure(start=2.0, end=4.0, kind="freeze")
    world, worker = worker_of(
        Server(latency=Fixed(5.0), concurrency=1, warmup=10.0, cold=2.0, failures=(frozen,))
    )
    ends(worker, [0.0, 0.0])
    world.run(4.0)

    assert [14.0] == ends(worker, [4.0])


def test_a_server_that_dies_while_it_is_frozen_drops_what_it_holds_then() -> None:
    """Nobody waits for a process that is gone."""
    failures = (Failure(start=3.0, end=5.0), Failure(start=2.0, end=9.0, kind="freeze"))
    world, worker = worker_of(Server(latency=Fixed(2.0), failures=failures))
    asker = Asker()
    taken(worker, 1.0, asker, 1)
    world.run(2.5)
    taken(worker, 2.5, asker, 2)
    world.run(20.0)

    assert [Answer(3.0, HELD + 1, DROPPED), Answer(3.0, 2, DROPPED)] == asker.answers


def test_what_another_freeze_holds_stays_held() -> None:
    """The end of one freeze drops nothing that a longer one holds."""
    failures = (
        Failure(start=1.0, end=9.0, kind="freeze"),
        Failure(start=2.0, end=4.0, kind="freeze"),
    )
    world, worker = worker_of(Server(latency=Fixed(5.0), failures=failures))
    asker = Asker()
    taken(worker, 0.5, asker, 1)
    world.run(3.0)
    taken(worker, 3.0, asker, 2)
    world.run(9.0)
    assert ([], 2) == (asker.answers, worker.in_progress(8.0))

    world.run(20.0)

    assert [Answer(9.0, HELD + 1, DROPPED), Answer(9.0, 2, DROPPED)] == asker.answers


def test_a_crash_drops_what_is_held() -> None:
    """A server that holds some requests and dies of the others loses them all, once."""
    frozen = Failure(end=50.0, kind="freeze", rate=0.5)
    world, worker = worker_of(Server(latency=Fixed(100.0), crash_above=5, failures=(frozen,)))
    asker = Asker()
    last = 0
    while not worker.crashes:
        last += 1
        taken(worker, 1.0, asker, last)
    world.run(60.0)

    assert {(1.0, number) for number in range(1, last)} == {
        (answer.when, answer.number) for answer in asker.answers
    }
    assert (last - 1, 0) == (len(asker.answers), worker.in_progress(60.0))
    assert last > 6


def test_servers_do_not_share_their_dice() -> None:
    """Two servers of one world draw other latencies and other failures."""
    server = Server(latency=Exponential(1.0), failure_rate=0.5)
    world = World(0)
    one, other, again = (Worker(name, server, world) for name in ("one", "other", "one"))
    answers = [[taken(worker, float(now)) for now in range(50)] for worker in (one, other, again)]
    times = [[answer.when for answer in each if answer] for each in answers]
    fates = [[answer.outcome for answer in each if answer] for each in answers]

    assert (times[0], fates[0]) == (times[2], fates[2])
    assert set() == set(times[0]) & set(times[1])
    assert fates[0] != fates[1]


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
