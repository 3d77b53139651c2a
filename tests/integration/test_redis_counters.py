"""The counters of the Redis store change by the table of `rules.transitions`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tarry.service.rules.transitions import COUNTER_CHANGES, COUNTERS
from tarry.service.stores.redis.scripts import load_script

redis: Any = import_module("redis")
msgpack = import_module("msgspec.msgpack")

COUNT = """
local function counters()
    return {pending = 5, in_flight = 5, succeeded = 5, exhausted = 5, cancelled = 5}
end
local changed = {}
for index, pair in ipairs(args) do
    local lane = counters()
    lane.id, lane.tenant = 1, 'acme'
    tenants.acme, totals = counters(), counters()
    policy_uses[1] = {id = 1, live = 5, tasks = 5}
    count_transition(lane, 1, pair[1] or nil, pair[2] or nil)
    changed[index] = {lane, tenants.acme, totals, policy_uses[1]}
end
return encode(changed)
"""
"""Follows the file `records`: counts a change of a task for each pair of statuses."""


def test_each_change_of_a_status_is_counted_by_the_table(redis_url: str) -> None:
    """The script counts a change as the table says: for the lane, the tenant and all tasks."""
    pairs = sorted(COUNTER_CHANGES, key=repr)
    arguments = [[False if status is None else status for status in pair] for pair in pairs]

    with redis.Redis.from_url(redis_url) as client:
        packed = msgpack.encode(arguments)
        reply = client.eval(
            load_script("records").source.decode() + COUNT, 1, "counters", 0, "", "", packed
        )

    for pair, (*groups, policy) in zip(pairs, msgpack.decode(reply), strict=True):
        by_status, live, tasks = COUNTER_CHANGES[pair]
        assert {"id": 1, "live": 5 + live, "tasks": 5 + tasks} == policy
        for group in groups:
            changes = tuple(group[counter] - 5 for counter in COUNTERS)
            assert by_status == changes
