"""Refuse what a file says in vain: it was meant to do something, and would do nothing.

Only what is written is looked at. A value that is set or swept may well switch a part off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from tarry.core.suggest import suggest

if TYPE_CHECKING:
    from tarry.simulator.files.documents import Document, Place
    from tarry.simulator.scenario import Scenario

FITS = {
    "rate": ("poisson",),
    "count": ("at-once", "closed", "backlog"),
    "think": ("closed",),
}
"""Under which arrivals a key of the clients counts."""


def check_windows(document: Document, scenario: Scenario) -> None:
    """Refuse a failure or a surge that begins when the run is over."""
    windows: dict[Place, float] = {
        ("clients", "surges", index): surge.start
        for index, surge in enumerate(scenario.clients.surges)
    }
    for name, server in scenario.servers.items():
        for index, failure in enumerate(server.failures):
            windows["servers", name, "failures", index] = failure.start
    for place, start in windows.items():
        if start >= scenario.duration:
            msg = f"start must be before the end of the run (duration {scenario.duration:g})"
            raise document.refusal((*place, "start"), f"{msg}, got {start:g}")


def check_arrivals(
    document: Document, variants: Mapping[str, Any], scenarios: Mapping[str, Scenario]
) -> None:
    """Refuse a key of the clients that counts in no variant it was written for."""
    arrivals = {name: scenario.clients.arrivals for name, scenario in scenarios.items()}
    _fitting(document, (), document.data, list(arrivals.values()))
    for name, changes in variants.items():
        _fitting(document, ("variants", name), changes, [arrivals[name]])


def check_calls(worlds: Mapping[str, Document], scenarios: Mapping[str, Scenario]) -> None:
    """Refuse a server that is called in no variant: its name is perhaps a slip."""
    called = {name for scenario in scenarios.values() for name in scenario.path()}
    for variant, scenario in scenarios.items():
        for name in scenario.servers:
            if name not in called:
                close = suggest(name, called)
                meant = f"; did you mean {close!r}?" if close else ""
                msg = (
                    f"server {name!r} is never called: clients.calls or another server's calls "
                    f"must name it{meant}"
                )
                raise worlds[variant].refusal(("servers", name), msg)


def _fitting(
    document: Document, place: Place, table: Mapping[str, Any], arrivals: list[str]
) -> None:
    clients: object = table.get("clients")
    if not isinstance(clients, Mapping):
        return
    for key in cast("Mapping[str, Any]", clients):
        fits = FITS.get(key)
        if fits is not None and not set(fits) & set(arrivals):
            said = " or ".join(
                ", ".join(map(repr, part)) for part in (fits[:-1], fits[-1:]) if part
            )
            msg = f"{key} is for arrivals = {said}, but arrivals is {arrivals[0]!r}"
            raise document.refusal((*place, "clients", key), msg)
