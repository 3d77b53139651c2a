"""Contention for one row: the 2015 AWS study "Exponential Backoff And Jitter".

Each client reads the version of one row and writes the row back. The write succeeds only if the
version has not changed. A write counts as a call, a read does not. Times and rules are those of the
AWS study: network delays of |N(10 ms, 2 ms)|, a base of 5 ms, a cap of 2,000 ms, and ceilings
(upper bounds of the delay before jitter) of 5 ms * 2**n for retry n. So the first ceiling is 10 ms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.core.call import Call
from tarry.core.checks import check_count, check_one_of
from tarry.core.outcome import TRANSIENT
from tarry.core.policy import Policy
from tarry.core.verdict import Wait
from tarry.simulator.distributions import Normal
from tarry.simulator.event_loop import EventLoop, trial_seed
from tarry.simulator.study import Column, Plot, Study

if TYPE_CHECKING:
    from collections.abc import Callable

_NETWORK_DELAY = Normal(0.010, 0.002)
_BASE_S, _CAP_S = 0.005, 2.0
_UNLIMITED_ATTEMPTS = 1_000_000_000


def no_delay(_retry: int) -> float:
    """A backoff function for policies that retry at once."""
    return 0.0


def _draw_clamped(_ceiling: float, previous: float, u: float) -> float:
    """Return a delay with decorrelated jitter as AWS defines it: drawn, then limited to the cap.

    `u` is a random number in [0, 1).
    """
    return min(_CAP_S, _BASE_S + u * (3 * previous - _BASE_S))


_POLICIES: dict[str, dict[str, Any]] = {
    "none": {"initial_delay": 2 * _BASE_S, "backoff": no_delay, "jitter": "none"},
    "exponential": {"initial_delay": 2 * _BASE_S, "jitter": "none"},
    "full": {"initial_delay": 2 * _BASE_S, "jitter": "full"},
    "equal": {"initial_delay": 2 * _BASE_S, "jitter": "equal"},
    "decorrelated": {"initial_delay": _BASE_S, "jitter": "decorrelated"},
    "decorrelated-aws": {"initial_delay": _BASE_S, "jitter": _draw_clamped},
}


class Contention(NamedTuple):
    """The result of one trial."""

    calls: int
    """Writes until each client has succeeded once."""
    time_ms: float
    """The time at which the last client received its success."""

    def metrics(self) -> dict[str, float]:
        """Return both values by name. The time is in seconds, as in all studies."""
        return {"calls": float(self.calls), "time": self.time_ms / 1000}


def contention(
    *, jitter: str = "full", clients: int = 100, trials: int = 1, seed: int = 0
) -> list[Contention]:
    """Run the study: "none" is no backoff at all, "exponential" is backoff without jitter."""
    check_one_of("jitter", jitter, _POLICIES)
    check_count("clients", clients)
    policy = Policy(max_attempts=_UNLIMITED_ATTEMPTS, max_delay=_CAP_S, **_POLICIES[jitter])
    return [
        _run_trial(policy, clients, EventLoop(trial_seed(seed, trial)))
        for trial in range(check_count("trials", trials))
    ]


class _Row:
    """The row that all writers write, and the other state that they share."""

    __slots__ = ("calls", "draw", "last_success", "network_delay", "schedule", "version")

    def __init__(self, loop: EventLoop) -> None:
        self.schedule: Callable[..., None] = loop.schedule
        self.network_delay: Callable[[], float] = loop.sampler(_NETWORK_DELAY, "network")
        self.draw: Callable[[], float] = loop.random_source("jitter").random
        self.version = 0
        self.calls = 0
        self.last_success = 0.0


class _Writer:
    """A client that reads and writes the row until a write succeeds."""

    __slots__ = ("_call", "_row")

    def __init__(self, row: _Row, policy: Policy) -> None:
        self._row = row
        self._call = Call(policy)

    def start(self, now: float) -> None:
        """Start an attempt: send the read."""
        self._call.start(now)
        self._row.schedule(now + self._row.network_delay(), self._read)

    def _read(self, now: float, _: object) -> None:
        row = self._row
        row.schedule(now + row.network_delay() + row.network_delay(), self._write, row.version)

    def _write(self, now: float, version: int) -> None:
        row = self._row
        row.calls += 1
        received = now + row.network_delay()
        if version == row.version:
            row.version += 1
            row.last_success = max(row.last_success, received)
            self._call.record_success(received, 0.0)
            return
        verdict = self._call.record_failure(TRANSIENT, received, row.draw())
        if isinstance(verdict, Wait):
            self.start(received + verdict.delay)


def _run_trial(policy: Policy, clients: int, loop: EventLoop) -> Contention:
    row = _Row(loop)
    for _ in range(clients):
        _Writer(row, policy).start(0.0)
    loop.run(float("inf"))
    return Contention(row.calls, row.last_success * 1000)


CONTENTION = Study(
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
    variants=tuple(_POLICIES),
    columns=(Column("calls", "calls"), Column("time", "time", "ms")),
    plots=(
        Plot(
            "lines",
            "calls",
            "Writes until all clients succeeded",
            x="clients",
            y_title="calls",
            log=True,
        ),
        Plot(
            "lines", "time", "Time until all clients succeeded", x="clients", y_title="s", log=True
        ),
    ),
    parameters={"clients": 100},
    trials=20,
    sweep={"clients": (10, 20, 50, 100, 150, 200)},
)
