"""The behaviour that every idempotency store must have, as a list of cases.

A test file creates a `StoreHarness` around an empty store and runs each case of `CASES` on it:

    @pytest.mark.parametrize("case", CASES, ids=case_name)
    def test_conformance(case: Case) -> None: ...
"""

from __future__ import annotations

from tarry.idempotency.store import StoredResponse
from tests.idempotency import conformance_owners  # noqa: F401 - registers its cases
from tests.idempotency.conformance_harness import (
    CASES,
    CONCURRENT_CLAIMS,
    OK,
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
    """The first claim gets the key; the second gets the record with its fingerprint and expiry."""
    assert await harness.store.claim("k", "print", "first", harness.lease) is None

    second = await harness.twin.claim("k", "other", "second", harness.lease)

    assert second is not None
    assert ("print", None) == (second.record.fingerprint, second.record.response)
    assert 0 < second.record.free_at - second.now <= harness.lease


@conformance_case
async def similar_keys_are_different(harness: StoreHarness) -> None:
    """Keys that look alike have separate records."""
    keys = ["k", "K", "k ", "k:", "k%", "k_", "k'", 'k"', "k{1}", "k\\", "kä", "k" * 1000]

    assert [None] * len(keys) == [
        await harness.store.claim(key, "print", "first", harness.lease) for key in keys
    ]


@conformance_case
async def a_finished_key_returns_its_response(harness: StoreHarness) -> None:
    """After finish, a claim returns the response until the retention ends."""
    await harness.store.claim("k", "print", "first", harness.lease)

    assert await harness.store.finish("k", "print", "first", OK, 20 * harness.tick)

    existing = await existing_record(harness.twin, "k")
    assert ("print", OK) == (existing.record.fingerprint, existing.record.response)
    assert harness.lease < existing.record.free_at - existing.now <= 20 * harness.tick


@conformance_case
async def a_finished_key_is_free_after_its_retention(harness: StoreHarness) -> None:
    """After the retention a claim succeeds, and the old response is gone."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.store.finish("k", "print", "first", OK, 3 * harness.tick)
    await harness.advance(3 * harness.tick)

    assert await harness.twin.claim("k", "new", "second", harness.lease) is None

    record = await record_of(harness.store, "k")
    assert ("new", None) == (record.fingerprint, record.response)


@conformance_case
async def responses_are_stored_unchanged(harness: StoreHarness) -> None:
    """Status, repeated headers in order with any bytes, and a large binary body are restored."""
    headers = (
        (b"Set-Cookie", b"a=1"),
        (b"x-bytes", bytes(range(1, 256))),
        (b"set-cookie", b"b=2"),
        (b"x-empty", b""),
    )
    response = StoredResponse(201, headers, bytes(range(256)) * 4096)
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.store.finish("k", "print", "first", response, 20 * harness.tick)

    assert response == (await record_of(harness.twin, "k")).response


@conformance_case
async def no_body_is_not_an_empty_body(harness: StoreHarness) -> None:
    """A body that was too large to store differs from an empty body."""
    for key, body in (("none", None), ("empty", b"")):
        response = StoredResponse(204, (), body)
        await harness.store.claim(key, "print", "first", harness.lease)
        await harness.store.finish(key, "print", "first", response, 20 * harness.tick)

        assert response == (await record_of(harness.twin, key)).response


@conformance_case
async def extending_moves_the_end_of_the_lease(harness: StoreHarness) -> None:
    """An extended lease counts from the time of the extension."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.advance(6 * harness.tick)

    assert await harness.store.extend("k", "print", "first", harness.lease)

    await harness.advance(6 * harness.tick)
    existing = await existing_record(harness.twin, "k")
    assert 0 < existing.record.free_at - existing.now <= 4 * harness.tick


@conformance_case
async def a_released_key_is_free(harness: StoreHarness) -> None:
    """After release, the next request can claim the key."""
    await harness.store.claim("k", "print", "first", harness.lease)

    await harness.store.release("k", "first")

    assert await harness.twin.claim("k", "other", "second", harness.lease) is None


@conformance_case
async def a_finished_record_does_not_change(harness: StoreHarness) -> None:
    """After finish, its owner can neither extend nor release the key nor store another response."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.store.finish("k", "print", "first", OK, 20 * harness.tick)

    assert not await harness.store.extend("k", "print", "first", 100 * harness.tick)
    assert not await harness.store.finish(
        "k", "print", "first", OK._replace(status=500), 100 * harness.tick
    )
    await harness.store.release("k", "first")

    existing = await existing_record(harness.twin, "k")
    assert OK == existing.record.response
    assert existing.record.free_at - existing.now <= 20 * harness.tick


@conformance_case
async def a_closed_store_opens_again(harness: StoreHarness) -> None:
    """An application whose lifespan runs twice closes its store in between."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.store.close()

    assert await harness.store.claim("k", "print", "second", harness.lease) is not None


@conformance_case
async def one_of_many_concurrent_claims_succeeds(harness: StoreHarness) -> None:
    """One of many concurrent claims gets the key, and all others see its record."""
    results = await claim_concurrently(harness)

    winner = results.index(None)
    assert [f"print {winner}"] * (CONCURRENT_CLAIMS - 1) == [
        existing.record.fingerprint for existing in results if existing is not None
    ]


@conformance_case
async def a_sweep_deletes_expired_records(harness: StoreHarness) -> None:
    """A sweep deletes up to its limit of expired records, running or finished, and no others."""
    for number in range(4):
        await harness.store.claim(f"over {number}", "print", "first", harness.tick)
    await harness.store.finish("over 0", "print", "first", OK, harness.tick)
    await harness.store.claim("runs", "print", "first", harness.lease)
    await harness.store.claim("done", "print", "first", harness.tick)
    await harness.store.finish("done", "print", "first", OK, harness.lease)
    await harness.advance(2 * harness.tick)

    counts = [await harness.store.sweep(3) for _ in range(3)]

    assert ([0, 0, 0] if harness.expires_records else [3, 1, 0]) == counts
    assert (await record_of(harness.store, "runs")).response is None
    assert OK == (await record_of(harness.store, "done")).response


@conformance_case
async def closing_twice_is_harmless(harness: StoreHarness) -> None:
    """A store may be closed twice."""
    await harness.store.claim("k", "print", "first", harness.lease)

    await harness.store.close()
    await harness.store.close()
