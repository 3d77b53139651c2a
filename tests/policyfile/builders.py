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


def policy_without_differences(**changes: Any) -> Policy:
    """Return a policy with only the differences that every policy has in a proxy or in gRPC.

    A difference is a setting that the other system lacks or treats differently.
    """
    settings: dict[str, Any] = {"ignore_retried_below": True, "throttled_delay": 0.1} | changes
    return Policy(**settings)


def new_defence(**components: Any) -> Defence:
    """Return a defence with `policy_without_differences` and these components."""
    return Defence(policy_without_differences(), **components)
