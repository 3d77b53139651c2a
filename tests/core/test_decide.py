"""The one answer to "should this be retried, and when?", question by question."""

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
from tarry.core.verdict import Progress, Reason, Stop, Wait

NOW = 784_111_777.0  # 6 November 1994, 08:49:37
DEFAULT = Policy()
PLAIN = Policy(jitter="none")
ONE = Progress(attempts=1, started=NOW)
THROTTLED = Outcome(Kind.THROTTLED)

draws = st.floats(0, 1, exclude_max=True)
jitters = st.sampled_from(["none", "full", "equal", "decorrelated"])
hints = st.floats(0, 120)


def ask(
    outcome: Outcome = TRANSIENT,
    policy: Policy = DEFAULT,
    progress: Progress = ONE,
    *,
    random_number: float = 0.5,
    **more: Any,
) -> Wait | Stop:
    """Ask after the first attempt, at NOW."""
    return decide(policy, progress, outcome, now=NOW, random_number=random_number, **more)


def wait(*arguments: Any, **more: Any) -> Wait:
    """Ask where the answer is to wait."""
    verdict = ask(*arguments, **more)
    assert isinstance(verdict, Wait)
    return verdict


def failure_with_hint(delay: float | None, **more: Any) -> Outcome:
    """Return a transient failure with a hint."""
    return Outcome(Kind.TRANSIENT, hint=Hint(delay, **more))


def downstream(balance: float = 500, state: str = "closed", took: float = 0.0) -> Downstream:
    """Make a dependency with so much budget, its breaker so, whose calls took so long."""
    made = Downstream("payments", breaker=Breaker(), budget=TokenBudget())
    assert made.budget is not None
    assert made.breaker is not None
    made.budget.withdraw(500 - balance, NOW)
    made.breaker.force(state)
    if took:
        made.latency.add(took)
    return made


# --- 1 to 4: retryable, safe, not retried already, attempts left ---------------------------------


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
    """What is not retryable, not safe or retried already ends the call for its own reason."""
    assert Stop(reason, hint=outcome.hint) == ask(outcome)


def test_a_server_that_says_no_may_say_until_when() -> None:
    """A hint with "do not retry" is reported, so that the caller knows when to call again."""
    headers = {"x-should-retry": "false", "retry-after": "60"}
    outcome = outcome_of_status(503, headers, now=NOW)
    assert Stop(Reason.OVERLOADED, 60.0, outcome.hint) == ask(outcome)


@pytest.mark.parametrize(
    "outcome",
    [
        TRANSIENT,
        THROTTLED,
        outcome_of_status(503, now=NOW),
        outcome_of_status(404, {"x-should-retry": "true"}, now=NOW),
        outcome_of_status(404, {"stripe-should-retry": "true"}, now=NOW),
        outcome_of_exception(ConnectionRefusedError(), repeatable=False),
        outcome_of_code("UNAVAILABLE"),
        outcome_of_code("RESOURCE_EXHAUSTED"),
    ],
)
def test_outcomes_that_are_retried(outcome: Outcome) -> None:
    """What is retryable and safe is retried after a wait."""
    assert isinstance(ask(outcome), Wait)


def test_marked_errors_are_retried_on_demand() -> None:
    """An outer loop retries what an inner one gave up on only with ignore_retried_below."""
    assert isinstance(
        ask(Outcome(Kind.TRANSIENT, retried_below=True), Policy(ignore_retried_below=True)), Wait
    )


@pytest.mark.parametrize("most", [1, 2, 4, 10_000])
def test_attempts(most: int) -> None:
    """There are max_attempts attempts, the first included."""
    policy = Policy(max_attempts=most)
    verdicts = [ask(policy=policy, progress=Progress(n, NOW)) for n in (most, most + 1)]
    assert [Stop(Reason.ATTEMPTS)] * 2 == verdicts
    assert most == 1 or isinstance(ask(policy=policy, progress=Progress(most - 1, NOW)), Wait)


def test_pushback_does_not_add_attempts() -> None:
    """A server that names a delay cannot make a call go on for ever."""
    assert Stop(Reason.ATTEMPTS) == ask(
        failure_with_hint(0.0, exact=True), progress=Progress(4, NOW)
    )


# --- 5: breaker and budget -----------------------------------------------------------------------


