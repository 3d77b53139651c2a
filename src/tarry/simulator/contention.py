"""Contention for one row: the 2015 AWS study "Exponential Backoff And Jitter".

Each client reads the version of one row and writes the row back. The write succeeds only if the
version has not changed; otherwise the client waits, reads and writes again. As in the AWS study, a
"call" of the results (the metric `calls`) is one write. Times and rules are those of that study:
network delays of |N(10 ms, 2 ms)|, a base of 5 ms, a cap of 2,000 ms, and ceilings (upper bounds of
the delay before jitter) of 5 ms * 2**n for retry n. So the first ceiling is 10 ms.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

from tarry.core.call import Call
from tarry.core.checks import check_count, check_one_of
from tarry.core.outcome import TRANSIENT
from tarry.core.policy import Policy
from tarry.core.verdict import Wait
from tarry.simulator.distributions import Normal
from tarry.simulator.event_loop import EventLoop, trial_seed
from tarry.simulator.study import Column, Plot, Study

_NETWORK_DELAY = Normal(0.010, 0.002)
_BASE_S, _CAP_S = 0.005, 2.0
_UNLIMITED_ATTEMPTS = 1_000_000_000


def no_delay(_retry: int) -> float:
    """Return 0, as the backoff function of a policy that retries at once."""
    return 0.0


def _aws_decorrelated_jitter(_ceiling: float, previous: float, random_number: float) -> float:
    """Return the delay by the AWS formula; `random_number` is from [0, 1)."""
    return min(_CAP_S, _BASE_S + random_number * (3 * previous - _BASE_S))


_POLICY_ARGUMENTS: dict[str, dict[str, Any]] = {
    "none": {"initial_delay": 2 * _BASE_S, "backoff": no_delay, "jitter": "none"},
    "exponential": {"initial_delay": 2 * _BASE_S, "jitter": "none"},
    "full": {"initial_delay": 2 * _BASE_S, "jitter": "full"},
    "equal": {"initial_delay": 2 * _BASE_S, "jitter": "equal"},
    "decorrelated": {"initial_delay": _BASE_S, "jitter": "decorrelated"},
    "decorrelated-aws": {"initial_delay": _BASE_S, "jitter": _aws_decorrelated_jitter},
}


class Contention(NamedTuple):
    """The result of one trial of `contention`."""

    calls: int
    """The number of writes until each client has succeeded once."""
    time_ms: float
    """The time at which the last client received its success."""

    def metrics(self) -> dict[str, float]:
        """Return both values by name. The time is in seconds, as all times of metrics are."""
        return {"calls": float(self.calls), "time": self.time_ms / 1000}


def contention(
    *, jitter: str = "full", clients: int = 100, trials: int = 1, seed: int = 0
) -> list[Contention]:
    """Run the study. `jitter`: "none" is no backoff, "exponential" is backoff without jitter."""
    check_one_of("jitter", jitter, _POLICY_ARGUMENTS)
    check_count("clients", clients)
    policy = Policy(max_attempts=_UNLIMITED_ATTEMPTS, max_delay=_CAP_S, **_POLICY_ARGUMENTS[jitter])
    return [
        _run_trial(policy, clients, EventLoop(trial_seed(seed, trial)))
        for trial in range(check_count("trials", trials))
    ]


def _run_trial(policy: Policy, clients: int, loop: EventLoop) -> Contention:
    """Run all clients. A `Call` is the whole work of one client: reads and writes until success."""
    schedule, draw = loop.schedule, loop.random_source("jitter").random
    network_delay = loop.sampler(_NETWORK_DELAY, "network")
    version = write_count = 0
    last_success_at = 0.0

    def start(now: float, call: Call) -> None:
        call.start(now)
        schedule(now + network_delay(), read, call)

    def read(now: float, call: Call) -> None:
        schedule(now + network_delay() + network_delay(), write, (call, version))

    def write(now: float, call_and_version: tuple[Call, int]) -> None:
        nonlocal version, write_count, last_success_at
        call, read_version = call_and_version
        write_count += 1
        received_at = now + network_delay()
        if read_version == version:
            version += 1
            last_success_at = max(last_success_at, received_at)
            call.record_success(received_at, 0.0)
            return
        verdict = call.record_failure(TRANSIENT, received_at, draw())
        if isinstance(verdict, Wait):
            start(received_at + verdict.delay, call)

    for _ in range(clients):
        start(0.0, Call(policy))
    loop.run(inf)
    return Contention(write_count, last_success_at * 1000)


CONTENTION_STUDY = Study(
    name="contention",
    question="Many clients write to one row. Which backoff needs the fewest calls?",
    lesson=(
        "Without backoff, calls grow with the square of the number of clients. Backoff without "
        "jitter keeps the clients synchronised; only jitter spreads them. Full and equal jitter "
        "make the fewest calls, and full jitter finishes sooner. Of the jitters, decorrelated "
        "finishes soonest, with more calls."
    ),
    run=contention,
    variant_parameter="jitter",
    variants=tuple(_POLICY_ARGUMENTS),
    columns=(Column("calls", "calls"), Column("time", "time", "ms")),
    plots=(
        Plot("lines", "calls", "Writes until all clients succeeded", x="clients", is_log=True),
        Plot("lines", "time", "Time until all clients succeeded", x="clients", is_log=True),
    ),
    parameters={"clients": 100},
    trial_count=20,
    sweep={"clients": (10, 20, 50, 100, 150, 200)},
)
