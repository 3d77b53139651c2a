"""Delivery of a backlog after an outage, to targets with a limited capacity.

The store is filled with overdue tasks, and the service starts while the target refuses connections.
Then the target returns. It accepts a number of requests per second (its capacity) and refuses
further requests with a 503, or with a 429. In some scenarios it answers 429 with `Retry-After: 1`
while it is down, three processes of the service share the store, or a fifth of the accepted
requests fails. The figures come from the log of the target:

* drain: time from the return until all tasks have succeeded, divided by the ideal time (the backlog
  at full capacity, with as many more requests as fail);
* 99 %: the same for 99 of 100 tasks; the last ones also wait for their backoff;
* peak: requests in the busiest second, divided by the capacity;
* waste: refused requests, divided by all requests;
* settling, if the capacity is reduced during the drain: seconds from the reduction until the first
  second in which there are at most 1.2 x as many requests as the reduced capacity.

The service can detect a reduction only by refused requests. The target also counts the accepted
requests of the second before the reduction. So it refuses all requests for most of a second,
whatever their rate, and the reduced capacity can only be measured after that. Therefore the peak is
relative to the old capacity for seconds that begin up to `MAX_SETTLING_S` after the reduction. The
column "at once" has the peak relative to the reduced capacity from the reduction on; this figure
has no limit.

With several lanes, the figures are those of the worst lane.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.service import backlog, tarry_server
from benchmarks.service.capacity_target import Options
from benchmarks.service.limits import LimitCheck
from benchmarks.service.processes import ProcessGroup, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.service.model import Task

MAX_DRAIN_RATIO, MAX_PEAK_RATIO, MAX_WASTE, MAX_SETTLING_S = 1.3, 1.2, 0.10, 2.0
MAX_FAILING_DRAIN_RATIO = 1.5  # if a part of the requests fails
MAX_PROCESSES_PEAK_RATIO = 1.3  # with several processes
DOWN_S = 20.0
_WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A target, and the number of tasks that wait for each of its lanes."""

    name: str
    capacity: int
    backlog: int
    lanes: int = 1
    refusal_status: int = 503
    reduced_capacity: int | None = None
    """The capacity from `reduced_after_s` after the return on; None: it is not reduced."""
    reduced_after_s: float = 10.0
    throttles_while_down: bool = False
    failing_share: float = 0.0
    """The share of accepted requests that fail."""
    processes: int = 1

    @property
    def max_drain_ratio(self) -> float:
        return MAX_FAILING_DRAIN_RATIO if self.failing_share else MAX_DRAIN_RATIO

    @property
    def max_peak_ratio(self) -> float:
        return MAX_PEAK_RATIO if self.processes == 1 else MAX_PROCESSES_PEAK_RATIO

    @property
    def ideal_s(self) -> float:
        """The time in which the target can accept the backlog of a lane."""
        before_reduction = self.capacity * self.reduced_after_s
        if self.reduced_capacity is None or self.backlog <= before_reduction:
            return self.backlog / self.capacity / (1 - self.failing_share)
        left = self.backlog - before_reduction
        return self.reduced_after_s + left / self.reduced_capacity


SCENARIOS = (
    Scenario("20/s", capacity=20, backlog=1_000),
    Scenario("200/s", capacity=200, backlog=5_000),
    Scenario("2,000/s", capacity=2_000, backlog=100_000),
    Scenario("200/s with 429", capacity=200, backlog=5_000, refusal_status=429),
    Scenario("200/s, then 50/s", capacity=200, backlog=5_000, reduced_capacity=50),
    Scenario("4 lanes of 200/s", capacity=200, backlog=5_000, lanes=4),
    Scenario(
        "down with 429", capacity=100, backlog=2_000, refusal_status=429, throttles_while_down=True
    ),
    Scenario(
        "down with 429, 3 p.",
        capacity=100,
        backlog=2_000,
        refusal_status=429,
        throttles_while_down=True,
        processes=3,
    ),
    Scenario("100/s, 3 p.", capacity=100, backlog=2_000, processes=3),
    Scenario("100/s, 1/5 fails", capacity=100, backlog=2_000, failing_share=0.2),
    Scenario("100/s, 1/5 f., 3 p.", capacity=100, backlog=2_000, failing_share=0.2, processes=3),
)
# The ideal time is 15 s, because the detection of the return and the slow start take about 3 s.
QUICK_SCENARIOS = (Scenario("200/s", capacity=200, backlog=3_000),)


@dataclass(frozen=True, slots=True)
class RecoveryResult:
    """Results of a scenario; ratios, waste and settling time are those of the worst lane."""

    scenario: Scenario
    accepted: int
    """Requests that were accepted, of all lanes."""
    drain_ratio: float | None
    """None if the backlog was not delivered in time."""
    drain_99_ratio: float | None
    """The drain of 99 of 100 tasks."""
    peak_ratio: float
    waste: float
    settling_s: float | None
    """None if the capacity was not reduced."""
    immediate_peak_ratio: float | None
    """Requests in the busiest second after the reduction, divided by the reduced capacity; None if
    the capacity was not reduced."""


