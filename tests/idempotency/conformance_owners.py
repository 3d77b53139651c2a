"""What every store must do for owners that are late, and for those who come after them."""

from __future__ import annotations

from tests.idempotency.bench import OK, Bench, conforms, crowd, record_of, taken


@conforms
async def a_lease_that_ran_out_frees_the_key(bench: Bench) -> None:
    """What a killed process held is claimed by the next, under a fingerprint of its own."""
    await bench.store.claim("k", "print", "first", bench.lease)
    await bench.advance(bench.lease)

    assert await bench.twin.claim("k", "other", "second", bench.lease) is None
    assert "other" == (await record_of(bench.store, "k")).fingerprint


@conforms
async def being_late_alone_does_no_harm(bench: Bench) -> None:
    """A lease that ran out is its owner's to extend and to finish until another claims the key."""
    await bench.store.claim("k", "print", "first", bench.lease)
    await bench.advance(bench.lease)
    assert await bench.store.extend("k", "print", "first", bench.lease)
    await bench.advance(bench.lease)

    assert await bench.store.finish("k", "print", "first", OK, 20 * bench.tick)

    assert OK == (await record_of(bench.twin, "k")).response


@conforms
async def who_lost_the_lease_cannot_touch_the_key(bench: Bench) -> None:
    """Once another has claimed the key, the first can neither extend, finish nor release it."""
    await bench.store.claim("k", "print", "first", bench.lease)
    await bench.advance(bench.lease)
    await bench.twin.claim("k", "print", "second", bench.lease)

    assert not await bench.store.extend("k", "print", "first", 100 * bench.tick)
    assert not await bench.store.finish("k", "print", "first", OK, 100 * bench.tick)
    await bench.store.release("k", "first")

    found = await taken(bench.store, "k")
    assert ("print", None) == (found.record.fingerprint, found.record.response)
    assert 0 < found.record.free_at - found.now <= bench.lease
    assert await bench.twin.finish("k", "print", "second", OK, bench.lease)


@conforms
async def what_is_gone_is_its_owners(bench: Bench) -> None:
    """A record that was lost, while nobody else took its key, is made anew by who held it."""
    assert await bench.store.extend("extended", "print", "first", bench.lease)
    assert await bench.store.finish("finished", "print", "first", OK, bench.lease)
    await bench.store.release("released", "first")

    extended, finished = [await record_of(bench.twin, key) for key in ("extended", "finished")]
    assert ("print", None) == (extended.fingerprint, extended.response)
    assert ("print", OK) == (finished.fingerprint, finished.response)
    assert await bench.twin.claim("released", "print", "second", bench.lease) is None


@conforms
async def a_sweep_does_not_lose_the_answer_of_a_late_owner(bench: Bench) -> None:
    """A lease that ran out and was swept can be extended and finished, if nobody took the key."""
    for key in ("extended", "finished"):
        await bench.store.claim(key, "print", "first", bench.lease)
    await bench.advance(bench.lease)
    await bench.twin.sweep(10)

    assert await bench.store.extend("extended", "print", "first", bench.lease)
    assert await bench.store.finish("finished", "print", "first", OK, bench.lease)

    assert (await record_of(bench.twin, "extended")).response is None
    assert OK == (await record_of(bench.twin, "finished")).response


@conforms
async def who_asks_again_gets_the_same_answer(bench: Bench) -> None:
    """An owner that repeats a step, whose first answer was lost, is not its own rival."""
    for key, body in (("some", b"done"), ("none", None)):
        response = OK._replace(body=body)
        for _ in range(2):
            assert await bench.store.claim(key, "print", "first", bench.lease) is None
        for _ in range(2):
            assert await bench.twin.finish(key, "print", "first", response, bench.lease)

        assert response == (await record_of(bench.store, key)).response


@conforms
async def one_of_a_crowd_takes_over(bench: Bench) -> None:
    """Of many claims on a lease that ran out one gets the key."""
    await bench.store.claim("k", "print", "lost", bench.lease)
    await bench.advance(bench.lease)
    answers = await crowd(bench)

    assert 1 == answers.count(None)
