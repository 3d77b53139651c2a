"""The reference store: conformance and determinism."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tarry.runtime.effects import effects
from tarry.service.store import StoredTaskFilter
from tests.service.stores.conformance.suite import CASES, Case, StoreHarness, case_name
from tests.service.stores.harness import (
    LEASE,
    ManualClock,
)
from tests.service.stores.reference_store import ReferenceState, ReferenceStore


def new_harness() -> StoreHarness:
    """Return a harness whose stores share one `ReferenceState`."""
    state = ReferenceState()
    return StoreHarness(lambda clock: ReferenceStore(clock, state))


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance(case: Case) -> None:
    """The reference store passes the conformance suite."""
    asyncio.run(new_harness().run(case))


def test_default_clock_is_the_system_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a clock argument the store's time is the Unix time in milliseconds."""
    monkeypatch.setattr(effects, "unix_time", lambda: 5.25)

    assert 5250 == asyncio.run(ReferenceStore().ping())


def test_no_method_suspends() -> None:
    """No call suspends, so that a simulation is deterministic."""
    store = ReferenceStore(ManualClock())
    calls: list[Coroutine[Any, Any, object]] = [
        store.open(),
        store.add([]),
        store.claim(LEASE, limit=1, per_lane=1),
        store.finish([]),
        store.list_tasks("acme", StoredTaskFilter()),
        store.close(),
    ]
    for call in calls:
        with pytest.raises(StopIteration):
            call.send(None)
