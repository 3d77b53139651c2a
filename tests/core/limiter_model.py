"""A model of a dependency with a limited capacity, and of a backlog that limiters pace.

There is one limiter for each process. The model has no clock and no threads: `run` processes events
in the order of their virtual times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tarry.core.hints import Hint
from tarry.core.outcome import SUCCESS, TRANSIENT, Kind, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.limiter import Limiter

MAX_RETRY_DELAY_S = 3600.0
FIRST_ATTEMPTS_PER_RETRY = 2
"""The order of the service: two first attempts, then one retry."""


class Target(Protocol):
    """A dependency that accepts a limited number of calls per second."""

    def accept(self, now: float) -> bool:
        """Return whether a call at `now` is accepted."""
        ...


class UnlimitedTarget:
    """Accepts every call."""

    def accept(self, now: float) -> bool:
        """Return True."""
        return True


class SlidingWindowTarget:
    """Accepts `capacity` calls in any second."""

    def __init__(self, capacity: Callable[[float], float]) -> None:
        self._capacity = capacity
        self._accepted: deque[float] = deque()

    def accept(self, now: float) -> bool:
        """Return whether fewer than `capacity` calls were accepted in the last second."""
        while self._accepted and self._accepted[0] <= now - 1:
            self._accepted.popleft()
        if len(self._accepted) >= self._capacity(now):
            return False
        self._accepted.append(now)
        return True


class FixedWindowTarget:
    """Accepts `capacity` calls in each window of `seconds` seconds."""

    def __init__(self, capacity: Callable[[float], float], seconds: float = 1.0) -> None:
        self._capacity = capacity
        self._seconds = seconds
        self._window = -1
        self._count = 0

    def accept(self, now: float) -> bool:
        """Return whether fewer than `capacity` calls were accepted in the current window."""
        window = int(now / self._seconds)
        if window != self._window:
            self._window, self._count = window, 0
        self._count += 1
        return self._count <= self._capacity(now)


class TokenBucketTarget:
    """Accepts `capacity` calls per second on average, and a burst of a tenth of it."""

    def __init__(self, capacity: Callable[[float], float]) -> None:
        self._capacity = capacity
        self._tokens = max(1.0, capacity(0.0) / 10)
        self._filled_at = 0.0

    def accept(self, now: float) -> bool:
        """Return whether the bucket has a token, and take it."""
        capacity = self._capacity(now)
        earned = (now - self._filled_at) * capacity
        self._tokens = min(max(1.0, capacity / 10), self._tokens + earned)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Task(NamedTuple):
    """A task; one with `always_fails` is accepted by the target but never succeeds."""

    always_fails: bool
    attempts: int = 0


class Result:
    """Counts and times of a run."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        """The times at which attempts started."""
        self.successes: list[float] = []
        """The times at which attempts succeeded."""
        self.refused: int = 0
        self.ended: float = 0.0

    @property
    def waste(self) -> float:
        """The share of refused attempts."""
        return self.refused / (self.refused + len(self.successes))

    def peak(self, seconds: float = 1.0) -> int:
        """Return the highest number of attempts in any period of `seconds`."""
        peak = first = 0
        for index, start in enumerate(self.starts):
            while self.starts[first] <= start - seconds:
                first += 1
            peak = max(peak, index - first + 1)
        return peak

    def successes_between(self, start: float, end: float) -> int:
        """Return the number of successes in a period."""
        return sum(start <= time < end for time in self.successes)


def run(
    limiter: Limiter | Sequence[Limiter], target: Target, *, seconds: float = 400.0, **options: Any
) -> Result:
    """Return the result of a `Simulation` of at most `seconds`."""
    limiters = limiter if isinstance(limiter, Sequence) else [limiter]
    return Simulation(limiters, target, **options).run(seconds)


class Process:
    """A process with its limiter; a task that it has attempted is retried by the same process."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self.retries: deque[Task] = deque()
        self.timer = self.first_attempt_at = -1.0
        self.start_count = 0


