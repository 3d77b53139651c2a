"""Tests for decide(), check by check in the order of the checks."""

from __future__ import annotations

from collections import Counter
from itertools import chain, combinations
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.breaker import Breaker
from tarry.core.budget import TokenBudget
from tarry.core.call import Call
from tarry.core.decide import decide
from tarry.core.downstream import Downstream
from tarry.core.hints import MAX_DELAY_S, Hint
from tarry.core.outcome import (
    TRANSIENT,
    Kind,
    Outcome,
    outcome_of_code,
    outcome_of_exception,
    outcome_of_status,
)
from tarry.core.policy import Policy
from tarry.core.verdict import Attempt, Progress, Reason, Stop, Wait

NOW = 784_111_777.0  # 6 November 1994, 08:49:37
DEFAULT = Policy()
NO_JITTER = Policy(jitter="none")
AFTER_FIRST_ATTEMPT = Progress(attempts=1, started=NOW)
THROTTLED = Outcome(Kind.THROTTLED)

random_numbers = st.floats(0, 1, exclude_max=True)
jitters = st.sampled_from(["none", "full", "equal", "decorrelated"])
hints = st.floats(0, 120)


def verdict_for(
    outcome: Outcome = TRANSIENT,
    policy: Policy = DEFAULT,
    progress: Progress = AFTER_FIRST_ATTEMPT,
    *,
    random_number: float = 0.5,
    **options: Any,
) -> Wait | Stop:
    """Return the verdict of decide() at NOW, by default after the first attempt."""
    return decide(policy, progress, outcome, now=NOW, random_number=random_number, **options)


def expect_wait(*arguments: Any, **options: Any) -> Wait:
    """Return the verdict of decide(), which must be a Wait."""
    verdict = verdict_for(*arguments, **options)
    assert isinstance(verdict, Wait)
    return verdict


def failure_with_hint(delay: float | None, *, exact: bool = False) -> Outcome:
    """Return a transient failure with a hint."""
    return Outcome(Kind.TRANSIENT, hint=Hint(delay, exact=exact))


def make_downstream(balance: float = 500, state: str = "closed", latency: float = 0) -> Downstream:
    """Return a downstream with this budget balance, breaker state and expected latency."""
    breaker, budget = Breaker(), TokenBudget()
    downstream = Downstream("payments", breaker=breaker, budget=budget)
    budget.withdraw(500 - balance, NOW)
    breaker.force(state)
    if latency:
        downstream.latency.add(latency)
    return downstream


# --- retryable, repeatable, not retried by a layer below, attempts left --------------------------


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome(Kind.PERMANENT), Reason.PERMANENT),
        (Outcome(Kind.OVERLOADED), Reason.OVERLOADED),
        (Outcome(Kind.TRANSIENT, repeatable=False), Reason.NOT_REPEATABLE),
        (Outcome(Kind.THROTTLED, repeatable=False), Reason.NOT_REPEATABLE),
        (Outcome(Kind.TRANSIENT, retried_below=True), Reason.RETRIED_BELOW),
        (Outcome(Kind.THROTTLED, retried_below=True), Reason.RETRIED_BELOW),
        *((outcome_of_status(status, now=NOW), Reason.PERMANENT) for status in (400, 401, 403)),
        *((outcome_of_status(status, now=NOW), Reason.PERMANENT) for status in (404, 410, 422)),
        (outcome_of_status(503, {"x-should-retry": "false"}, now=NOW), Reason.OVERLOADED),
        (outcome_of_status(503, now=NOW, repeatable=False), Reason.NOT_REPEATABLE),
        (outcome_of_exception(ConnectionResetError(), repeatable=False), Reason.NOT_REPEATABLE),
        (outcome_of_code("UNAVAILABLE", [("grpc-retry-pushback-ms", "-1")]), Reason.OVERLOADED),
        (outcome_of_code("UNAVAILABLE", [("grpc-retry-pushback-ms", "x")]), Reason.OVERLOADED),
        (outcome_of_code("INTERNAL"), Reason.PERMANENT),
    ],
)
def test_outcomes_that_end_a_call(outcome: Outcome, reason: Reason) -> None:
    """An outcome that is not retryable, not repeatable or already retried has its own reason."""
    assert Stop(reason, hint=outcome.hint) == verdict_for(outcome)


