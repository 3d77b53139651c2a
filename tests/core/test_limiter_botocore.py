"""`AdaptiveRate` compared with the limiter of botocore, the AWS SDK for Python."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Any

import pytest
from botocore.exceptions import CapacityNotAvailableError  # type: ignore[import-untyped]
from botocore.retries.adaptive import ClientRateLimiter, RateClocker  # type: ignore[import-untyped]
from botocore.retries.bucket import TokenBucket  # type: ignore[import-untyped]
from botocore.retries.throttling import CubicCalculator  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.call import Call
from tarry.core.downstream import Downstream
from tarry.core.limiter import AdaptiveRate
from tarry.core.outcome import SUCCESS, TRANSIENT, Kind, Outcome
from tarry.core.policy import Policy
from tarry.core.verdict import Stop

THROTTLED = Outcome(Kind.THROTTLED)
LATENCY_S = 0.01
MIN_SLEEP_S = 1e-4


class BotocoreLimiter:
    """botocore's limiter with a clock that tests set. It does not block: see `next_sleep`."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.bucket: Any = TokenBucket(max_rate=1, clock=self)
        self.clocker: Any = RateClocker(self)
        self.is_throttled = False
        self._limiter: Any = ClientRateLimiter(
            rate_adjustor=CubicCalculator(starting_max_rate=0, start_time=now),
            rate_clocker=self.clocker,
            token_bucket=self.bucket,
            throttling_detector=self,
            clock=self,
        )

    def current_time(self) -> float:
        """Return the time, as botocore's `Clock`."""
        return self.now

    def is_throttling_error(self, **_: object) -> bool:
        """Return whether the attempt was throttled, as botocore's `ThrottlingErrorDetector`."""
        return self.is_throttled

    @property
    def is_enabled(self) -> bool:
        """Whether an attempt was throttled, so that tokens are needed."""
        return bool(self._limiter._enabled)

    def next_sleep(self, now: float) -> float:
        """Take a token and return 0, or return how long `TokenBucket.acquire` would sleep."""
        self.now = now
        try:
            if self.is_enabled:
                self.bucket.acquire(block=False)
        except CapacityNotAvailableError:
            return float(self.bucket._sleep_amount(1))
        return 0.0

    def receive(self, now: float, *, throttled: bool) -> None:
        """Record the response of an attempt."""
        self.now, self.is_throttled = now, throttled
        self._limiter.on_receiving_response()


@given(
    st.integers(0, 1_000_000),
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.3, 0.5, 1.0, 3.0]),
            st.sampled_from(["send", "success", "success", "throttle", "failure", "cancel"]),
        ),
        min_size=15,
        max_size=60,
    ),
)
def test_rates_and_waits_are_those_of_botocore(start: int, events: list[tuple[float, str]]) -> None:
    """For any events the rates are those of botocore, and so is the wait of the next attempt."""
    now = float(start)
    limiter, reference = AdaptiveRate(), BotocoreLimiter(now)
    for seconds, event in [(0.0, "success"), *events]:  # sets the start time of both
        now += seconds
        if event == "send":
            sleep = reference.next_sleep(now)
            assert pytest.approx(sleep, rel=1e-6, abs=1e-6) == limiter.acquire(now)
            if sleep:  # botocore has taken no token
                limiter.release(None, 0.0, now)
        elif event == "cancel":
            limiter.release(None, 0.1, now)
        else:
            outcome = {"success": SUCCESS, "throttle": THROTTLED, "failure": TRANSIENT}[event]
            limiter.release(outcome, 0.1, now)
            reference.receive(now, throttled=event == "throttle")
        assert pytest.approx(reference.clocker.measured_rate) == limiter.measured
        assert (reference.bucket.max_rate if reference.is_enabled else None) == (
            limiter.rate and pytest.approx(limiter.rate, rel=1e-6)
        )


