"""Conformance cases: the behaviour that every idempotency store must have.

The tests of a store create a `StoreHarness` with an empty store and run each case of `CASES`:

    @pytest.mark.parametrize("case", CASES, ids=case_name)
    def test_conformance(case: Case) -> None: ...
"""

from __future__ import annotations

from tarry.idempotency.store import StoredResponse
from tests.idempotency import conformance_owners  # noqa: F401 - registers its cases
from tests.idempotency.conformance_harness import (
    CASES,
    CONCURRENT_CLAIMS,
    RESPONSE,
    Case,
    StoreHarness,
    case_name,
    claim_concurrently,
    conformance_case,
    existing_record,
    record_of,
)

__all__ = ["CASES", "Case", "StoreHarness", "case_name"]


@conformance_case
async def a_free_key_is_claimed_once(harness: StoreHarness) -> None:
    """The first claim gets the key; the second returns the record of the first."""
    assert await harness.store.claim("k", "print", "first", harness.lease) is None

    second = await harness.second_connection.claim("k", "other", "second", harness.lease)

    assert second is not None
    assert ("print", None) == (second.record.fingerprint, second.record.response)
    assert 0 < second.record.free_at - second.now <= harness.lease


@conformance_case
async def similar_keys_have_separate_records(harness: StoreHarness) -> None:
    """Keys that differ in case, a special character or length have separate records."""
    keys = ["k", "K", "k ", "k:", "k%", "k_", "k'", 'k"', "k{1}", "k\\", "kä", "k" * 1000]

    assert [None] * len(keys) == [
        await harness.store.claim(key, "print", "first", harness.lease) for key in keys
    ]


@conformance_case
async def a_finished_key_returns_its_response(harness: StoreHarness) -> None:
    """After finish, a claim returns the response until the retention ends."""
    await harness.store.claim("k", "print", "first", harness.lease)

    assert await harness.store.finish("k", "print", "first", RESPONSE, 20 * harness.tick)

    existing = await existing_record(harness.second_connection, "k")
    assert ("print", RESPONSE) == (existing.record.fingerprint, existing.record.response)
    assert harness.lease < existing.record.free_at - existing.now <= 20 * harness.tick


@conformance_case
async def a_finished_key_is_free_after_its_retention(harness: StoreHarness) -> None:
    """After the retention a claim succeeds, and the old response is deleted."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.store.finish("k", "print", "first", RESPONSE, 3 * harness.tick)
    await harness.advance(3 * harness.tick)

    assert await harness.second_connection.claim("k", "new", "second", harness.lease) is None

    record = await record_of(harness.store, "k")
    assert ("new", None) == (record.fingerprint, record.response)


@conformance_case
async def responses_are_stored_unchanged(harness: StoreHarness) -> None:
    """A stored response keeps its status, repeated headers in order, and a large binary body."""
    headers = (
        (b"Set-Cookie", b"a=1"),
        (b"x-bytes", bytes(range(1, 256))),
        (b"set-cookie", b"b=2"),
        (b"x-empty", b""),
    )
    response = StoredResponse(201, headers, bytes(range(256)) * 4096)
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.store.finish("k", "print", "first", response, 20 * harness.tick)

    assert response == (await record_of(harness.second_connection, "k")).response


@conformance_case
async def missing_body_differs_from_an_empty_body(harness: StoreHarness) -> None:
    """A body that was too large to store is None, and an empty body is b""."""
    for key, body in (("none", None), ("empty", b"")):
        response = StoredResponse(204, (), body)
        await harness.store.claim(key, "print", "first", harness.lease)
        await harness.store.finish(key, "print", "first", response, 20 * harness.tick)

        assert response == (await record_of(harness.second_connection, key)).response


@conformance_case
async def an_extended_lease_begins_at_the_extension(harness: StoreHarness) -> None:
    """The length of an extended lease counts from the time of the extension."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.advance(6 * harness.tick)

    assert await harness.store.extend("k", "print", "first", harness.lease)

    await harness.advance(6 * harness.tick)
    existing = await existing_record(harness.second_connection, "k")
    assert 0 < existing.record.free_at - existing.now <= 4 * harness.tick


@conformance_case
async def a_released_key_is_free(harness: StoreHarness) -> None:
    """After a release, another owner can claim the key."""
    await harness.store.claim("k", "print", "first", harness.lease)

    await harness.store.release("k", "first")

    assert await harness.second_connection.claim("k", "other", "second", harness.lease) is None


@conformance_case
async def a_finished_record_does_not_change(harness: StoreHarness) -> None:
    """After finish, the owner can neither extend nor release the key, nor finish it again."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.store.finish("k", "print", "first", RESPONSE, 20 * harness.tick)

    assert not await harness.store.extend("k", "print", "first", 100 * harness.tick)
    assert not await harness.store.finish(
        "k", "print", "first", RESPONSE._replace(status=500), 100 * harness.tick
    )
    await harness.store.release("k", "first")

    existing = await existing_record(harness.second_connection, "k")
    assert RESPONSE == existing.record.response
    assert existing.record.free_at - existing.now <= 20 * harness.tick


@conformance_case
async def a_closed_store_can_be_used_again(harness: StoreHarness) -> None:
    """A closed store opens again on the next call, for applications whose lifespan runs twice."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.store.close()

    assert await harness.store.claim("k", "print", "second", harness.lease) is not None


@conformance_case
async def one_of_many_concurrent_claims_succeeds(harness: StoreHarness) -> None:
    """One of many concurrent claims gets the key, and all others see its record."""
    results = await claim_concurrently(harness)

    first = results.index(None)
    assert [f"print {first}"] * (CONCURRENT_CLAIMS - 1) == [
        existing.record.fingerprint for existing in results if existing is not None
    ]


@conformance_case
async def a_sweep_deletes_expired_records(harness: StoreHarness) -> None:
    """A sweep deletes up to its limit of expired records, running or finished, and no others."""
    for number in range(4):
        await harness.store.claim(f"expired {number}", "print", "first", harness.tick)
    await harness.store.finish("expired 0", "print", "first", RESPONSE, harness.tick)
    await harness.store.claim("running", "print", "first", harness.lease)
    await harness.store.claim("finished", "print", "first", harness.tick)
    await harness.store.finish("finished", "print", "first", RESPONSE, harness.lease)
    await harness.advance(2 * harness.tick)

    counts = [await harness.store.sweep(3) for _ in range(3)]

    assert ([0, 0, 0] if harness.expires_records else [3, 1, 0]) == counts
    assert (await record_of(harness.store, "running")).response is None
    assert RESPONSE == (await record_of(harness.store, "finished")).response


@conformance_case
async def closing_twice_is_harmless(harness: StoreHarness) -> None:
    """Closing a closed store raises no error."""
    await harness.store.claim("k", "print", "first", harness.lease)

    await harness.store.close()
    await harness.store.close()
