"""Search: by URL, by the last attempt, and in bounded steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from cryptography.fernet import Fernet

from tarry.service.encryption import Codec
from tarry.service.model import AttemptRecord, Status, TaskContent
from tarry.service.store import LeaseTerms, NewTask, Page, TaskFilter, TaskResult
from tarry.service.task_search import FoundTask, TaskFinder, TaskSearch
from tests.service.stores.harness import START_MS, task, task_numbers
from tests.service.stores.reference_store import ReferenceStore

LEASE = LeaseTerms("worker", 60_000, 1_000)
ATTEMPTS: list[dict[str, Any]] = [
    {"status": 503, "outcome": "transient"},
    {"status": 500, "outcome": "transient"},
    {"outcome": "transient", "error_class": "timeout", "error": "No response within 10 s"},
    {"status": "UNAVAILABLE", "outcome": "transient", "error": "shard 5 is down"},
    {"outcome": "lost"},
]
"""The last attempts of the tasks 1 to 5. Task 0 has none."""


async def add_tasks(store: ReferenceStore, codec: Codec) -> None:
    """Add six tasks; all but the first are dead letters."""
    for number in range(6):
        content = TaskContent(url=f"https://a.example/orders/{number}?n={number}")
        delay_ms = 60_000 if number == 0 else 0
        await store.add([NewTask(task(number, packed_content=codec.pack(content)), delay_ms)])
    leased = (await store.claim(LEASE, limit=10, per_lane=10)).tasks
    results = [
        TaskResult(
            task=leased_task,
            attempt=codec.encrypt_attempt(
                AttemptRecord(number=1, scheduled_at=START_MS, started_at=START_MS, **fields)
            ),
            status=Status.EXHAUSTED,
        )
        for leased_task, fields in zip(leased, ATTEMPTS, strict=True)
    ]
    await store.finish(results)


def run_with_finder(
    test: Callable[[TaskFinder], Awaitable[None]], codec: Codec | None = None
) -> None:
    """Run a test with six tasks."""

    async def run() -> None:
        store = ReferenceStore(lambda: START_MS)
        await add_tasks(store, codec or Codec())
        await test(TaskFinder(store, codec or Codec()))

    asyncio.run(run())


def numbers_of(page: Page[FoundTask]) -> list[int]:
    """Return the numbers of the found tasks."""
    return task_numbers([found.task for found in page.items])


@pytest.mark.parametrize(
    "keys", [(), (Fernet.generate_key().decode(),)], ids=["plain", "encrypted"]
)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [5, 4, 3, 2, 1, 0]),
        ({"url_prefix": "https://a.example/"}, [5, 4, 3, 2, 1, 0]),
        ({"url_prefix": "https://a.example/orders/3"}, [3]),
        ({"url_prefix": "https://a.example/orders/3?n=4"}, []),
        ({"url_prefix": "https://b.example/"}, []),
        ({"last_status": "503"}, [1]),
        ({"last_status": "5xx"}, [2, 1]),
        ({"last_status": "5XX"}, [2, 1]),
        ({"last_status": "4xx"}, []),
        ({"last_status": "unavailable"}, [4]),
        ({"error": "timeout"}, [3]),
        ({"error": "Timeout"}, [3]),
        ({"error": "time"}, []),
        ({"error": "SHARD"}, [4]),
        ({"error": "lost"}, [5]),
        ({"error": "transient"}, []),
        ({"error": "within", "last_status": "503"}, []),
    ],
)
def test_matching_tasks_are_found(
    keys: tuple[str, ...], fields: dict[str, Any], expected: list[int]
) -> None:
    """The URL and the error are found in plain and in encrypted tasks."""

    async def test(finder: TaskFinder) -> None:
        search = TaskSearch(filter=TaskFilter(), **fields)
        assert expected == numbers_of(
            await finder.find_page("acme", search, cursor=None, limit=100)
        )
        assert len(expected) == await finder.count("acme", search)
        ids = await finder.find_ids("acme", search, cursor=None, limit=100)
        assert len(expected) == len(ids.items)
        assert sorted(ids.items) == ids.items

    run_with_finder(test, Codec(keys))


def test_a_page_without_matches_has_a_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that rarely matches returns after a limited number of tasks."""
    monkeypatch.setattr("tarry.service.task_search._MAX_SCANNED_TASKS", 2)

    async def test(finder: TaskFinder) -> None:
        search = TaskSearch(filter=TaskFilter(), last_status="503")
        pages = [await finder.find_page("acme", search, cursor=None, limit=1)]
        while pages[-1].cursor is not None:
            cursor = pages[-1].cursor
            pages.append(await finder.find_page("acme", search, cursor=cursor, limit=1))
        assert [[], [], [1], []] == [numbers_of(page) for page in pages]
        assert 1 == await finder.count("acme", search)

    run_with_finder(test)


def test_a_task_with_an_unknown_key_is_found_by_its_status() -> None:
    """Content that cannot be decrypted matches no URL; the status of an attempt is readable."""

    async def test(finder: TaskFinder) -> None:
        other = TaskFinder(finder._store, Codec())
        by_status = TaskSearch(filter=TaskFilter(), last_status="503")
        [found] = (await other.find_page("acme", by_status, cursor=None, limit=9)).items
        assert found.content is None
        by_url = TaskSearch(filter=TaskFilter(), url_prefix="https://a.example/")
        assert [] == (await other.find_page("acme", by_url, cursor=None, limit=9)).items

    run_with_finder(test, Codec([Fernet.generate_key().decode()]))
