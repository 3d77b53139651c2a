"""Checks of the configuration of Redis."""

from __future__ import annotations

from tarry.service.stores.redis.durability import find_problems, parse_config

DURABLE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}


def test_a_durable_configuration_has_no_problems() -> None:
    """Nothing is reported if every acknowledged task is on the disk and none is evicted."""
    assert [] == find_problems(DURABLE)


def test_each_problem_has_a_consequence_and_a_solution() -> None:
    """Each sentence names the setting, its value, what may happen, and the durable value."""
    assert [
        (
            "appendfsync is everysec: the tasks of the last second are lost when the machine "
            "fails. Set it to always"
        ),
        (
            "maxmemory-policy is allkeys-lru: tasks are deleted when the memory is full. "
            "Set it to noeviction"
        ),
    ] == find_problems(
        {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "allkeys-lru"}
    )


def test_without_a_file_its_synchronization_is_not_reported() -> None:
    """If nothing is written to a file, only that is reported."""
    [problem] = find_problems({**DURABLE, "appendonly": "no", "appendfsync": "everysec"})
    assert problem.startswith("appendonly is no: tasks are lost")


def test_settings_that_cannot_be_read_are_reported() -> None:
    """Managed servers forbid CONFIG, so the operator has to check the settings."""
    assert 3 == len(find_problems({}))
    assert "appendonly cannot be read: check that it is yes" in find_problems({})


def test_replies_are_maps_or_lists() -> None:
    """A reply of CONFIG GET is a map or a list of names and values, as bytes or text."""
    expected = {"appendonly": "yes"}
    assert expected == parse_config({b"appendonly": b"yes"})
    assert expected == parse_config([b"appendonly", b"yes"])
    assert expected == parse_config({"appendonly": "yes"})
