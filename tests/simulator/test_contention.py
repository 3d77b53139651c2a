"""The contention study, compared with an independent implementation."""

from __future__ import annotations

import heapq
import random
import subprocess
import sys
from statistics import fmean, stdev

import pytest

from tarry import ConfigurationError
from tarry.simulator import contention
from tarry.simulator.contention import CONTENTION_STUDY
from tests.contention_table import PAGE, render_tables, tables_on_page

JITTERS = ("none", "exponential", "full", "equal", "decorrelated", "decorrelated-aws")


def _backoff(jitter: str, source: random.Random, failures: int, last_delay: float) -> float:
    """Return the delay in milliseconds after this number of failures."""
    ceiling = min(2000.0, 5.0 * 2.0 ** min(failures, 50))
    return {
        "none": lambda: 0.0,
        "exponential": lambda: ceiling,
        "full": lambda: source.uniform(0, ceiling),
        "equal": lambda: ceiling / 2 + source.uniform(0, ceiling / 2),
        "decorrelated": lambda: source.uniform(5.0, max(5.0, min(2000.0, 3 * last_delay))),
        "decorrelated-aws": lambda: min(2000.0, source.uniform(5.0, 3 * last_delay)),
    }[jitter]()


def _run_reference_model(jitter: str, clients: int, source: random.Random) -> tuple[int, float]:
    """Return the calls and the milliseconds of one trial of the model."""

    def network_delay() -> float:
        return abs(source.gauss(10.0, 2.0))

    version, calls, last = 0, 0, 0.0
    failures = [0] * clients
    last_delays = [5.0] * clients
    events = [(network_delay(), client, "read", 0) for client in range(clients)]
    heapq.heapify(events)
    while events:
        now, client, operation, version_read = heapq.heappop(events)
        if operation == "read":
            heapq.heappush(
                events, (now + network_delay() + network_delay(), client, "write", version)
            )
            continue
        calls += 1
        response_at = now + network_delay()
        if version_read == version:
            version += 1
            last = max(last, response_at)
            continue
        failures[client] += 1
        last_delays[client] = _backoff(jitter, source, failures[client], last_delays[client])
        heapq.heappush(
            events, (response_at + last_delays[client] + network_delay(), client, "read", 0)
        )
    return calls, last


@pytest.mark.long_run
@pytest.mark.parametrize("jitter", JITTERS)
def test_results_agree_with_an_independent_implementation(jitter: str) -> None:
    """Mean calls and times differ from the reference model by less than four standard errors."""
    trials, clients = 150, 20
    results = contention(jitter=jitter, clients=clients, trials=trials, seed=4)
    source = random.Random(9)
    expected = [_run_reference_model(jitter, clients, source) for _ in range(trials)]

    for index in (0, 1):
        actual_values, expected_values = [t[index] for t in results], [t[index] for t in expected]
        error = (stdev(actual_values) ** 2 / trials + stdev(expected_values) ** 2 / trials) ** 0.5

        assert abs(fmean(actual_values) - fmean(expected_values)) < 4 * error


def _means(clients: int) -> dict[str, tuple[float, float]]:
    means: dict[str, tuple[float, float]] = {}
    for jitter in JITTERS:
        trials = contention(jitter=jitter, clients=clients, trials=10, seed=1)
        means[jitter] = (fmean(t.calls for t in trials), fmean(t.time_ms for t in trials))
    return means


@pytest.mark.long_run
@pytest.mark.parametrize("clients", [50, 100, 200])
def test_jitters_rank_as_published(clients: int) -> None:
    """Jitter saves calls, full jitter most, and backoff without jitter takes longest."""
    means = _means(clients)
    calls = {jitter: mean[0] for jitter, mean in means.items()}
    times = {jitter: mean[1] for jitter, mean in means.items()}

    assert calls["full"] < calls["decorrelated"] < calls["exponential"] < calls["none"]
    assert calls["equal"] == pytest.approx(calls["full"], rel=0.1)
    assert times["none"] < times["decorrelated"] < times["full"] < times["equal"]
    assert times["equal"] < times["exponential"] / 5


def test_calls_without_backoff_grow_with_the_square_of_the_clients() -> None:
    """Twice the clients make almost four times the calls."""
    few, many = (
        fmean(t.calls for t in contention(jitter="none", clients=n, trials=5)) for n in (100, 200)
    )

    assert 3.3 < many / few < 4.1


def test_one_client_needs_one_write() -> None:
    """A single client reads and writes once, in four network delays."""
    (trial,) = contention(jitter="full", clients=1)

    assert 1 == trial.calls
    assert 40 == pytest.approx(trial.time_ms, abs=16)


def test_a_trial_unpacks_into_calls_and_milliseconds() -> None:
    """A result is a tuple of calls and milliseconds."""
    calls, time_ms = contention(jitter="full", clients=5, trials=1, seed=7)[0]

    assert isinstance(calls, int)
    assert isinstance(time_ms, float)


def test_the_same_seed_gives_the_same_trials_in_another_process() -> None:
    """Results do not depend on the process or its hash seed."""
    code = (
        "from tarry.simulator import contention;"
        "print(contention(jitter='decorrelated', clients=30, trials=3, seed=5))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }

    expected = f"{contention(jitter='decorrelated', clients=30, trials=3, seed=5)}\n"
    assert {expected} == printed


def test_trials_and_seeds_differ() -> None:
    """All trials of two seeds are different."""
    trials = [*contention(trials=5, seed=0, clients=20), *contention(trials=5, seed=1, clients=20)]

    assert 10 == len(set(trials))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"jitter": "fulll"}, "jitter"),
        ({"clients": 0}, "clients"),
        ({"trials": 0}, "trials"),
        ({"clients": 1.5}, "clients"),
    ],
)
def test_invalid_arguments_are_named(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        contention(**arguments)  # type: ignore[arg-type]


def test_the_study_runs_every_jitter() -> None:
    """The study has all six jitters as variants."""
    assert JITTERS == CONTENTION_STUDY.variants


@pytest.mark.long_run
def test_tables_on_the_page_are_current() -> None:
    """The tables in docs/contention.md equal the output of `make tables`."""
    assert render_tables() == tables_on_page(PAGE.read_text(encoding="utf-8"))