def test_a_breaker_that_opened() -> None:
    """An open breaker ends the call and says when to come back."""
    broken = Downstream("payments", breaker=Breaker(consecutive=1, open_for=30, spread=0))
    broken.record(0, TRANSIENT, duration=0, now=NOW - 10, random_number=0)
    assert Stop(Reason.BREAKER_OPEN, 20.0) == ask(downstream=broken)


def test_a_breaker_opened_by_hand() -> None:
    """The end of a manually opened breaker is unknown."""
    assert Stop(Reason.BREAKER_OPEN) == ask(downstream=downstream(state="open"))


@pytest.mark.parametrize(("balance", "stops"), [(0, True), (4.9, True), (5, False), (500, False)])
def test_a_budget_that_does_not_pay(balance: float, stops: bool) -> None:
    """A retry that the budget cannot pay for in full is not made."""
    verdict = ask(downstream=downstream(balance))
    assert stops == (verdict == Stop(Reason.BUDGET_EMPTY))
    assert stops != isinstance(verdict, Wait)


def test_the_price_is_that_of_the_outcome() -> None:
    """With 7 tokens a throttled retry is paid for and a transient one is not."""
    poor = Downstream("payments", budget=TokenBudget("aws-2026", capacity=7))
    assert Stop(Reason.BUDGET_EMPTY) == ask(TRANSIENT, downstream=poor)
    assert isinstance(ask(THROTTLED, downstream=poor), Wait)


# --- the order -----------------------------------------------------------------------------------

