"""Search: by URL, by the last attempt, and in bounded steps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cryptography.fernet import Fernet

from tarry.service import task_search
from tarry.service.encryption import Codec
from tarry.service.model import AttemptRecord, Status, TaskContent
from tarry.service.store import LeaseTerms, NewTask, RecordPage, TaskResult
from tarry.service.task_search import FoundTask, TaskFinder
from tarry.wire.tasks import Search
from tests.service.stores.harness import START_MS, task, task_numbers
from tests.service.stores.reference_store import ReferenceStore

LEASE = LeaseTerms("worker", 60_000, 1_000)
ATTEMPTS: list[dict[str, Any]] = [
    {"response_status": 503, "outcome": "transient"},
    {"response_status": 500, "outcome": "transient"},
    {"outcome": "transient", "error_class": "timeout", "error_message": "No response within 10 s"},
    {"response_status": "UNAVAILABLE", "outcome": "transient", "error_message": "shard 5 is down"},
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
                AttemptRecord(
                    attempt_number=1, scheduled_at=START_MS, started_at=START_MS, **fields
                )
            ),
            status=Status.EXHAUSTED,
        )
        for leased_task, fields in zip(leased, ATTEMPTS, strict=True)
    ]
    await store.finish(results)


async def make_finder(codec: Codec | None = None) -> TaskFinder:
    """Return a finder of six tasks."""
    store = ReferenceStore(lambda: START_MS)
    await add_tasks(store, codec or Codec())
    return TaskFinder(store, codec or Codec())


def numbers_of(page: RecordPage[FoundTask]) -> list[int]:
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
async def test_matching_tasks_are_found(
    keys: tuple[str, ...], fields: dict[str, Any], expected: list[int]
) -> None:
    """The URL and the error are found in plain and in encrypted tasks."""
    finder = await make_finder(Codec(keys))
    search = Search(**fields)
    assert expected == numbers_of(await finder.find_page("acme", search, cursor=None, limit=100))
    assert len(expected) == await finder.count("acme", search)
    ids = await finder.find_ids("acme", search, cursor=None, limit=100)
    assert len(expected) == len(ids.items)
    assert sorted(ids.items) == ids.items


class CountingStore(ReferenceStore):
    """Counts reads, and how many counts run at the same time."""

    read_count = running_counts = max_running_counts = 0

    async def list_tasks(self, *args: Any, **options: Any) -> Any:
        """List tasks."""
        self.read_count += 1
        return await super().list_tasks(*args, **options)

    async def last_attempts(self, *args: Any, **options: Any) -> Any:
        """Return the last attempts."""
        self.read_count += 1
        return await super().last_attempts(*args, **options)

    async def count_tasks(self, *args: Any, **options: Any) -> int:
        """Count tasks slowly."""
        self.running_counts += 1
        self.max_running_counts = max(self.max_running_counts, self.running_counts)
        await asyncio.sleep(0)
        self.running_counts -= 1
        return await super().count_tasks(*args, **options)


class CountingCodec(Codec):
    """Counts the contents and attempts that are decoded."""

    decoded_count = 0

    def unpack(self, stored: bytes) -> TaskContent:
        """Decode content."""
        self.decoded_count += 1
        return super().unpack(stored)

    def decrypt_attempt(self, stored: AttemptRecord) -> AttemptRecord:
        """Decrypt an attempt."""
        self.decoded_count += 1
        return super().decrypt_attempt(stored)


async def test_only_compared_parts_are_decoded() -> None:
    """A count by status decodes nothing; other counts decode the attempt or the content."""
    store, codec = CountingStore(lambda: START_MS), CountingCodec()
    await add_tasks(store, codec)
    finder = TaskFinder(store, codec)
    cases: list[tuple[dict[str, Any], tuple[int, int]]] = [
        ({"last_status": "5xx"}, (2, 0)),
        ({"error": "timeout"}, (1, 4)),  # of the fifth, the error class matches
        ({"error": "timeout", "last_status": "4xx"}, (0, 0)),
        ({"url_prefix": "https://a.example/orders/3"}, (1, 6)),
        ({"url_prefix": "https://a.example/", "last_status": "503"}, (1, 1)),
    ]
    for fields, expected in cases:
        codec.decoded_count = 0
        count = await finder.count("acme", Search(**fields))
        assert expected == (count, codec.decoded_count)


async def test_number_of_reads_does_not_depend_on_the_limit() -> None:
    """The store reads many tasks to find one; a limit of 1 does not mean one read for each."""
    store = CountingStore(lambda: START_MS)
    await add_tasks(store, Codec())
    finder = TaskFinder(store, Codec())
    search = Search(last_status="503")
    page = await finder.find_page("acme", search, cursor=None, limit=1)
    assert ([1], None, 2) == (numbers_of(page), page.cursor, store.read_count)
    ids = await finder.find_ids("acme", search, cursor=None, limit=1)
    assert (1, 3) == (len(ids.items), store.read_count)


async def test_counts_of_a_tenant_run_one_after_the_other() -> None:
    """Requests of one tenant cannot occupy the store with counts of all its tasks."""
    store = CountingStore(lambda: START_MS)
    await add_tasks(store, Codec())
    finder, search = TaskFinder(store, Codec()), Search()
    assert [6] * 3 == await asyncio.gather(*(finder.count("acme", search) for _ in range(3)))
    assert 1 == store.max_running_counts
    await asyncio.gather(finder.count("acme", search), finder.count("beta", search))
    assert 2 == store.max_running_counts


async def test_a_task_with_an_unknown_key_is_found_by_its_status() -> None:
    """Content that cannot be decrypted matches no URL; the status of an attempt is readable."""
    finder = await make_finder(Codec([Fernet.generate_key().decode()]))
    other = TaskFinder(finder._store, Codec())
    by_status = Search(last_status="503")
    [found] = (await other.find_page("acme", by_status, cursor=None, limit=9)).items
    assert found.content is None
    by_url = Search(url_prefix="https://a.example/")
    assert [] == (await other.find_page("acme", by_url, cursor=None, limit=9)).items


async def test_groups_continue_with_older_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limited number of tasks is read; the cursor continues with older ones of the same group."""
    monkeypatch.setattr(task_search, "_GROUP_PAGE_TASKS", 2)
    monkeypatch.setattr(task_search, "_MAX_GROUP_PAGES", 2)
    dead_letters = Search(status="EXHAUSTED")

    finder = await make_finder()
    page = await finder.group("acme", dead_letters, cursor=None)
    assert [(4, 5)] == [
        (group.task_count, *task_numbers([group.newest.task])) for group in page.items
    ]
    page = await finder.group("acme", dead_letters, cursor=page.cursor)
    assert [(1, 1)] == [
        (group.task_count, *task_numbers([group.newest.task])) for group in page.items
    ]
    assert page.cursor is None