def test_overloaded_server_with_a_retry_after() -> None:
    """A Retry-After of a server that asks for no retry is reported to the caller."""
    headers = {"x-should-retry": "false", "retry-after": "60"}
    outcome = outcome_of_status(503, headers, now=NOW)
    assert Stop(Reason.OVERLOADED, 60.0, outcome.hint) == verdict_for(outcome)


@pytest.mark.parametrize("limit", [1, 2, 4, 10_000])
def test_max_attempts(limit: int) -> None:
    """A call makes max_attempts attempts, including the first."""
    policy = Policy(max_attempts=limit)
    verdicts = [verdict_for(policy=policy, progress=Progress(n, NOW)) for n in (limit, limit + 1)]
    assert [Stop(Reason.ATTEMPTS)] * 2 == verdicts
    if limit > 1:
        assert isinstance(verdict_for(policy=policy, progress=Progress(limit - 1, NOW)), Wait)


def test_pushback_does_not_add_attempts() -> None:
    """A pushback after the last attempt does not lead to another attempt."""
    assert Stop(Reason.ATTEMPTS) == verdict_for(
        failure_with_hint(0.0, exact=True), progress=Progress(4, NOW)
    )


# --- breaker and budget --------------------------------------------------------------------------


def test_an_open_breaker() -> None:
    """An open breaker ends the call, and the verdict has the rest of the open period."""
    downstream = Downstream("payments", breaker=Breaker(consecutive=1, open_for=30, spread=0))
    downstream.record(0, TRANSIENT, duration=0, now=NOW - 10, random_number=0)
    assert Stop(Reason.BREAKER_OPEN, 20.0) == verdict_for(downstream=downstream)


def test_a_manually_opened_breaker() -> None:
    """A manually opened breaker ends the call, and the verdict has no time."""
    assert Stop(Reason.BREAKER_OPEN) == verdict_for(downstream=make_downstream(state="open"))


def test_the_price_is_that_of_the_outcome() -> None:
    """7 tokens pay for a retry after throttling, but not for one after a transient failure."""
    downstream = Downstream("payments", budget=TokenBudget("aws-2026", capacity=7))
    assert Stop(Reason.BUDGET_EMPTY) == verdict_for(TRANSIENT, downstream=downstream)
    assert isinstance(verdict_for(THROTTLED, downstream=downstream), Wait)


# --- order of the checks -------------------------------------------------------------------------

REASONS_IN_ORDER = [
    Reason.PERMANENT,
    Reason.NOT_REPEATABLE,
    Reason.RETRIED_BELOW,
    Reason.ATTEMPTS,
    Reason.BREAKER_OPEN,
    Reason.BUDGET_EMPTY,
    Reason.HINT_TOO_LONG,
    Reason.TOTAL_BUDGET,
    Reason.DEADLINE,
]
"""The reasons to stop in the order of their checks; each check can fail independently."""


def test_the_first_failed_check_gives_the_reason() -> None:
    """For every set of failed checks the first one gives the reason, and no state changes."""
    subsets = chain.from_iterable(
        combinations(REASONS_IN_ORDER, n) for n in range(len(REASONS_IN_ORDER) + 1)
    )
    for failed in subsets:
        downstream = make_downstream(
            balance=0 if Reason.BUDGET_EMPTY in failed else 100,
            state="open" if Reason.BREAKER_OPEN in failed else "closed",
        )
        before = downstream.status(NOW)
        verdict = decide(
            Policy(total_budget=5 if Reason.TOTAL_BUDGET in failed else 60),
            Progress(attempts=4 if Reason.ATTEMPTS in failed else 1, started=NOW - 10),
            Outcome(
                Kind.PERMANENT if Reason.PERMANENT in failed else Kind.TRANSIENT,
                Hint(200.0 if Reason.HINT_TOO_LONG in failed else 1.0),
                repeatable=Reason.NOT_REPEATABLE not in failed,
                retried_below=Reason.RETRIED_BELOW in failed,
            ),
            now=NOW,
            random_number=0.5,
            downstream=downstream,
            deadline=NOW - 1 if Reason.DEADLINE in failed else None,
        )
        actual = verdict.reason if isinstance(verdict, Stop) else None
        assert (failed[0] if failed else None) == actual
        assert before == downstream.status(NOW)