def run(scenario: Scenario, down_s: float, progress: backlog.Progress) -> RecoveryResult:
    """Run the service until the backlog is delivered, or four times the ideal time is over."""
    with backlog.temporary_folder() as folder:
        ports = [free_port() for _ in range(scenario.lanes)]
        tasks = _overdue_tasks(ports, scenario.backlog)
        total = scenario.backlog * scenario.lanes
        asyncio.run(backlog.fill_store(tarry_server.store_url(folder), tasks, total, progress))
        progress(f"recovery, {scenario.name}: {total:,} tasks, ideal {scenario.ideal_s:g} s")
        options = Options(
            ports=ports,
            capacity=scenario.capacity,
            down_s=down_s,
            expected=scenario.backlog,
            log=str(folder / "requests.json"),
            refusal_status=scenario.refusal_status,
            reduced_capacity=scenario.reduced_capacity,
            reduced_after_s=scenario.reduced_after_s,
            throttles_while_down=scenario.throttles_while_down,
            failing_share=scenario.failing_share,
        )
        return _evaluate(scenario, _serve(folder, options, scenario))


def _overdue_tasks(ports: list[int], backlog_per_lane: int) -> Iterator[Task]:
    now = int(time.time() * 1000)
    for _ in range(backlog_per_lane):
        for port in ports:
            yield backlog.build_task(f"http://127.0.0.1:{port}/", now)


def _serve(folder: Path, options: Options, scenario: Scenario) -> list[list[tuple[float, int]]]:
    """Run service and target; return the requests of each lane: time after the return, status."""
    port = free_port()
    with ProcessGroup(tarry_server.environ(folder, port), folder) as group:
        module = "benchmarks.service.capacity_target"
        target = group.start((sys.executable, "-m", module, options.to_json()))
        tarry_server.start(group, port, scenario.processes)
        try:
            target.wait(options.down_s + 4 * scenario.ideal_s + 10)
        except subprocess.TimeoutExpired:
            target.terminate()
            target.wait()
        group.check()
        return json.loads(Path(options.log).read_text())


def _evaluate(scenario: Scenario, lanes: list[list[tuple[float, int]]]) -> RecoveryResult:
    accepted = [[at for at, status in requests if status == 200] for requests in lanes]
    is_drained = all(len(times) >= scenario.backlog for times in accepted)
    count_99 = scenario.backlog * 99 // 100
    is_99_drained = all(len(times) >= count_99 for times in accepted)
    seconds = [list(_busy_seconds([at for at, _ in requests])) for requests in lanes]
    reduced = scenario.reduced_capacity
    drop_s, settled_s = scenario.reduced_after_s, scenario.reduced_after_s + MAX_SETTLING_S
    return RecoveryResult(
        scenario,
        sum(map(len, accepted)),
        max(times[-1] for times in accepted) / scenario.ideal_s if is_drained else None,
        max(times[count_99 - 1] for times in accepted) / scenario.ideal_s
        if is_99_drained
        else None,
        max(
            count / (reduced if reduced is not None and begin >= settled_s else scenario.capacity)
            for lane in seconds
            for begin, count in lane
        ),
        max(
            sum(status == scenario.refusal_status for _, status in requests) / max(1, len(requests))
            for requests in lanes
        ),
        None if reduced is None else max(_settling_s(scenario, lane) for lane in seconds),
        None
        if reduced is None
        else max(count for lane in seconds for begin, count in lane if begin >= drop_s) / reduced,
    )


def _busy_seconds(times: list[float]) -> Iterator[tuple[float, int]]:
    """Yield the start of each second that ends with a request, and the number of its requests."""
    first = 0
    for last, at in enumerate(times):
        while times[first] <= at - _WINDOW_S:
            first += 1
        yield at - _WINDOW_S, last - first + 1


def _settling_s(scenario: Scenario, seconds: list[tuple[float, int]]) -> float:
    """Return the seconds from the reduction until the number of requests is within the limit."""
    assert scenario.reduced_capacity is not None
    begins = (
        begin
        for begin, count in seconds
        if begin >= scenario.reduced_after_s and count <= MAX_PEAK_RATIO * scenario.reduced_capacity
    )
    return next(begins, inf) - scenario.reduced_after_s


def table_lines(results: list[RecoveryResult]) -> Iterator[str]:
    """Yield the lines of the table."""
    titles = ("ideal s", "x ideal", "99 %", "x peak", "waste", "settling s", "at once", "accepted")
    yield f"\n{'recovery':20}" + "".join(f"{title:>12}" for title in titles)
    for result in results:
        scenario, drain, drain_99 = result.scenario, result.drain_ratio, result.drain_99_ratio
        cells = (
            f"{scenario.ideal_s:g}",
            "not drained" if drain is None else f"{drain:.2f}",
            "not drained" if drain_99 is None else f"{drain_99:.2f}",
            f"{result.peak_ratio:.2f}",
            f"{result.waste:.1%}",
            "" if result.settling_s is None else f"{result.settling_s:.2f}",
            "" if result.immediate_peak_ratio is None else f"{result.immediate_peak_ratio:.2f}",
            f"{result.accepted:,}",
        )
        yield f"{scenario.name:20}" + "".join(f"{cell:>12}" for cell in cells)


def check_limits(results: list[RecoveryResult]) -> list[LimitCheck]:
    """Return the checks of drain, peak, waste and settling of each scenario."""
    checks = []
    for result in results:
        name = result.scenario.name
        checks += [
            LimitCheck(
                f"x ideal, {name}", result.drain_ratio, maximum=result.scenario.max_drain_ratio
            ),
            LimitCheck(
                f"x peak, {name}", result.peak_ratio, maximum=result.scenario.max_peak_ratio
            ),
            LimitCheck(f"waste, {name}", result.waste, maximum=MAX_WASTE),
        ]
        if result.settling_s is not None:
            label = f"settling s, {name}"
            checks.append(LimitCheck(label, result.settling_s, maximum=MAX_SETTLING_S))
    return checks
