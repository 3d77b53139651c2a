"""Builders and accessors for the tests of exporters and importers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence

if TYPE_CHECKING:
    from tarry.policyfile.translation import Exported, Imported


def differing_fields(result: Exported | Imported) -> list[str]:
    """Return the field of each difference, in order."""
    return [difference.field for difference in result.differences]


def difference_text(result: Exported | Imported, field: str) -> str:
    """Return the text of the first difference of a field."""
    return next(str(difference) for difference in result.differences if difference.field == field)


def plain_policy(**changes: Any) -> Policy:
    """Return a policy with no differences except those that every policy has in a proxy."""
    settings: dict[str, Any] = {"ignore_retried_below": True, "throttled_delay": 0.1} | changes
    return Policy(**settings)


def defence(**components: Any) -> Defence:
    """Return a defence with a plain policy and these components."""
    return Defence(plain_policy(), **components)
