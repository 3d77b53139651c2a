"""Tests for the table of policy fields."""

from __future__ import annotations

import pytest

from tarry.core.policy import POLICY_FIELDS, Policy, PolicyField
from tarry.errors import ConfigurationError


def test_the_table_has_the_arguments_of_a_policy_and_their_defaults() -> None:
    """The names, order and defaults in POLICY_FIELDS are those of the constructor."""
    defaults = Policy.__init__.__kwdefaults__ or {}
    assert list(defaults.items()) == [(field.name, field.default) for field in POLICY_FIELDS]


@pytest.mark.parametrize("field", POLICY_FIELDS, ids=lambda field: field.name)
def test_every_default_is_valid(field: PolicyField) -> None:
    """A default passes the check of its own field."""
    assert field.default == field.check(field.default)


@pytest.mark.parametrize("field", POLICY_FIELDS, ids=lambda field: field.name)
def test_every_field_has_a_help_sentence(field: PolicyField) -> None:
    assert field.help.count(".") == 1
    assert field.help.endswith(".")


@pytest.mark.parametrize("field", POLICY_FIELDS, ids=lambda field: field.name)
def test_an_error_has_the_name_that_the_caller_uses(field: PolicyField) -> None:
    """A check that is called with another name reports that name."""
    with pytest.raises(ConfigurationError) as caught:
        field.check(object(), "someField")
    assert "someField" == caught.value.field


def test_only_the_service_rejects_an_initial_delay_of_zero() -> None:
    """A policy may have no initial delay, but the JSON of the service may not."""
    fields = {field.name: field for field in POLICY_FIELDS}
    assert 0 == fields["initial_delay"].check(0)
    assert not fields["initial_delay"].is_json_minimum_allowed
    assert fields["max_hint"].is_json_minimum_allowed
