"""Conformance cases: records by owner, kind and key."""

from __future__ import annotations

import asyncio

from tarry.service import store as contract
from tarry.service.records.collection import RecordCollection
from tarry.service.store import (
    MAX_LISTED_RECORDS,
    NewTask,
    RecordAddress,
    RecordChange,
    RecordKind,
    Retention,
    StoredRecord,
)
from tests.service.stores.harness import (
    DAY_MS,
    LANE,
    START_MS,
    StoreHarness,
    conformance_case,
    task,
)

KIND = "things"


def change(key: str, value: bytes | None, owner: str = "acme", **fields: object) -> RecordChange:
    """Return an unconditional change, unless `expected` is given."""
    fields.setdefault("is_unconditional", "expected" not in fields)
    return RecordChange(owner, KIND, key, value, **fields)  # type: ignore[arg-type]


async def read(harness: StoreHarness, key: str, owner: str = "acme") -> bytes | None:
    """Return the value of a record."""
    _, [record] = await harness.store.read_records([RecordAddress(owner, KIND, key)])
    return None if record is None else record.value


async def list_keys(harness: StoreHarness, owner: str = "acme", after: str = "") -> list[str]:
    """Return the keys of one page."""
    _, records = await harness.store.list_records(owner, KIND, after=after)
    return [record.key for record in records]


@conformance_case
async def a_record_is_read_as_it_was_written(harness: StoreHarness) -> None:
    """Owner, kind and key identify a record; the time of the store is returned, too."""
    harness.clock.advance(7)
    store = harness.store
    for owner in ("", "acme", "beta"):
        assert await store.write_records([change("k", b"\x00\xff" + owner.encode(), owner)])
    harness.clock.advance(1)
    addresses = [
        RecordAddress("acme", KIND, "k"),
        RecordAddress("acme", "others", "k"),
        RecordAddress("beta", KIND, "k"),
        RecordAddress("beta", KIND, "l"),
        RecordAddress("", KIND, "k"),
    ]
    now, records = await (await harness.reopen()).read_records(addresses)
    assert START_MS + 8 == now
    assert [
        StoredRecord("acme", KIND, "k", b"\x00\xffacme", START_MS + 7),
        None,
        StoredRecord("beta", KIND, "k", b"\x00\xffbeta", START_MS + 7),
        None,
        StoredRecord("", KIND, "k", b"\x00\xff", START_MS + 7),
    ] == records
    assert (START_MS + 8, []) == await store.read_records([])


@conformance_case
async def a_change_that_expects_another_value_conflicts(harness: StoreHarness) -> None:
    """None of the changes of a call is applied if one conflicts."""
    store = harness.store
    assert await store.write_records([change("a", b"1", expected=None)])
    for expected in (None, b"0", b""):
        changes = [change("b", b"1"), change("a", b"2", expected=expected), change("c", b"1")]
        assert not await store.write_records(changes)
    assert ["a"] == await list_keys(harness)
    assert not await store.write_records([change("a", None, expected=b"2")])
    assert not await store.write_records([change("b", None, expected=b"2")])
    assert await store.write_records([change("a", b"2", expected=b"1"), change("b", b"1")])
    assert (b"2", b"1") == (await read(harness, "a"), await read(harness, "b"))
    assert await store.write_records([change("a", None, expected=b"2"), change("b", None)])
    assert await store.write_records([change("b", None)])
    assert [] == await list_keys(harness)


@conformance_case
async def one_of_concurrent_changes_is_applied(harness: StoreHarness) -> None:
    """Of several stores that expect the same value, or none, one succeeds."""
    other = await harness.reopen()
    stores = [harness.opened[0], other] * 4
    for expected in (None, b"0"):
        if expected is not None:
            await other.write_records([change("a", expected)])
        written = await asyncio.gather(
            *(
                store.write_records([change("a", b"%d" % number, expected=expected)])
                for number, store in enumerate(stores, 1)
            )
        )
        assert 1 == sum(written)
        assert b"%d" % (written.index(True) + 1) == await read(harness, "a")


@conformance_case
async def records_are_listed_by_key(harness: StoreHarness) -> None:
    """Keys are compared as UTF-8, and pages continue after a key."""
    keys = sorted(["", "a", "a/b", "b", "B", "é", "z", "\U0001f600", "\uffff"])
    for key in keys:
        await harness.store.write_records([change(key, b"1")])
    await harness.store.write_records([change("c", b"1", "beta"), change("d", b"1", "beta")])
    assert sorted(keys[1:], key=str.encode) == await list_keys(harness)
    assert ["z", *sorted(("é", "\U0001f600", "\uffff"), key=str.encode)] == await list_keys(
        harness, after="b"
    )
    _, records = await harness.store.list_records("beta", KIND, limit=1)
    assert ["c"] == [record.key for record in records]
    assert ["d"] == await list_keys(harness, "beta", after="c")
    assert [] == await list_keys(harness, "beta", after="d")