RULES = [
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
"""The questions in their order, each of which can be broken by itself."""


def test_the_earliest_question_answers() -> None:
    """Whichever rules are broken at once, the first decides, and nothing is charged or moved."""
    subsets = chain.from_iterable(combinations(RULES, n) for n in range(len(RULES) + 1))
    for broken in subsets:
        behind = downstream(
            balance=0 if Reason.BUDGET_EMPTY in broken else 100,
            state="open" if Reason.BREAKER_OPEN in broken else "closed",
        )
        before = behind.status(NOW)
        verdict = decide(
            Policy(total_budget=5 if Reason.TOTAL_BUDGET in broken else 60),
            Progress(attempts=4 if Reason.ATTEMPTS in broken else 1, started=NOW - 10),
            Outcome(
                Kind.PERMANENT if Reason.PERMANENT in broken else Kind.TRANSIENT,
                Hint(200.0 if Reason.HINT_TOO_LONG in broken else 1.0),
                repeatable=Reason.NOT_REPEATABLE not in broken,
                retried_below=Reason.RETRIED_BELOW in broken,
            ),
            now=NOW,
            random_number=0.5,
            downstream=behind,
            deadline=NOW - 1 if Reason.DEADLINE in broken else None,
        )
        actual = verdict.reason if isinstance(verdict, Stop) else None
        assert (broken[0] if broken else None) == actual
        assert before == behind.status(NOW)


# --- 6: the delay --------------------------------------------------------------------------------


@given(jitters, st.integers(1, 10_000), st.none() | st.floats(0, 30), draws)
def test_the_delay_before_retry_k(
    jitter: Any, k: int, previous: float | None, random_number: float
) -> None:
    """After k attempts the wait is that of the policy before retry k."""
    policy = Policy(max_attempts=10_001, jitter=jitter)
    ceiling = policy.ceiling(k)
    expected = Wait(policy.delay(ceiling, previous, random_number), ceiling)
    assert expected == ask(
        policy=policy, progress=Progress(k, NOW, previous), random_number=random_number
    )


@pytest.mark.parametrize(("k", "ceiling"), [(1, 1.0), (2, 2.0), (3, 4.0)])
def test_throttling_has_a_slower_base(k: int, ceiling: float) -> None:
    """After a throttled attempt the ceilings start at a second."""
    assert Wait(ceiling / 2, ceiling) == ask(
        THROTTLED, progress=Progress(k, NOW), random_number=0.5
    )


@pytest.mark.parametrize(
    ("attempts", "restarted", "ceiling"), [(3, 0, 0.4), (3, 1, 0.2), (3, 2, 0.1), (4, 2, 0.2)]
)
def test_backoff_starts_over(attempts: int, restarted: int, ceiling: float) -> None:
    """After an exact delay retries are counted from the attempt before it."""
    progress = Progress(attempts, NOW, None, restarted)
    assert Wait(ceiling, ceiling) == ask(policy=PLAIN.replace(max_attempts=9), progress=progress)


# --- server hints --------------------------------------------------------------------------------


@given(jitters, st.integers(1, 50), hints, draws)
def test_a_hint_is_never_shortened(jitter: Any, k: int, delay: float, random_number: float) -> None:
    """The wait is at least the hint and at least what it would have been without."""
    policy, progress = Policy(max_attempts=99, jitter=jitter), Progress(k, NOW)
    actual = wait(failure_with_hint(delay), policy, progress, random_number=random_number)
    assert actual.delay >= max(
        delay, wait(TRANSIENT, policy, progress, random_number=random_number).delay
    )
    assert Hint(delay) == actual.hint


@given(st.sampled_from(["full", "equal", "decorrelated"]), hints, draws, draws)
def test_jitter_on_a_hint_is_positive(
    jitter: Any, delay: float, random_number: float, v: float
) -> None:
    """Jitter adds to the hint, the more the larger the draw, by a tenth or the ceiling at most."""
    low, high = sorted((random_number, v))
    policy = Policy(jitter=jitter)
    less, more = (
        wait(failure_with_hint(delay), policy, random_number=draw).delay for draw in (low, high)
    )
    assert delay <= less <= more <= delay + max(3 * 0.1, delay / 10)


@pytest.mark.parametrize("jitter", ["none", "full", "equal", "decorrelated"])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_a_hint_of_nothing_changes_nothing(jitter: Any, k: int) -> None:
    """A floor of 0 seconds leaves the backoff as it is."""
    policy, progress = Policy(max_attempts=9, jitter=jitter), Progress(k, NOW, 0.1)
    for random_number in (0.0, 0.3, 0.9):
        expected = wait(TRANSIENT, policy, progress, random_number=random_number).delay
        assert (
            expected
            == wait(failure_with_hint(0.0), policy, progress, random_number=random_number).delay
        )


@pytest.mark.parametrize("jitter", ["full", "equal", "decorrelated"])
def test_a_thousand_clients_told_the_same(jitter: Any) -> None:
    """A thousand clients with a hint of 120 s retry evenly over the 12 s after it."""
    dice, policy = Random(11), Policy(jitter=jitter)
    delays = [
        wait(failure_with_hint(120.0), policy, random_number=dice.random()).delay
        for _ in range(1_000)
    ]
    assert 120 <= min(delays) < 120.2
    assert 131.9 < max(delays) < 132
    per_second = Counter(int(delay) for delay in delays)
    assert (12, True) == (len(per_second), max(per_second.values()) < 120)


def test_a_policy_without_jitter_takes_the_hint_as_it_is() -> None:
    """Without jitter the delay is the longer of hint and ceiling."""
    assert Wait(120.0, 0.1, Hint(120.0)) == ask(failure_with_hint(120.0), PLAIN, random_number=0.9)
    assert Wait(0.1, 0.1, Hint(0.05)) == ask(failure_with_hint(0.05), PLAIN, random_number=0.9)


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
def test_headers_are_a_floor(headers: dict[str, str], delay: float) -> None:
    """Whatever form the hint has, at the lowest draw the wait is the hint, or the backoff's 0."""
    assert delay == wait(outcome_of_status(503, headers, now=NOW), random_number=0.0).delay


def test_retry_info_is_a_floor() -> None:
    """google.rpc.RetryInfo is waited for, with jitter on top."""
    info = b"\x0a\x02\x08\x05"  # RetryInfo(retry_delay=Duration(seconds=5))
    outcome = outcome_of_code("UNAVAILABLE", [("google.rpc.retryinfo-bin", info)])
    assert (5.0, 5.25) == (
        wait(outcome, random_number=0.0).delay,
        wait(outcome, random_number=0.5).delay,
    )


@given(jitters, st.integers(0, 120_000), draws)
def test_pushback_is_obeyed_to_the_letter(
    jitter: Any, milliseconds: int, random_number: float
) -> None:
    """A pushback is waited for exactly, whatever is drawn."""
    metadata = [("grpc-retry-pushback-ms", str(milliseconds))]
    for code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
        actual = wait(
            outcome_of_code(code, metadata), Policy(jitter=jitter), random_number=random_number
        )
        assert milliseconds / 1000 == actual.delay


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("most", "delay"), [(120, 120.001), (120, 86_400), (1, 1.5), (0, 0.001), (1e9, MAX_DELAY_S)]
)
def test_hints_beyond_the_longest(most: float, delay: float, exact: bool) -> None:
    """A hint above max_hint ends the call at once, and the verdict carries it."""
    hint = Hint(delay, exact=exact)
    expected = Stop(Reason.HINT_TOO_LONG, delay, hint)
    assert expected == ask(Outcome(Kind.TRANSIENT, hint=hint), Policy(max_hint=most))