async def test_groups_of_many_lanes_are_returned_in_several_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request ends after a number of groups, because each has the content of a task."""
    monkeypatch.setattr(task_search, "_GROUP_PAGE_TASKS", 2)
    monkeypatch.setattr(task_search, "_MAX_GROUPS", 3)
    search = Search()

    store = ReferenceStore(lambda: START_MS)
    content = Codec().pack(TaskContent(url="https://a.example/"))
    tasks = [
        task(number, lane=f"acme/https:a.example:443@{number}", packed_content=content)
        for number in range(6)
    ]
    await store.add([NewTask(each, 0) for each in tasks])
    finder = TaskFinder(store, Codec())
    page = await finder.group("acme", search, cursor=None)
    assert [5, 4, 3, 2] == task_numbers([group.newest.task for group in page.items])
    page = await finder.group("acme", search, cursor=page.cursor)
    assert [1, 0] == task_numbers([group.newest.task for group in page.items])
    assert page.cursor is None


async def test_searches_that_read_many_tasks_run_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenant that counts or groups its tasks many times at once has one search at a time."""
    search = Search(status="EXHAUSTED")

    finder = await make_finder()
    running: list[int] = [0]
    most: list[int] = [0]
    list_tasks = finder._store.list_tasks

    async def count_running(*arguments: Any, **options: Any) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0)
        page = await list_tasks(*arguments, **options)
        running[0] -= 1
        return page

    monkeypatch.setattr(finder._store, "list_tasks", count_running)
    await asyncio.gather(*(finder.group("acme", search, cursor=None) for _ in range(3)))
    assert [1] == most
