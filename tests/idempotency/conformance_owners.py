"""Conformance cases about owners whose lease has expired."""

from __future__ import annotations

from tests.idempotency.conformance_harness import (
    OK,
    StoreHarness,
    claim_concurrently,
    conformance_case,
    existing_record,
    record_of,
)


@conformance_case
async def an_expired_lease_frees_the_key(harness: StoreHarness) -> None:
    """After the lease of a killed process expires, another request can claim the key."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.advance(harness.lease)

    assert await harness.twin.claim("k", "other", "second", harness.lease) is None
    assert "other" == (await record_of(harness.store, "k")).fingerprint


@conformance_case
async def an_expired_lease_can_be_extended_and_finished(harness: StoreHarness) -> None:
    """The owner of an expired lease may extend and finish it until another owner claims the key."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.advance(harness.lease)
    assert await harness.store.extend("k", "print", "first", harness.lease)
    await harness.advance(harness.lease)

    assert await harness.store.finish("k", "print", "first", OK, 20 * harness.tick)

    assert OK == (await record_of(harness.twin, "k")).response


@conformance_case
async def a_former_owner_cannot_change_the_key(harness: StoreHarness) -> None:
    """After another owner claimed the key, the first can neither extend, finish nor release it."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.advance(harness.lease)
    await harness.twin.claim("k", "print", "second", harness.lease)

    assert not await harness.store.extend("k", "print", "first", 100 * harness.tick)
    assert not await harness.store.finish("k", "print", "first", OK, 100 * harness.tick)
    await harness.store.release("k", "first")

    existing = await existing_record(harness.store, "k")
    assert ("print", None) == (existing.record.fingerprint, existing.record.response)
    assert 0 < existing.record.free_at - existing.now <= harness.lease
    assert await harness.twin.finish("k", "print", "second", OK, harness.lease)


@conformance_case
async def a_lost_record_is_created_again_by_its_owner(harness: StoreHarness) -> None:
    """The owner of a lost record can extend and finish it, if no other owner claimed the key."""
    assert await harness.store.extend("extended", "print", "first", harness.lease)
    assert await harness.store.finish("finished", "print", "first", OK, harness.lease)
    await harness.store.release("released", "first")

    extended, finished = [await record_of(harness.twin, key) for key in ("extended", "finished")]
    assert ("print", None) == (extended.fingerprint, extended.response)
    assert ("print", OK) == (finished.fingerprint, finished.response)
    assert await harness.twin.claim("released", "print", "second", harness.lease) is None


@conformance_case
async def a_swept_lease_can_be_extended_and_finished(harness: StoreHarness) -> None:
    """An expired lease that was swept can be extended and finished, if the key was not claimed."""
    for key in ("extended", "finished"):
        await harness.store.claim(key, "print", "first", harness.lease)
    await harness.advance(harness.lease)
    await harness.twin.sweep(10)

    assert await harness.store.extend("extended", "print", "first", harness.lease)
    assert await harness.store.finish("finished", "print", "first", OK, harness.lease)

    assert (await record_of(harness.twin, "extended")).response is None
    assert OK == (await record_of(harness.twin, "finished")).response


@conformance_case
async def a_repeated_call_returns_the_same_result(harness: StoreHarness) -> None:
    """A call that its owner repeats, because the first answer was lost, succeeds again."""
    for key, body in (("some", b"done"), ("none", None)):
        response = OK._replace(body=body)
        for _ in range(2):
            assert await harness.store.claim(key, "print", "first", harness.lease) is None
        for _ in range(2):
            assert await harness.twin.finish(key, "print", "first", response, harness.lease)

        assert response == (await record_of(harness.store, key)).response


@conformance_case
async def one_of_many_concurrent_claims_takes_over(harness: StoreHarness) -> None:
    """One of many concurrent claims of an expired lease gets the key."""
    await harness.store.claim("k", "print", "lost", harness.lease)
    await harness.advance(harness.lease)
    results = await claim_concurrently(harness)

    assert 1 == results.count(None)