# --- delay ---------------------------------------------------------------------------------------


@given(jitters, st.integers(1, 10_000), st.none() | st.floats(0, 30), random_numbers)
def test_the_delay_before_retry_k(
    jitter: Any, k: int, previous: float | None, random_number: float
) -> None:
    """After k attempts the wait is the policy's delay for retry k."""
    policy = Policy(max_attempts=10_001, jitter=jitter)
    ceiling = policy.ceiling(k)
    expected = Wait(policy.delay(ceiling, previous, random_number), ceiling)
    assert expected == verdict_for(
        policy=policy, progress=Progress(k, NOW, previous), random_number=random_number
    )


@pytest.mark.parametrize(("k", "ceiling"), [(1, 1.0), (2, 2.0), (3, 4.0)])
def test_throttling_has_a_slower_base(k: int, ceiling: float) -> None:
    """After a throttled attempt the ceilings start at one second."""
    assert Wait(ceiling / 2, ceiling) == verdict_for(
        THROTTLED, progress=Progress(k, NOW), random_number=0.5
    )


# --- server hints --------------------------------------------------------------------------------


@given(jitters, st.integers(1, 50), hints, random_numbers)
def test_a_hint_is_never_shortened(jitter: Any, k: int, delay: float, random_number: float) -> None:
    """The wait is at least the hint and at least the wait without a hint."""
    policy, progress = Policy(max_attempts=99, jitter=jitter), Progress(k, NOW)
    actual = expect_wait(failure_with_hint(delay), policy, progress, random_number=random_number)
    assert actual.delay >= max(
        delay, expect_wait(TRANSIENT, policy, progress, random_number=random_number).delay
    )
    assert Hint(delay) == actual.hint


@given(st.sampled_from(["full", "equal", "decorrelated"]), hints, random_numbers, random_numbers)
def test_jitter_on_a_hint_is_positive(jitter: Any, delay: float, u: float, v: float) -> None:
    """Jitter lengthens a hint by a tenth or the backoff delay at most, rising with the number."""
    policy = Policy(jitter=jitter)
    shorter, longer = (
        expect_wait(failure_with_hint(delay), policy, random_number=number).delay
        for number in sorted((u, v))
    )
    assert delay <= shorter <= longer <= delay + max(3 * 0.1, delay / 10)


@pytest.mark.parametrize("jitter", ["none", "full", "equal", "decorrelated"])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_a_hint_of_zero_changes_nothing(jitter: Any, k: int) -> None:
    """A hint of 0 seconds does not change the backoff delay."""
    policy, progress = Policy(max_attempts=9, jitter=jitter), Progress(k, NOW, 0.1)
    for random_number in (0.0, 0.3, 0.9):
        expected = expect_wait(TRANSIENT, policy, progress, random_number=random_number).delay
        assert (
            expected
            == expect_wait(
                failure_with_hint(0.0), policy, progress, random_number=random_number
            ).delay
        )


@pytest.mark.parametrize("jitter", ["full", "equal", "decorrelated"])
def test_a_thousand_clients_with_the_same_hint(jitter: Any) -> None:
    """A thousand clients with a hint of 120 s retry evenly over the 12 s after it."""
    random, policy = Random(11), Policy(jitter=jitter)
    delays = [
        expect_wait(failure_with_hint(120.0), policy, random_number=random.random()).delay
        for _ in range(1_000)
    ]
    assert 120 <= min(delays) < 120.2
    assert 131.9 < max(delays) < 132
    per_second = Counter(int(delay) for delay in delays)
    assert (12, True) == (len(per_second), max(per_second.values()) < 120)


