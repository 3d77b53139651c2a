"""The simulation of `tests.chaos.simulation` on the stores of real servers, for a few seeds."""

from __future__ import annotations

import pytest

from tests.chaos.simulated_stores import SimulatedStores, postgres_stores, redis_stores
from tests.chaos.simulation import simulate

SEEDS = [16]
"""Two processes crash and are suspended, with all faults of the store. `make chaos` runs more."""


def simulate_or_explain(seed: int, stores: SimulatedStores, store_name: str) -> None:
    """Run one seed; an error has the command that repeats the run."""
    try:
        simulate(seed, stores)
    except Exception as error:
        command = f"python -m tests.chaos.simulation --store {store_name} {seed}"
        error.add_note(f"seed {seed} failed; repeat it with: {command}")
        raise


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_invariants_hold_on_postgres(seed: int, postgres_dsn: str) -> None:
    """All invariants hold with random faults between the processes and PostgreSQL."""
    with postgres_stores(postgres_dsn) as stores:
        simulate_or_explain(seed, stores, "postgres")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_invariants_hold_on_redis(seed: int, redis_url: str) -> None:
    """All invariants hold with random faults between the processes and Redis."""
    with redis_stores(redis_url) as stores:
        simulate_or_explain(seed, stores, "redis")
