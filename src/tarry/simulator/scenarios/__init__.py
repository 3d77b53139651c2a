"""The built-in studies: each module has a scenario and the study that compares its variants."""

from tarry.simulator.scenarios import (
    amplification,
    contention,
    hedging,
    metastable,
    recovery,
    retry_after,
    storm,
)
from tarry.simulator.study import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        contention.STUDY,
        storm.STUDY,
        amplification.STUDY,
        metastable.STUDY,
        hedging.STUDY,
        retry_after.STUDY,
        recovery.STUDY,
    )
}
