"""All stores do the same: random calls, side by side, and nothing to tell the engines apart."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.service.stores.state_machine import StoreMachine


@pytest.mark.timeout(600)  # a thorough profile takes minutes
def test_the_stores_agree() -> None:
    """However they are driven, all engines answer the same and keep the same."""
    steps = settings(max_examples=settings().max_examples // 10, stateful_step_count=40)
    run_state_machine_as_test(StoreMachine, settings=steps)