def test_hint_without_jitter() -> None:
    """Without jitter the delay is the longer of hint and ceiling."""
    assert Wait(120.0, 0.1, Hint(120.0)) == verdict_for(
        failure_with_hint(120.0), NO_JITTER, random_number=0.9
    )
    assert Wait(0.1, 0.1, Hint(0.05)) == verdict_for(
        failure_with_hint(0.05), NO_JITTER, random_number=0.9
    )


@pytest.mark.parametrize(
    ("headers", "delay"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "Sun, 06 Nov 1994 08:50:37 GMT"}, 60.0),
        ({"Retry-After": "Sunday, 06-Nov-94 08:50:37 GMT"}, 60.0),
        ({"Retry-After": "Sun Nov  6 08:50:37 1994"}, 60.0),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"x-ms-retry-after-ms": "1500"}, 1.5),
        ({"RateLimit": '"default";r=0;t=30'}, 30.0),
        ({"Retry-After": "soon"}, 0.0),
        ({"Retry-After": "-1"}, 0.0),
        ({"x-should-retry": "true"}, 0.0),
    ],
    ids=str,
)
def test_headers_set_the_shortest_delay(headers: dict[str, str], delay: float) -> None:
    """With a random number of 0 the delay is the hint, or 0 without a valid hint."""
    assert delay == expect_wait(outcome_of_status(503, headers, now=NOW), random_number=0.0).delay


def test_retry_info_sets_the_shortest_delay() -> None:
    """The delay is that of google.rpc.RetryInfo plus jitter."""
    info = b"\x0a\x02\x08\x05"  # RetryInfo(retry_delay=Duration(seconds=5))
    outcome = outcome_of_code("UNAVAILABLE", [("google.rpc.retryinfo-bin", info)])
    assert (5.0, 5.25) == (
        expect_wait(outcome, random_number=0.0).delay,
        expect_wait(outcome, random_number=0.5).delay,
    )


@given(jitters, st.integers(0, 120_000), random_numbers)
def test_pushback_has_no_jitter(jitter: Any, milliseconds: int, random_number: float) -> None:
    """The delay after a pushback is exactly the pushback."""
    metadata = [("grpc-retry-pushback-ms", str(milliseconds))]
    for code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
        actual = expect_wait(
            outcome_of_code(code, metadata), Policy(jitter=jitter), random_number=random_number
        )
        assert milliseconds / 1000 == actual.delay


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("max_hint", "delay"), [(120, 120.001), (120, 86_400), (1, 1.5), (0, 0.001), (1e9, MAX_DELAY_S)]
)
def test_hints_above_max_hint(max_hint: float, delay: float, exact: bool) -> None:
    """A hint above max_hint ends the call, and the verdict contains the hint."""
    hint = Hint(delay, exact=exact)
    expected = Stop(Reason.HINT_TOO_LONG, delay, hint)
    assert expected == verdict_for(Outcome(Kind.TRANSIENT, hint=hint), Policy(max_hint=max_hint))


@pytest.mark.parametrize("max_hint", [0, 5, 120, 3600])
def test_a_hint_equal_to_max_hint(max_hint: float) -> None:
    """A hint equal to max_hint is accepted, although jitter makes the wait longer than max_hint."""
    policy = Policy(max_hint=max_hint)
    assert expect_wait(failure_with_hint(max_hint), policy, random_number=0.9).delay >= max_hint


def test_default_max_hint() -> None:
    """The default max_hint is 120 s."""
    assert isinstance(verdict_for(failure_with_hint(120.0)), Wait)
    assert Stop(Reason.HINT_TOO_LONG, 121.0, Hint(121.0)) == verdict_for(failure_with_hint(121.0))


