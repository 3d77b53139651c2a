"""What `tarry simulate` prints and writes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tarry.cli.tables import row_name, show_findings, show_studies, show_study
from tarry.cli.words import plain
from tarry.simulator.report import to_json
from tarry.simulator.scenarios import STUDIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from tarry.simulator.assertions import Verdict
    from tarry.simulator.study import Findings, Study


class Bar:
    """A progress bar on the error stream, when a person looks at it and there is time to."""

    def __init__(self, *, hidden: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=hidden or not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._progress.add_task("simulating", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, done: int, total: int) -> None:
        """Show how many runs are done, of how many."""
        self._progress.update(self._task, completed=done, total=total)


def list_studies(*, as_json: bool) -> None:
    """Print the built-in scenarios."""
    if as_json:
        print_json([_described(study) for study in STUDIES.values()])
        return
    console = Console()
    show_studies(console, STUDIES)
    console.print()
    console.print("tarry simulate NAME runs one, tarry simulate NAME --show says what it takes.")


def describe(study: Study, *, as_json: bool) -> None:
    """Print the variants and parameters of a study."""
    if as_json:
        print_json(_described(study))
    else:
        show_study(Console(), study)


def print_findings(findings: Findings, verdicts: Sequence[Verdict], *, as_json: bool) -> None:
    """Print the numbers; JSON has the claims too."""
    if not as_json:
        show_findings(Console(), findings)
        return
    claims = [
        {
            "claim": verdict.claim.text,
            "variant": verdict.row.variant,
            "parameters": verdict.row.parameters,
            "holds": verdict.holds,
        }
        for verdict in verdicts
    ]
    print_json({**to_json(findings), "claims": claims})


def tell_written(paths: Iterable[Path]) -> None:
    """Say which files were written, where no program reads it."""
    for path in paths:
        sys.stderr.write(f"written to {plain(str(path))}\n")


def print_json(value: object) -> None:
    """Print JSON that is the same bytes for the same values."""
    text = json.dumps(value, sort_keys=True, indent=2, allow_nan=False, default=str)
    sys.stdout.write(f"{text}\n")


def judge(verdicts: Sequence[Verdict], *, quiet: bool) -> bool:
    """Say which rows fail which claim; return whether all is well."""
    failed = [verdict for verdict in verdicts if not verdict.holds]
    for verdict in failed:
        about = f"{verdict.claim.text}, but {verdict.seen()}"
        sys.stderr.write(f"failed: {row_name(verdict.row)}: {plain(about)}\n")
    if verdicts and not failed and not quiet:
        sys.stdout.write("every claim holds\n")
    return not failed


def _described(study: Study) -> dict[str, Any]:
    return {
        "name": study.name,
        "question": study.question,
        "variants": study.variants,
        "parameters": dict(study.parameters),
        "sweep": dict(study.sweep),
        "columns": [column._asdict() for column in study.columns],
        "trials": study.trials,
    }
