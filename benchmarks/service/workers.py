"""The job with one, two and four processes of the service on one store.

In the rows `all`, N processes accept and deliver tasks (`tarry serve --workers N`). In the rows
`worker`, one process accepts tasks (`--role api`), and N other processes deliver them, so that each
task is claimed. The connections of the enqueuing process and the tasks of the warm-up grow with N.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.service.candidates import Candidate, tarry_enqueuer
from benchmarks.service.job import ORDER_SEED, Job, Row
from benchmarks.service.limits import LimitCheck
from benchmarks.service.processes import free_port
from benchmarks.service.tarry_server import SERVE_COMMAND

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.service.backlog import Progress

PROCESS_COUNTS = (1, 2, 4)
ROLES = ("all", "worker")
TASKS, ROUNDS = 30_000, 3
WARM_UP_TASKS = 2_000
"""Tasks of the warm-up for each process. Its limiter of the target must find out that a fifth of
the attempts fail at any rate; until then, it tries lower rates."""
MAX_CPU_RATIO = 1.15


class Setup(NamedTuple):
    """Engine of the store, role and number of the processes that deliver."""

    engine: str
    role: str
    processes: int


def run(
    engines: Sequence[str], counts: Sequence[int], tasks: int, rounds: int, progress: Progress
) -> dict[Setup, Row]:
    """Run the job with all setups in turn, in a new random order each round."""
    setups = [Setup(*each) for each in product(engines, ROLES, counts)]
    rows = {setup: Row() for setup in setups}
    rng = random.Random(ORDER_SEED)
    with ExitStack() as stack:
        job = Job(stack, set(engines), {})
        for number in range(1, rounds + 1):
            for setup in rng.sample(setups, len(setups)):
                progress(f"workers: round {number} of {rounds}, {' '.join(map(str, setup))}")
                rows[setup].runs.append(job.run(_build_candidate(setup), tasks))
    return rows


def _build_candidate(setup: Setup) -> Candidate:
    processes = "--workers", str(setup.processes)
    if setup.role == "all":
        commands, total = ((*SERVE_COMMAND, *processes),), setup.processes
    else:
        worker = *SERVE_COMMAND, "--role", "worker", "--port", str(free_port()), *processes
        commands, total = ((*SERVE_COMMAND, "--role", "api"), worker), setup.processes + 1
    server = "" if setup.engine == "sqlite" else setup.engine
    return Candidate(
        enqueuer=tarry_enqueuer(processes=setup.processes),
        workers=commands,
        server=server,
        processes=total,
        warm_up_tasks=WARM_UP_TASKS * setup.processes,
    )


def table_lines(rows: dict[Setup, Row]) -> Iterator[str]:
    """Yield the lines of the table."""
    titles = ("processes", "tasks/s", "CPU ms", "x CPU", "of server", "cores", "gap p99")
    yield f"\n{'workers':18}" + "".join(f"{title:>11}" for title in titles)
    for setup, row in rows.items():
        rate, cpu = row.median("rate"), row.median("cpu")
        cells = (
            str(setup.processes), f"{rate:,.0f}", f"{cpu:.3f}", f"{_cpu_ratio(rows, setup):.2f}",
            f"{row.median('server_cpu'):.3f}", f"{rate * cpu / 1000:.2f}",
            f"{row.median('gap_p99'):,.0f}",
        )  # fmt: skip
        yield f"{setup.engine:10}{setup.role:8}" + "".join(f"{cell:>11}" for cell in cells)


def _cpu_ratio(rows: dict[Setup, Row], setup: Setup) -> float:
    """Return the processor time per task, relative to the fewest processes."""
    fewest = min((each for each in rows if each[:2] == setup[:2]), key=lambda each: each.processes)
    return rows[setup].ratio(rows[fewest], "cpu")


def check_limits(rows: dict[Setup, Row]) -> list[LimitCheck]:
    """Compare the processor time of each setup with that of the fewest processes."""
    return [
        LimitCheck(f"{' '.join(map(str, setup))}: x CPU", ratio, maximum=MAX_CPU_RATIO)
        for setup in rows
        if (ratio := _cpu_ratio(rows, setup)) != 1
    ]
