from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from tarry.client import options
from tarry.service.api import tasks as api
from tarry.wire.search import SEARCH_FIELDS, TIME_FIELDS
from tarry.wire.tasks import EpochMs, ReplayFilter, Search, SearchFilter


def test_each_filter_has_its_names() -> None:
    """The table of names has the fields of a search, in the same order."""
    api_names = [field.api_name for field in SEARCH_FIELDS.values()]
    assert Search.__struct_fields__ == tuple(SEARCH_FIELDS)
    assert Search.__struct_encode_fields__ == tuple(api_names)
    times = [
        field.name for field in msgspec.structs.fields(Search) if EpochMs in get_args(field.type)
    ]
    assert TIME_FIELDS == tuple(times)


@pytest.mark.parametrize(
    ("arguments", "fields", "others"),
    [
        (options.FilterOptions, SearchFilter, set()),
        (options.CancelOptions, SearchFilter, {"all", "dry_run"}),
        (options.DeadLetterFilter, api.DeadLetterQuery, set()),
        (options.PurgeOptions, api.PurgeQuery, {"all"}),
        (options.ReplayOptions, ReplayFilter, {"all", "before", "dry_run", "rate"}),
        (options.TaskFilter, api.TaskQuery, set()),
        (options.AttemptFilter, api.AttemptQuery, set()),
    ],
)
def test_the_client_has_the_filters_of_the_api(
    arguments: type, fields: type[msgspec.Struct], others: set[str]
) -> None:
    """Each method of the client takes the filters of its operation, and times as instants."""
    filters = {SEARCH_FIELDS[name] for name in fields.__struct_fields__ if name in SEARCH_FIELDS}
    assert {field.argument for field in filters} | others == set(arguments.__annotations__)
    types = {name: str(type_) for name, type_ in arguments.__annotations__.items()}
    times = {field.argument for field in filters if field.is_time} | (others & {"before"})
    assert times == {name for name, type_ in types.items() if "Instant" in type_}


def test_a_selection_has_no_other_fields() -> None:
    """A filter that is not selected is None, and is rejected in JSON."""
    assert SearchFilter(lane="https:a:443").reason is None
    with pytest.raises(msgspec.ValidationError, match="unknown field `reason`"):
        msgspec.json.decode(b'{"reason": "budget"}', type=SearchFilter)
