"""What scenarios have in common whose variants are defences."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tarry.core.checks import one_of
from tarry.simulator.simulate import trials_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tarry.simulator.scenario import Scenario
    from tarry.simulator.study import Study
    from tarry.simulator.summary import Summary
    from tarry.wire.defence import Defence


def run(
    world: Callable[..., Scenario],
    defences: Mapping[str, Defence],
    *,
    defence: str,
    trials: int = 1,
    seed: int = 0,
    **parameters: Any,
) -> list[Summary]:
    """Run a scenario behind one of these defences."""
    one_of("defence", defence, defences)
    return trials_of(world(defences[defence], **parameters), trials, seed)


def with_defences(
    study: Study, world: Callable[..., Scenario], defences: Mapping[str, Defence]
) -> Study:
    """Return the study with the user's defences as its variants; its lesson is about its own."""
    mine = partial(run, world, defences)
    return replace(study, run=mine, variants=tuple(defences), lesson="")
