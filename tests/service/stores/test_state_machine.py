"""Stateful test: all implementations of the store port behave alike."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.service.stores.state_machine import StoreMachine


@pytest.mark.timeout(600)  # the `thorough` profile takes minutes
def test_stores_have_equal_results_and_contents() -> None:
    """After the same random calls, all stores have the same results and contents."""
    state_machine_settings = settings(
        max_examples=settings().max_examples // 10, stateful_step_count=40
    )
    run_state_machine_as_test(StoreMachine, settings=state_machine_settings)
