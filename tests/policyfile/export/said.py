"""What the tests of the exports share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence

if TYPE_CHECKING:
    from tarry.policyfile.losses import Exported, Imported


def fields(made: Exported | Imported) -> list[str]:
    """Return the fields that are lost, in order."""
    return [loss.field for loss in made.losses]


def words(made: Exported | Imported, field: str) -> str:
    """Return the line about a field."""
    return next(str(loss) for loss in made.losses if loss.field == field)


def plain_policy(**changes: Any) -> Policy:
    """Return a policy of which a proxy can say everything but what no proxy can."""
    settings: dict[str, Any] = {"retry_marked": True, "throttled_delay": 0.1} | changes
    return Policy(**settings)


def defence(**parts: Any) -> Defence:
    """Return a defence around such a policy."""
    return Defence(plain_policy(), **parts)