class Simulation:
    """A queue of tasks, whose attempts the limiters of several processes pace, and their target.

    `backlog` tasks wait at the start, and `arrivals_per_s` arrive per second. The share
    `failing_share` of them fails always, and the share `failing_attempts` of all accepted attempts
    fails, whatever the task. Refused attempts get a 503, or with `retry_after` a 429 with this
    hint. Failed tasks are retried with exponential backoff and full jitter. As in the service, the
    limiter gets no outcome of a retry that starts within a second of a first attempt.
    """

    def __init__(
        self,
        limiters: Sequence[Limiter],
        target: Target,
        *,
        backlog: int = 0,
        arrivals_per_s: float = 0.0,
        failing_share: float = 0.0,
        failing_attempts: float = 0.0,
        latency: float = 0.02,
        retry_after: float | None = None,
        seed: int = 0,
    ) -> None:
        self.processes = [Process(limiter) for limiter in limiters]
        self.target = target
        self.arrivals_per_s, self.failing_share = arrivals_per_s, failing_share
        self.failing_attempts = failing_attempts
        self.latency, self.retry_after = latency, retry_after
        self.refusal = TRANSIENT
        if retry_after is not None:
            self.refusal = Outcome(Kind.THROTTLED, Hint(delay=retry_after))
        self.random = Random(seed)
        self.result = Result()
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.numbers = count()
        self.new = deque(self.create_task() for _ in range(backlog))
        self.remaining = sum(not task.always_fails for task in self.new)
        if arrivals_per_s:
            self.schedule(0.0, self.arrive)

    def run(self, seconds: float) -> Result:
        """Run until all tasks of the backlog that can succeed have succeeded, or for `seconds`."""
        self.start_due(0.0)
        events, result = self.events, self.result
        while events and events[0][0] < seconds and (self.remaining or self.arrivals_per_s):
            result.ended, _, callback = heappop(events)
            callback(result.ended)
            self.start_due(result.ended)
        return result

    def create_task(self) -> Task:
        """Return a new task."""
        return Task(self.random.random() < self.failing_share)

    def schedule(self, time: float, callback: Callable[[float], None]) -> None:
        """Call `callback` with the time at `time`."""
        heappush(self.events, (time, next(self.numbers), callback))

    def arrive(self, now: float) -> None:
        """Add a task, and schedule the next arrival."""
        self.new.append(self.create_task())
        self.schedule(now + self.random.expovariate(self.arrivals_per_s), self.arrive)

    def start_due(self, now: float) -> None:
        """Start as many attempts as the limiters allow; the processes have no fixed order."""
        if len(self.processes) > 1:
            self.random.shuffle(self.processes)
        for process in self.processes:
            while self.new or process.retries:
                wait = process.limiter.acquire(now)
                if wait is None:
                    break
                if wait:  # as the service does: release the slot and set a timer
                    process.limiter.release(None, 0.0, now)
                    if not now < process.timer <= now + wait:
                        process.timer = now + max(wait, 0.0005)
                        self.schedule(process.timer, lambda _: None)
                    break
                is_retry_turn = not process.start_count % (FIRST_ATTEMPTS_PER_RETRY + 1)
                is_retry = process.retries and (is_retry_turn or not self.new)
                process.start_count += 1
                self.start(process, (process.retries if is_retry else self.new).popleft(), now)

    def start(self, process: Process, task: Task, now: float) -> None:
        """Send an attempt to the target."""
        self.result.starts.append(now)
        outcome = TRANSIENT if task.always_fails else SUCCESS
        if self.failing_attempts and self.random.random() < self.failing_attempts:
            outcome = TRANSIENT
        if not self.target.accept(now):
            outcome = self.refusal
            self.result.refused += 1
        ended = now + self.latency * self.random.uniform(0.8, 1.2)
        if not task.attempts:
            process.first_attempt_at = now
        is_evidence = process.first_attempt_at <= now - 1 or not task.attempts

        def finish(end: float) -> None:
            process.limiter.release(outcome if is_evidence else None, end - now, end)
            self.finish(process, task, outcome, end)

        self.schedule(ended, finish)

    def finish(self, process: Process, task: Task, outcome: Outcome, now: float) -> None:
        """Record the outcome of an attempt, and schedule a retry."""
        if outcome is SUCCESS:
            self.result.successes.append(now)
            self.remaining -= 1
            return
        delay = self.random.uniform(0.0, min(MAX_RETRY_DELAY_S, 2.0**task.attempts))
        if outcome.kind is Kind.THROTTLED and self.retry_after is not None:
            delay = self.retry_after * self.random.uniform(1.0, 1.1)
        retry = task._replace(attempts=task.attempts + 1)
        self.schedule(now + delay, lambda _: process.retries.append(retry))
