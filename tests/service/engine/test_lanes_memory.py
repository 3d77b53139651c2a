from __future__ import annotations

import tracemalloc
from functools import partial

from tarry.service.engine.lanes import Lanes, build_downstream

MAX_LANE_BYTES = 4_500


def test_a_lane_takes_little_memory() -> None:
    """10,000 lanes, as many as a process keeps, take less than 45 MB."""
    lanes = Lanes(partial(build_downstream, max_in_flight=8), max_leased=1024)
    assert lanes["a/https:first.example:443"].is_empty  # imports and caches are not measured
    names = [f"a/https:{number}.example:443" for number in range(200)]
    tracemalloc.start()
    try:
        for name in names:
            assert lanes[name].is_empty
        total, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total / len(names) <= MAX_LANE_BYTES