@pytest.mark.parametrize("most", [0, 5, 120, 3600])
def test_the_longest_hint_itself_is_waited_for(most: float) -> None:
    """A hint of max_hint is within it; jitter on top does not count."""
    assert wait(failure_with_hint(most), Policy(max_hint=most), random_number=0.9).delay >= most


def test_two_minutes_are_the_longest_by_default() -> None:
    """In the library a server may ask for 120 s and no more."""
    assert isinstance(ask(failure_with_hint(120.0)), Wait)
    assert Stop(Reason.HINT_TOO_LONG, 121.0, Hint(121.0)) == ask(failure_with_hint(121.0))


def test_a_hint_without_a_wait() -> None:
    """A hint that names no time leaves the delay alone and is still reported."""
    hint = Hint(should_retry=True)
    assert Wait(0.05, 0.1, hint) == ask(Outcome(Kind.TRANSIENT, hint=hint))


# --- 7: total budget and deadline ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("elapsed", "took", "limit", "fits"),
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
def test_what_does_not_fit(elapsed: float, took: float, limit: float, fits: bool) -> None:
    """Elapsed time, delay and expected call time must fit into total budget and deadline."""
    policy = Policy(initial_delay=2, jitter="none")
    progress, behind = Progress(1, NOW - elapsed), downstream(took=took)
    by_budget = ask(policy=policy.replace(total_budget=limit), progress=progress, downstream=behind)
    deadline = NOW - elapsed + limit
    by_deadline = ask(policy=policy, progress=progress, downstream=behind, deadline=deadline)
    if fits:
        assert (Wait(2, 2), Wait(2, 2)) == (by_budget, by_deadline)
    else:
        assert (Stop(Reason.TOTAL_BUDGET), Stop(Reason.DEADLINE)) == (by_budget, by_deadline)


def test_without_a_downstream_no_call_time_is_expected() -> None:
    """A wait that leaves next to nothing is waited for where no call was seen yet."""
    policy = Policy(initial_delay=2, jitter="none", total_budget=2.125)
    assert Wait(2, 2) == ask(policy=policy, deadline=NOW + 2.125)


def test_no_time_is_too_little() -> None:
    """A wait that would end at the very end of total budget or deadline is not begun."""
    policy = Policy(initial_delay=2, jitter="none")
    assert Stop(Reason.DEADLINE) == ask(policy=policy, deadline=NOW + 2)
    assert Stop(Reason.TOTAL_BUDGET) == ask(policy=policy.replace(total_budget=2))


def test_no_budget_unless_given() -> None:
    """Without a total budget and a deadline time alone never ends a call."""
    year = 365 * 86_400
    assert isinstance(ask(progress=Progress(1, NOW - year), downstream=downstream(took=9)), Wait)


@pytest.mark.parametrize("exact", [True, False])
def test_a_hint_that_does_not_fit(exact: bool) -> None:
    """A hint beyond the budget or the deadline ends the call at once and is reported."""
    outcome = failure_with_hint(60.0, exact=exact)
    expected = (60.0, outcome.hint)
    assert Stop(Reason.TOTAL_BUDGET, *expected) == ask(outcome, Policy(total_budget=30))
    assert Stop(Reason.DEADLINE, *expected) == ask(outcome, deadline=NOW + 30)


@given(
    jitters,
    st.integers(1, 20),
    st.none() | hints,
    st.floats(0, 100),
    st.tuples(st.floats(0.1, 100), st.floats(-10, 100), st.floats(0, 5), draws),
)
def test_whatever_waits_fits(
    jitter: Any,
    k: int,
    hint: float | None,
    elapsed: float,
    rest: tuple[float, float, float, float],
) -> None:
    """No wait leads beyond the total budget or the deadline."""
    budget, left, took, random_number = rest
    policy = Policy(max_attempts=99, jitter=jitter, total_budget=budget)
    verdict = decide(
        policy,
        Progress(k, 0.0),
        TRANSIENT if hint is None else failure_with_hint(hint),
        now=elapsed,
        random_number=random_number,
        downstream=downstream(took=took),
        deadline=elapsed + left,
    )
    if isinstance(verdict, Wait):
        assert elapsed + verdict.delay + took <= min(budget, elapsed + left)
