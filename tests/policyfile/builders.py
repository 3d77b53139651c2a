"""Builders and accessors for the tests of the exporters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence

if TYPE_CHECKING:
    from tarry.policyfile.translation import Exported, Imported


def fields(made: Exported | Imported) -> list[str]:
    """Return the fields that are lost, in order."""
    return [difference.field for difference in made.differences]


def difference_text(made: Exported | Imported, field: str) -> str:
    """Return the text of the difference of a field."""
    return next(str(difference) for difference in made.differences if difference.field == field)


def plain_policy(**changes: Any) -> Policy:
    """Return a policy that a proxy can express except for the differences of all proxies."""
    settings: dict[str, Any] = {"ignore_retried_below": True, "throttled_delay": 0.1} | changes
    return Policy(**settings)


def defence(**parts: Any) -> Defence:
    """Return a defence with such a policy."""
    return Defence(plain_policy(), **parts)
