"""Tests for Policy.explain()."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.backoff import Schedule
from tarry.core.call import Call
from tarry.core.outcome import TRANSIENT
from tarry.core.policy import PRESETS, Policy
from tarry.core.verdict import Wait


def line_after(text: str, start: str) -> str:
    """Return the rest of the line that starts with `start`."""
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line.removeprefix(start).strip()


def schedule_rows(text: str) -> list[str]:
    """Return the rows of the schedule, with single spaces."""
    return [re.sub(r" +", " ", row.strip()) for row in text.split("\n\n")[1].splitlines()[1:]]


# --- text and schedule ---------------------------------------------------------------------------


def test_explanation_of_the_default_policy() -> None:
    """The text has a headline, the schedule, the worst case time and the load factor."""
    expected = """\
4 attempts, exponential backoff, full jitter

retry   ceiling   delay from .. to
    1    100 ms         0 ms .. 100 ms
    2    200 ms         0 ms .. 200 ms
    3    400 ms         0 ms .. 400 ms

worst case time: 700 ms of waiting, plus the attempts themselves
worst case load: 4 x the calls while every attempt fails, unless a retry budget bounds it"""
    assert expected == Policy().explain()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_columns_are_aligned(name: str) -> None:
    """In every row of a preset the ceiling ends at column 15 and " .. " is below the header's."""
    table = Policy.preset(name).explain().split("\n\n")[1].splitlines()
    rows = [row for row in table[1:] if ".." in row and "more" not in row]
    columns = {(len(row[:15].rstrip()), row.index(" .. ")) for row in rows}

    assert {(15, table[0].index(" .. "))} == columns


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_explained_without_exponents(name: str) -> None:
    """The explanation of a preset contains no number such as 1e+03."""
    text = Policy.preset(name).explain()
    assert [] == re.findall(r".*\de\+?\d.*", text)


@pytest.mark.parametrize(
    ("jitter", "expected"),
    [
        ("none", ["1 2 s 2 s .. 2 s", "2 4 s 4 s .. 4 s", "3 8 s 8 s .. 8 s"]),
        ("full", ["1 2 s 0 ms .. 2 s", "2 4 s 0 ms .. 4 s", "3 8 s 0 ms .. 8 s"]),
        ("equal", ["1 2 s 1 s .. 2 s", "2 4 s 2 s .. 4 s", "3 8 s 4 s .. 8 s"]),
        ("decorrelated", ["1 2 s 2 s .. 6 s", "2 4 s 2 s .. 18 s", "3 8 s 2 s .. 30 s"]),
    ],
)
def test_rows(jitter: Any, expected: list[str]) -> None:
    """Each row contains the ceiling, the shortest and the longest delay."""
    assert expected == schedule_rows(Policy(initial_delay=2, jitter=jitter).explain())


def test_long_schedules_are_cut() -> None:
    """After twelve retries a row has the number of the others and the last ceiling."""
    rows = schedule_rows(Policy(max_attempts=20).explain())
    assert (13, "... 7 more, the last 30 s") == (len(rows), rows[-1])
    assert 12 == len(schedule_rows(Policy(max_attempts=13).explain()))
    rising = Policy(max_attempts=20, backoff="linear").explain()
    assert "... 7 more, the last 1.9 s" == schedule_rows(rising)[-1]


def test_a_single_attempt() -> None:
    """A policy without retries has no row, no waiting time and a load factor of 1."""
    text = Policy(max_attempts=1).explain()
    assert [] == schedule_rows(text)
    assert "0 ms of waiting, plus the attempts themselves" == line_after(text, "worst case time:")
    assert "1 x the calls while every attempt fails" == line_after(text, "worst case load:")


def test_no_jitter() -> None:
    """A policy without jitter is described as such."""
    text = Policy(jitter="none").explain()
    assert text.startswith("4 attempts, exponential backoff, no jitter\n")