def test_a_hint_without_a_delay() -> None:
    """A hint without a delay does not change the delay, and the verdict contains the hint."""
    hint = Hint(should_retry=True)
    assert Wait(0.05, 0.1, hint) == verdict_for(Outcome(Kind.TRANSIENT, hint=hint))


# --- total budget and deadline -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elapsed", "latency", "limit", "fits"),
    [
        (0, 0, 2.25, True),  # the delay is 2
        (0, 0, 1.75, False),
        (1, 0, 3.25, True),
        (1, 0, 2.75, False),
        (1, 3, 6.25, True),
        (1, 3, 5.75, False),
        (7, 0, 5, False),
    ],
)
def test_time_limits(elapsed: float, latency: float, limit: float, fits: bool) -> None:
    """Elapsed time, delay and expected latency must fit into total budget and deadline."""
    policy = Policy(initial_delay=2, jitter="none")
    progress, downstream = Progress(1, NOW - elapsed), make_downstream(latency=latency)
    by_budget = verdict_for(
        policy=policy.replace(total_budget=limit), progress=progress, downstream=downstream
    )
    deadline = NOW - elapsed + limit
    by_deadline = verdict_for(
        policy=policy, progress=progress, downstream=downstream, deadline=deadline
    )
    if fits:
        assert (Wait(2, 2), Wait(2, 2)) == (by_budget, by_deadline)
    else:
        assert (Stop(Reason.TOTAL_BUDGET), Stop(Reason.DEADLINE)) == (by_budget, by_deadline)


def test_without_a_downstream_the_expected_latency_is_zero() -> None:
    """Without a downstream a wait may end just before the deadline."""
    policy = Policy(initial_delay=2, jitter="none", total_budget=2.125)
    assert Wait(2, 2) == verdict_for(policy=policy, deadline=NOW + 2.125)


def test_wait_that_leaves_no_time() -> None:
    """A wait that would end exactly at the total budget or the deadline is not started."""
    policy = Policy(initial_delay=2, jitter="none")
    assert Stop(Reason.DEADLINE) == verdict_for(policy=policy, deadline=NOW + 2)
    assert Stop(Reason.TOTAL_BUDGET) == verdict_for(policy=policy.replace(total_budget=2))


def test_no_time_limit_by_default() -> None:
    """Without a total budget and a deadline, elapsed time never ends a call."""
    progress = Progress(1, started=NOW - 365 * 86_400)
    assert isinstance(verdict_for(progress=progress, downstream=make_downstream(latency=9)), Wait)


@pytest.mark.parametrize(
    ("jitter", "time_left", "delays"),
    [
        ("full", 1.0, (0.0, 0.5, 0.75)),  # usually 0 to 4
        ("full", 8.0, (0.0, 2.0, 3.0)),  # the whole range fits
        ("equal", 3.0, (2.0, 2.5, 2.75)),  # usually 2 to 4
        ("decorrelated", 2.0, (1.0, 1.5, 1.75)),  # usually 1 to 6
    ],
)
@pytest.mark.parametrize("limit", ["deadline", "total budget"])
def test_the_delay_is_drawn_from_the_range_that_fits(
    jitter: Any, time_left: float, delays: tuple[float, ...], limit: str
) -> None:
    """Jitter uses only the part of its range that fits into the deadline or the total budget."""
    latency, elapsed = 0.25, 7.0
    policy = Policy(max_attempts=9, initial_delay=1, jitter=jitter)
    deadline = None
    if limit == "deadline":
        deadline = NOW + time_left + latency
    else:
        policy = policy.replace(total_budget=elapsed + time_left + latency)
    drawn = [
        decide(
            policy,
            Progress(3, NOW - elapsed, previous_delay=2.0),
            TRANSIENT,
            NOW,
            random_number,
            make_downstream(latency=latency),
            deadline,
        )
        for random_number in (0.0, 0.5, 0.75)
    ]
    assert [Wait(delay, 4) for delay in delays] == drawn


