"""First paint of the pages of the dashboard with many lanes and tasks, in Chromium.

The store is filled before the service starts. Most tasks are due tomorrow; every tenth task is a
dead letter. All tasks belong to the default tenant, and are divided among the lanes.

Each page is loaded several times, each time with an empty cache. The first paint is the paint entry
`first-contentful-paint` of the browser's performance API. The data are shown when the page removes
`aria-busy` and the next frame has been painted. Both times start with the navigation.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.service import tarry_server
from benchmarks.service.backlog import DAY_MS, Progress, build_task, fill_store, temporary_folder
from benchmarks.service.limits import LimitCheck
from benchmarks.service.processes import BenchmarkError, ProcessGroup, free_port
from tarry.service.app import make_store
from tarry.service.model import AttemptRecord, Status, Task
from tarry.service.store import LeaseTerms, TaskResult

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

TASKS, LANES = 1_000_000, 10_000
TASKS_PER_DEAD_LETTER = 10
ROUNDS = 5
PAGES = ("overview", "downstreams", "tasks", "dead-letters", "policies")
MAX_FIRST_PAINT_MS = 1_000.0
_PAGE_TIMEOUT_MS = 60_000
_CLAIM_SIZE = 2_000
_TERMS = LeaseTerms("benchmark", 60_000, 1_000)

# The timer runs after the frame of the callback of requestAnimationFrame has been painted.
_RECORD_WHEN_SHOWN = """
window.whenShown = new Promise((resolve) => {
  const observer = new MutationObserver(() => {
    if (document.querySelector("main:not([aria-busy]) h1") === null) return;
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => resolve(performance.now())));
  });
  observer.observe(document, { subtree: true, attributeFilter: ["aria-busy"] });
});
"""
_FIRST_PAINT_MS = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


@dataclass(frozen=True, slots=True)
class PageResult:
    """The figures of a page with `tasks` tasks; times are in ms since the navigation."""

    tasks: int
    page: str
    first_paints_ms: list[float]
    """One figure for each load of the page."""
    shown_ms: list[float]
    """Times when the data of the page were shown."""


def run(tasks: int, lanes: int, rounds: int, progress: Progress) -> list[PageResult]:
    """Fill a store, run the service on it, and load each page `rounds` times."""
    from benchmarks.chromium import chromium, chromium_path

    try:
        chromium_path()  # filling the store takes minutes
    except FileNotFoundError as error:
        raise BenchmarkError(str(error)) from None
    with temporary_folder() as folder:
        asyncio.run(_fill(folder, tasks, lanes, progress))
        port = free_port()
        environ = tarry_server.environ(folder, port)
        with ProcessGroup(environ, folder) as group, chromium() as browser:
            tarry_server.start(group, port)
            results = [PageResult(tasks, page, [], []) for page in PAGES]
            for number in range(rounds):
                progress(f"dashboard: load {number + 1} of {rounds} of each page")
                for result in results:
                    first_paint_ms, shown_ms = _load(browser, port, result.page)
                    result.first_paints_ms.append(first_paint_ms)
                    result.shown_ms.append(shown_ms)
            group.check()
            return results


async def _fill(folder: Path, count: int, lanes: int, progress: Progress) -> None:
    """Fill the store with tasks that are due tomorrow and dead letters."""
    url = tarry_server.store_url(folder)
    await fill_store(url, _build_tasks(count, lanes), count, progress)
    store = make_store(url)
    await store.open()
    finished = 0
    while claimed := (await store.claim(_TERMS, limit=_CLAIM_SIZE, per_lane=_CLAIM_SIZE)).tasks:
        if finished % 20_000 == 0:
            progress(f"dashboard: {finished:,} dead letters written")
        await store.finish([_build_dead_letter(task) for task in claimed])
        finished += len(claimed)
    await store.close()
    expected = len(range(0, count, TASKS_PER_DEAD_LETTER))
    if finished != expected:
        raise BenchmarkError(f"{finished} tasks became dead letters instead of {expected}")


def _build_tasks(count: int, lanes: int) -> Iterator[Task]:
    now = int(time.time() * 1000)
    for number in range(count):
        is_dead = number % TASKS_PER_DEAD_LETTER == 0
        # Consecutive groups of tasks, so that each lane has dead letters.
        lane = number // TASKS_PER_DEAD_LETTER % lanes
        due_ms = now if is_dead else now + DAY_MS
        yield build_task(f"https://host-{lane}.example/orders/{number}", due_ms)


def _build_dead_letter(task: Task) -> TaskResult:
    attempt = AttemptRecord(
        number=task.attempts + 1,
        scheduled_at=task.next_attempt_at,
        started_at=task.next_attempt_at,
        status=503,
        outcome="transient",
        worker=task.worker,
    )
    return TaskResult(
        task=task,
        attempt=attempt,
        status=Status.EXHAUSTED,
        reason="attempts",
        last_outcome_kind="transient",
    )


def _load(browser: Browser, port: int, name: str) -> tuple[float, float]:
    """Load a page in a new browser context; return the times of first paint and data."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    try:
        page = context.new_page()
        page.set_default_timeout(_PAGE_TIMEOUT_MS)
        page.add_init_script(_RECORD_WHEN_SHOWN)
        page.goto(f"{tarry_server.address(port)}/#/{name}")
        page.wait_for_selector("main:not([aria-busy]) h1")
        shown_ms = page.evaluate("window.whenShown")
        _check_page(page, name)
        return page.evaluate(_FIRST_PAINT_MS), shown_ms
    finally:
        context.close()


def _check_page(page: Page, name: str) -> None:
    """Raise `BenchmarkError` if the page shows an error or no data."""
    error = page.locator("#failure").inner_text()
    if error:
        raise BenchmarkError(f"the page {name} shows an error: {error}")
    if not page.locator("main table tbody tr, main .tile").count():
        raise BenchmarkError(f"the page {name} shows no data")


def table_lines(results: list[PageResult], lanes: int) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"\ndashboard, {lanes:,} lanes, {len(results[0].shown_ms)} loads of each page (ms)"
    titles = ("tasks", "first paint", "maximum", "data shown", "maximum")
    yield f"{'page':14}" + "".join(f"{title:>12}" for title in titles)
    for result in results:
        figures = (
            *(median(result.first_paints_ms), max(result.first_paints_ms)),
            *(median(result.shown_ms), max(result.shown_ms)),
        )
        cells = "".join(f"{figure:12,.0f}" for figure in figures)
        yield f"{result.page:14}{result.tasks:12,}{cells}"


def check_limits(results: list[PageResult]) -> list[LimitCheck]:
    """Return the check of the slowest first paint of each page."""
    return [
        LimitCheck(
            f"first paint ms, {result.page}, {result.tasks:,} tasks",
            max(result.first_paints_ms),
            maximum=MAX_FIRST_PAINT_MS,
        )
        for result in results
    ]
