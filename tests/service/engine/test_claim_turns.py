"""Turns in which processes that share a store claim."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.service.engine.claim_turns import TURN_MS, ClaimTurns

NEVER = float("-inf")


def new_turns(*processes: str) -> list[ClaimTurns]:
    """Return the turns of each of these processes."""
    turns = [ClaimTurns() for _ in processes]
    for name, each in zip(processes, turns, strict=True):
        each.assign(name, processes)
    return turns


@pytest.mark.parametrize("last_claim_ms", [NEVER, 999.0, 1000.0])
def test_a_single_process_claims_at_once(last_claim_ms: float) -> None:
    """Without other processes, no claim waits."""
    assert 0 == ClaimTurns().delay_ms(1000.0, last_claim_ms)
    [turns] = new_turns("a")
    assert 0 == turns.delay_ms(1000.0, last_claim_ms)


def test_processes_claim_one_after_another() -> None:
    """Processes that have claimed just now wait for turns that follow each other."""
    turns = new_turns("b", "a", "c")
    now_ms = 60.0 * 1000
    delays = [each.delay_ms(now_ms + 5, now_ms) for each in turns]
    assert [TURN_MS - 5, 3 * TURN_MS - 5, 2 * TURN_MS - 5] == delays


def test_a_process_claims_at_once_after_a_round_without_claims() -> None:
    """A task that arrives while the processes are idle does not wait for a turn."""
    for turns in new_turns("a", "b"):
        assert 0 == turns.delay_ms(1_007.0, 1_007.0 - 2 * TURN_MS)
        assert 0 == turns.delay_ms(1_007.0, NEVER)


def test_a_process_that_is_not_listed_has_a_turn() -> None:
    """A process counts itself, even if the store has not recorded it yet."""
    turns = ClaimTurns()
    turns.assign("b", ["a"])
    assert 2 == turns.process_count
    assert TURN_MS == turns.delay_ms(4.0 * TURN_MS, 4.0 * TURN_MS)


def test_the_last_process_claims_at_once() -> None:
    """The turns end when the other processes have stopped."""
    [turns, _] = new_turns("a", "b")
    turns.assign("a", ["a"])
    assert 0 == turns.delay_ms(1_007.0, 1_006.0)


@given(
    processes=st.integers(2, 40),
    position=st.integers(0, 39),
    now_ms=st.floats(0, 1e13),
    age_ms=st.floats(0, 1000),
)
def test_delays_are_bounded(processes: int, position: int, now_ms: float, age_ms: float) -> None:
    """With any number of processes, a process may claim at least every 100 ms."""
    names = [f"{number:02}" for number in range(processes)]
    turns = ClaimTurns()
    turns.assign(names[position % processes], names)
    assert 0 <= turns.delay_ms(now_ms, now_ms - age_ms) <= 5 * TURN_MS
