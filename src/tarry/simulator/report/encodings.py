"""What the drawings share: who is shown in which colour, and what a pointer is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.simulator.report.theme import TEXT_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

Spec = dict[str, Any]

PICKED: Spec = {"name": "picked", "value": -1}
"""The number of the variant that the reader singled out, or -1."""
_FADED = 0.12

LEVEL_TITLE: Spec = {
    "titleAngle": 0,
    "titleAlign": "left",
    "titleBaseline": "bottom",
    "titleAnchor": "end",
    "titleX": 0,
    "titleY": -TEXT_SIZE,
}
"""The title of a y axis above it, where it can be read and takes no width."""


def colour(names: Sequence[str], **more: object) -> Spec:
    """The colour of a variant, the same in every chart."""
    scale = {"domain": list(names)}
    return {"field": "v", "type": "nominal", "scale": scale, "title": None, **more}


def opacity() -> Spec:
    """All are plain to see until one is singled out."""
    stands_out = {"test": "picked == -1 || picked == datum.i", "value": 1}
    return {"condition": stands_out, "value": _FADED}


def tooltip(*fields: tuple[str, str]) -> list[Spec]:
    """Fields of the data as text, each with its title."""
    return [{"field": field, "type": "nominal", "title": title} for field, title in fields]
