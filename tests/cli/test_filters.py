from __future__ import annotations

import pytest

from tarry.cli.filters import Filters
from tarry.errors import ConfigurationError
from tarry.testing import VirtualClock


def test_options_become_arguments_of_the_client() -> None:
    """Options that are not given are left out; a status may be written in lower case."""
    filters = Filters(
        {"policy_id": "slow", "status": "in-flight", "lane": None, "error": "timeout"}
    )
    assert {"policy": "slow", "status": "IN_FLIGHT", "error": "timeout"} == filters.arguments
    assert (None, "slow") == (filters.lane, filters.policy)


def test_a_duration_is_subtracted_once() -> None:
    """All requests of a command have the same limit of time."""
    with VirtualClock() as clock:
        filters = Filters({"created_after": "10s"})
        first = filters.arguments["created_after"]
        clock.advance(60)
        assert first == filters.arguments["created_after"]


def test_an_invalid_value_names_the_option() -> None:
    """An unknown status, or a text that is not a time, is an error."""
    with pytest.raises(ConfigurationError, match=r"^--status must be one of"):
        _ = Filters({"status": "dead"}).arguments
    with pytest.raises(ConfigurationError, match=r"^--until must be a time"):
        _ = Filters({"finished_before": "soon"}).arguments