def test_callables_are_called_custom() -> None:
    """A backoff or jitter that is a callable is described as custom."""
    policy = Policy(backoff=Schedule((1, 2)), jitter=lambda c, _p, _u: c)
    assert policy.explain().startswith("4 attempts, custom backoff, custom jitter\n")


def test_ten_thousand_attempts() -> None:
    """The explanation of 10,000 attempts has the number of omitted rows and the load factor."""
    text = Policy(max_attempts=10_000, jitter="none").explain()
    assert "... 9987 more, the last 30 s" == schedule_rows(text)[-1]
    assert line_after(text, "worst case load:").startswith("10000 x ")


# --- worst case ----------------------------------------------------------------------------------


def test_attempt_timeouts_are_part_of_the_worst_case() -> None:
    text = Policy(initial_delay=1, attempt_timeout=10, jitter="none").explain()
    assert "47 s, attempts included" == line_after(text, "worst case time:")


def test_a_total_budget_bounds_the_waiting() -> None:
    """The total budget limits the waiting time and the retries that are listed."""
    policy = Policy(max_attempts=100, initial_delay=1, backoff="fixed", jitter="none")
    text = policy.replace(total_budget=5.5).explain()
    assert 5 == len(schedule_rows(text))
    assert "5 s of waiting, plus the attempts themselves" == line_after(text, "worst case time:")
    assert "5.5 s; no attempt starts later" == line_after(text, "total budget:")
    assert line_after(text, "worst case load:").startswith("6 x ")
    with_jitter = policy.replace(total_budget=5.5, jitter="full").explain()
    assert line_after(with_jitter, "worst case time:").startswith("5.5 s of waiting")
    assert line_after(with_jitter, "worst case load:").startswith("100 x ")


def test_total_budget_shows_the_usual_number_of_attempts() -> None:
    """With random delays, the attempts that fit into the total budget are estimated."""
    text = Policy.preset("patient").explain()
    expected = "24 h; no attempt starts later, so about 59 attempts if every attempt fails"
    assert expected == line_after(text, "total budget:")


def test_explained_retries_are_those_that_a_call_makes() -> None:
    """The schedule has exactly the retries that a call makes within its total budget."""
    policy = Policy(
        max_attempts=99, initial_delay=1, backoff="fixed", jitter="none", total_budget=5
    )
    call, now = Call(policy), 0.0
    call.start(now)
    while isinstance(verdict := call.record_failure(TRANSIENT, now, 0.5), Wait):
        now += verdict.delay
        call.start(now)
    assert call.attempts - 1 == len(schedule_rows(policy.explain()))


def test_a_total_budget_bounds_the_attempts_too() -> None:
    """The worst case time is the total budget plus the timeout of the last attempt."""
    policy = Policy(
        max_attempts=100,
        initial_delay=1,
        backoff="fixed",
        jitter="none",
        total_budget=10,
        attempt_timeout=5,
    )
    assert "15 s, attempts included" == line_after(policy.explain(), "worst case time:")


@given(
    st.integers(1, 40),
    st.floats(0.01, 10),
    st.sampled_from(["none", "full", "equal", "decorrelated"]),
    st.integers(0, 2**32),
)
def test_no_call_waits_longer_than_the_worst_case(
    attempts: int, initial: float, jitter: Any, seed: int
) -> None:
    """The sum of the delays is at most the worst case time in the text."""
    policy = Policy(max_attempts=attempts, initial_delay=initial, jitter=jitter)
    formatted = line_after(policy.explain(), "worst case time:").partition(" of waiting")[0]
    number, unit = formatted.split()
    worst_case = float(number) * {"ms": 0.001, "s": 1, "min": 60, "h": 3600}[unit]
    assert sum(policy.delays(Random(seed))) <= worst_case * 1.006


def test_a_billion_attempts() -> None:
    """The explanation of a billion attempts has the number of omitted rows and the load factor."""
    text = Policy(max_attempts=10**9, jitter="none").explain()
    assert "999999987 more, the last 30 s" in text
    assert "worst case load: 1000000000 x" in text