def test_a_jitter_function_gets_the_time_left_as_ceiling() -> None:
    """A jitter function whose delay does not fit is called again with a lower ceiling."""
    policy = Policy(initial_delay=4, jitter=lambda ceiling, _previous, u: ceiling * u)
    deadline = NOW + 1
    fits = decide(policy, Progress(1, NOW), TRANSIENT, NOW, 0.125, deadline=deadline)
    assert Wait(0.5, 4) == fits
    assert Wait(0.5, 4) == decide(policy, Progress(1, NOW), TRANSIENT, NOW, 0.5, deadline=deadline)
    policy = policy.replace(jitter=lambda ceiling, _previous, _u: ceiling)
    verdict = decide(policy, Progress(1, NOW), TRANSIENT, NOW, 0.5, deadline=deadline)
    assert Stop(Reason.DEADLINE) == verdict


def test_only_the_random_part_of_a_hint_is_shortened() -> None:
    """With a hint, the wait that is added to it becomes shorter, but not the hint."""
    policy = Policy(initial_delay=20)
    outcome = failure_with_hint(4.0)
    for random_number, delay in ((0.5, 4.5), (0.75, 4.75)):
        verdict = decide(policy, Progress(1, NOW), outcome, NOW, random_number, deadline=NOW + 5)
        assert Wait(delay, 20, outcome.hint) == verdict
    stopped = decide(policy, Progress(1, NOW), outcome, NOW, 0.5, deadline=NOW + 4)
    assert Stop(Reason.DEADLINE, 4.0, outcome.hint) == stopped


@pytest.mark.parametrize("jitter", ["full", "decorrelated"])
@pytest.mark.parametrize("outage", [0.3, 1.0, 4.0, 9.0])
def test_calls_succeed_if_the_dependency_returns_before_the_deadline(
    jitter: Any, outage: float
) -> None:
    """No call ends early if its dependency returns within nine tenths of the deadline."""
    policy = Policy(max_attempts=99, jitter=jitter)
    rng = Random(1)
    for _ in range(200):
        call, now = Call(policy, deadline=10.0), 0.0
        while now < outage:
            assert isinstance(call.start(now), Attempt)
            now += 0.01
            verdict = call.record_failure(TRANSIENT, now, rng.random())
            assert isinstance(verdict, Wait)
            now += verdict.delay
        assert isinstance(call.start(now), Attempt)


@pytest.mark.parametrize("exact", [True, False])
def test_a_hint_that_does_not_fit(exact: bool) -> None:
    """A hint beyond the total budget or the deadline ends the call, and the verdict contains it."""
    outcome = failure_with_hint(60.0, exact=exact)
    expected = (60.0, outcome.hint)
    assert Stop(Reason.TOTAL_BUDGET, *expected) == verdict_for(outcome, Policy(total_budget=30))
    assert Stop(Reason.DEADLINE, *expected) == verdict_for(outcome, deadline=NOW + 30)


@given(
    jitters,
    st.integers(1, 20),
    st.none() | hints,
    st.floats(0, 100),
    st.tuples(st.floats(0.1, 100), st.floats(-10, 100), st.floats(0, 5), random_numbers),
)
def test_waits_fit_into_the_time_limits(
    jitter: Any,
    k: int,
    hint: float | None,
    elapsed: float,
    limits: tuple[float, float, float, float],
) -> None:
    """No wait ends after the total budget or the deadline."""
    total_budget, time_left, latency, random_number = limits
    policy = Policy(max_attempts=99, jitter=jitter, total_budget=total_budget)
    verdict = decide(
        policy,
        Progress(k, 0.0),
        TRANSIENT if hint is None else failure_with_hint(hint),
        now=elapsed,
        random_number=random_number,
        downstream=make_downstream(latency=latency),
        deadline=elapsed + time_left,
    )
    if isinstance(verdict, Wait):
        ends_at = elapsed + verdict.delay + latency
        assert ends_at <= min(total_budget, elapsed + time_left) + 1e-9  # a rounding error