class Service:
    """A service that throttles calls above `capacity` per second; it allows bursts of a second."""

    def __init__(self, capacity: float) -> None:
        self._capacity = self._tokens = capacity
        self._filled_at = 0.0
        self.accepted = 0

    def is_throttled(self, now: float) -> bool:
        """Return whether a call that arrives now is throttled."""
        earned = (now - self._filled_at) * self._capacity
        self._tokens, self._filled_at = min(self._capacity, self._tokens + earned), now
        if self._tokens < 1:
            return True
        self._tokens -= 1
        self.accepted += 1
        return False


class BotocoreWorkers:
    """Workers that share botocore's limiter. Those that wait for a token are in a queue."""

    def __init__(self) -> None:
        self._limiter = BotocoreLimiter(0.0)
        self._waiting = deque[int]()

    def next_sleep(self, worker: int, now: float) -> float:
        """Return how long the worker sleeps before the next request; 0: it sends its attempt."""
        sleep = self._limiter.next_sleep(now)
        if worker in self._waiting:
            self._waiting.remove(worker)
        if sleep:
            self._waiting.append(worker)
        return sleep

    def receive(self, worker: int, now: float, *, throttled: bool) -> int | None:
        """Record a response; return the waiting worker that botocore notifies of the new rate."""
        self._limiter.receive(now, throttled=throttled)
        return self._waiting[0] if self._waiting else None


class TarryWorkers:
    """Workers that share an `AdaptiveRate`; each attempt is a call of its own."""

    def __init__(self) -> None:
        self._downstream = Downstream("service", limiter=AdaptiveRate())
        self._calls: dict[int, Call] = {}

    def next_sleep(self, worker: int, now: float) -> float:
        """Return how long the worker sleeps before the next request; 0: it sends its attempt."""
        if worker not in self._calls:
            call = Call(Policy(), self._downstream, now)
            command = call.start(now)
            if isinstance(command, Stop):  # it would wait for longer than `max_wait`
                return 1.0
            self._calls[worker] = call
            if not command.delay:
                return 0.0
        return self._calls[worker].next_delay_step(now)

    def receive(self, worker: int, now: float, *, throttled: bool) -> None:
        """Record the response of a worker's attempt."""
        call = self._calls.pop(worker)
        if throttled:
            call.record_failure(THROTTLED, now, 0.5)
        else:
            call.record_success(now, 0.5)


def count_accepted(
    workers: BotocoreWorkers | TarryWorkers, capacity: float, worker_count: int, seconds: float
) -> int:
    """Return the calls that a service accepts from workers that call it without pauses."""
    service = Service(capacity)
    due_at = dict.fromkeys(range(worker_count), 0.0)  # when each worker requests a token next
    events: list[tuple[float, int, bool, bool]] = []  # time, worker, is a response, is throttled
    for worker in range(worker_count):
        heappush(events, (0.0, worker, False, False))
    while events:
        now, worker, is_response, throttled = heappop(events)
        if now > seconds:
            break
        if is_response:
            notified = workers.receive(worker, now, throttled=throttled)
            if notified is not None:
                due_at[notified] = now
                heappush(events, (now, notified, False, False))
        elif due_at[worker] != now:
            continue  # the worker was notified before this time
        elif sleep := workers.next_sleep(worker, now):
            due_at[worker] = now + max(sleep, MIN_SLEEP_S)
            heappush(events, (due_at[worker], worker, False, False))
            continue
        else:
            due_at[worker] = -1.0
            throttled = service.is_throttled(now)
            heappush(events, (now + LATENCY_S, worker, True, throttled))
            continue
        due_at[worker] = now
        heappush(events, (now, worker, False, False))
    return service.accepted


@pytest.mark.long_run
@pytest.mark.parametrize(("capacity", "worker_count"), [(20, 20), (200, 10), (500, 20), (1000, 40)])
def test_throughput_is_that_of_botocore(capacity: int, worker_count: int) -> None:
    """Workers that share an `AdaptiveRate` make as many calls as with botocore, within 1 %."""
    botocore = count_accepted(BotocoreWorkers(), capacity, worker_count, 20.0)
    tarry = count_accepted(TarryWorkers(), capacity, worker_count, 20.0)
    assert pytest.approx(botocore, rel=0.01) == tarry