@conformance_case
async def a_list_ends_with_the_record_that_reaches_the_size(harness: StoreHarness) -> None:
    """Large values make pages short, and a page has at least one record."""
    size = contract.MAX_PAGE_BYTES // 2 + 1
    for key in ("a", "b", "c"):
        await harness.store.write_records([change(key, b"x" * size)])
    assert ["a", "b"] == await list_keys(harness)
    assert ["c"] == await list_keys(harness, after="b")
    await harness.store.write_records([change("a", b"x" * 2 * size)])
    assert ["a"] == await list_keys(harness)


@conformance_case
async def all_pages_have_all_records(harness: StoreHarness) -> None:
    """A collection reads all pages."""
    collection = RecordCollection[int](KIND, int)
    count = MAX_LISTED_RECORDS + 2
    for start in range(0, count, 100):
        numbers = range(start, min(start + 100, count))
        await harness.store.write_records([change(f"{n:05}", b"\x01") for n in numbers])
    assert count == len(await collection.list_all(harness.store, "acme"))


@conformance_case
async def a_record_expires(harness: StoreHarness) -> None:
    """A record that has expired is neither found nor in the way, and is swept."""
    store = harness.store
    await store.write_records(
        [change("a", b"1", lifetime_ms=10), change("b", b"1", lifetime_ms=11)]
    )
    harness.clock.advance(9)
    assert ["a", "b"] == await list_keys(harness)
    harness.clock.advance(1)
    assert ["b"] == await list_keys(harness)
    assert await read(harness, "a") is None
    assert not await store.write_records([change("a", b"2", expected=b"1")])
    assert await store.write_records([change("a", b"2", expected=None)])
    assert await store.write_records([change("b", b"2", expected=b"1")])
    for _ in range(2):  # neither of them expires any more
        harness.clock.advance(DAY_MS)
        assert ["a", "b"] == await list_keys(harness)
        await store.sweep(Retention(DAY_MS, DAY_MS), 10)
    await store.write_records([change("a", b"1", lifetime_ms=10)])
    harness.clock.advance(10)
    await store.sweep(Retention(DAY_MS, DAY_MS), 10)
    harness.clock.now -= 10
    assert ["b"] == await list_keys(harness)


@conformance_case
async def a_record_of_a_lane_is_removed_with_it(harness: StoreHarness) -> None:
    """It is not written if the lane does not exist."""
    store = harness.store
    changes = [change("a", b"1", LANE), change("b", b"1")]
    assert await store.write_records(changes)
    assert ([], ["b"]) == (await list_keys(harness, LANE), await list_keys(harness))
    await store.add([NewTask(task(1))])
    assert await store.write_records(changes)
    assert await store.write_records([change("a", b"2", LANE, expected=b"1")])
    assert b"2" == await read(harness, "a", LANE)
    await store.cancel("acme", task(1).id)
    harness.clock.advance(2 * DAY_MS)
    for _ in range(2):
        await store.sweep(Retention(DAY_MS, DAY_MS), 10)
    assert await store.get_lane(LANE) is None
    assert await read(harness, "a", LANE) is None
    await store.add([NewTask(task(2))])
    assert ([], ["b"]) == (await list_keys(harness, LANE), await list_keys(harness))


@conformance_case
async def records_that_do_not_expire_are_exported(harness: StoreHarness) -> None:
    """All owners are in the export, and a record that exists is not imported."""
    store = harness.store
    await store.add([NewTask(task(1))])
    for owner in ("", "acme", LANE, "beta"):
        await store.write_records([change("a", b"1", owner), change("b", b"1", owner)])
        await store.write_records([change("c", b"1", owner, lifetime_ms=10)])
    cursor, exported = None, []
    while True:
        page = await store.export_records(RecordKind.RECORD, cursor=cursor, limit=3)
        exported += page.items
        cursor = page.cursor
        if cursor is None:
            break
    expected = {(owner, key) for owner in ("", "acme", LANE, "beta") for key in "ab"}
    assert expected == {(record.owner, record.key) for record in exported}
    assert len(expected) == len(exported)
    await store.write_records([change("a", b"2"), change("b", None)])
    harness.clock.advance(5)
    await store.import_records(RecordKind.RECORD, exported)
    assert (b"2", b"1") == (await read(harness, "a"), await read(harness, "b"))
    _, [record] = await store.read_records([RecordAddress("acme", KIND, "b")])
    assert record is not None
    assert (START_MS, None) == (record.written_at, record.expires_at)


@conformance_case
async def concurrent_updates_of_a_record_are_all_applied(harness: StoreHarness) -> None:
    """An update that conflicts is repeated with the new value."""
    collection = RecordCollection[list[int]](KIND, list[int])
    other = await harness.reopen()

    async def append(number: int) -> None:
        store = (harness.opened[0], other)[number % 2]
        await collection.update(store, lambda value, _: [*(value or ()), number], "acme", "a")

    await asyncio.gather(*map(append, range(6)))
    assert list(range(6)) == sorted(await collection.get(other, "acme", "a") or ())
