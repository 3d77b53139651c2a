"""Conformance cases about owners whose lease has expired or whose record was lost."""

from __future__ import annotations

from tests.idempotency.conformance_harness import (
    RESPONSE,
    StoreHarness,
    claim_concurrently,
    conformance_case,
    existing_record,
    record_of,
)


@conformance_case
async def an_expired_lease_frees_the_key(harness: StoreHarness) -> None:
    """After a lease has expired, another owner can claim the key."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.advance(harness.lease)

    assert await harness.second_connection.claim("k", "other", "second", harness.lease) is None
    assert "other" == (await record_of(harness.store, "k")).fingerprint


@conformance_case
async def an_expired_lease_can_be_extended_and_finished(harness: StoreHarness) -> None:
    """The owner of an expired lease may extend and finish it until another owner claims the key."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.advance(harness.lease)
    assert await harness.store.extend("k", "print", "first", harness.lease)
    await harness.advance(harness.lease)

    assert await harness.store.finish("k", "print", "first", RESPONSE, 20 * harness.tick)

    assert RESPONSE == (await record_of(harness.second_connection, "k")).response


@conformance_case
async def a_former_owner_cannot_change_the_key(harness: StoreHarness) -> None:
    """After another owner claimed a key, the first owner cannot extend, finish or release it."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.advance(harness.lease)
    await harness.second_connection.claim("k", "print", "second", harness.lease)

    assert not await harness.store.extend("k", "print", "first", 100 * harness.tick)
    assert not await harness.store.finish("k", "print", "first", RESPONSE, 100 * harness.tick)
    await harness.store.release("k", "first")

    existing = await existing_record(harness.store, "k")
    assert ("print", None) == (existing.record.fingerprint, existing.record.response)
    assert 0 < existing.record.free_at - existing.now <= harness.lease
    assert await harness.second_connection.finish("k", "print", "second", RESPONSE, harness.lease)


@conformance_case
async def a_lost_record_is_created_again(harness: StoreHarness) -> None:
    """Extending or finishing a key whose record was lost creates the record again."""
    assert await harness.store.extend("extended", "print", "first", harness.lease)
    assert await harness.store.finish("finished", "print", "first", RESPONSE, harness.lease)
    await harness.store.release("released", "first")

    extended, finished = [
        await record_of(harness.second_connection, key) for key in ("extended", "finished")
    ]
    assert ("print", None) == (extended.fingerprint, extended.response)
    assert ("print", RESPONSE) == (finished.fingerprint, finished.response)
    assert (
        await harness.second_connection.claim("released", "print", "second", harness.lease) is None
    )


@conformance_case
async def a_swept_lease_can_be_extended_and_finished(harness: StoreHarness) -> None:
    """An expired lease that was swept can be extended and finished, if the key was not claimed."""
    for key in ("extended", "finished"):
        await harness.store.claim(key, "print", "first", harness.lease)
    await harness.advance(harness.lease)
    await harness.second_connection.sweep(10)

    assert await harness.store.extend("extended", "print", "first", harness.lease)
    assert await harness.store.finish("finished", "print", "first", RESPONSE, harness.lease)

    assert (await record_of(harness.second_connection, "extended")).response is None
    assert RESPONSE == (await record_of(harness.second_connection, "finished")).response


@conformance_case
async def a_repeated_call_returns_the_same_result(harness: StoreHarness) -> None:
    """An owner may repeat a claim or a finish whose result was lost in the network."""
    for key, body in (("some", b"done"), ("none", None)):
        response = RESPONSE._replace(body=body)
        for _ in range(2):
            assert await harness.store.claim(key, "print", "first", harness.lease) is None
        for _ in range(2):
            assert await harness.second_connection.finish(
                key, "print", "first", response, harness.lease
            )

        assert response == (await record_of(harness.store, key)).response


@conformance_case
async def one_of_many_concurrent_claims_gets_an_expired_lease(harness: StoreHarness) -> None:
    """One of many concurrent claims of an expired lease gets the key."""
    await harness.store.claim("k", "print", "first", harness.lease)
    await harness.advance(harness.lease)
    results = await claim_concurrently(harness)

    assert 1 == results.count(None)
