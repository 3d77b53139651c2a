"""What every store of idempotency records must do: one list of cases, run on each engine.

A test file makes a `Bench` around an empty store and runs each case of `CASES` on it:

    @pytest.mark.parametrize("case", CASES, ids=name_of)
    def test_conformance(case: Case) -> None: ...
"""

from __future__ import annotations

from tarry.idempotency.store import StoredResponse
from tests.idempotency import conformance_owners  # noqa: F401 - adds its cases
from tests.idempotency.bench import (
    CASES,
    CROWD,
    OK,
    Bench,
    Case,
    conforms,
    crowd,
    name_of,
    record_of,
    taken,
)

__all__ = ["CASES", "Bench", "Case", "name_of"]


@conforms
async def a_free_key_is_claimed_once(bench: Bench) -> None:
    """The first claim gets the key; the next is told what for it is taken, and until when."""
    assert await bench.store.claim("k", "print", "first", bench.lease) is None

    second = await bench.twin.claim("k", "other", "second", bench.lease)

    assert second is not None
    assert ("print", None) == (second.record.fingerprint, second.record.response)
    assert 0 < second.record.free_at - second.now <= bench.lease


@conforms
async def keys_are_apart(bench: Bench) -> None:
    """A key says nothing about another, however much alike they look."""
    keys = ["k", "K", "k ", "k:", "k%", "k_", "k'", 'k"', "k{1}", "k\\", "kä", "k" * 1000]

    assert [None] * len(keys) == [
        await bench.store.claim(key, "print", "first", bench.lease) for key in keys
    ]


@conforms
async def a_finished_key_keeps_its_response(bench: Bench) -> None:
    """After finish a claim is told the response, until the time to keep it is up."""
    await bench.store.claim("k", "print", "first", bench.lease)

    assert await bench.store.finish("k", "print", "first", OK, 20 * bench.tick)

    found = await taken(bench.twin, "k")
    assert ("print", OK) == (found.record.fingerprint, found.record.response)
    assert bench.lease < found.record.free_at - found.now <= 20 * bench.tick


@conforms
async def a_finished_key_is_free_when_its_time_is_up(bench: Bench) -> None:
    """What has expired is gone: the next claim begins anew, without the old response."""
    await bench.store.claim("k", "print", "first", bench.lease)
    await bench.store.finish("k", "print", "first", OK, 3 * bench.tick)
    await bench.advance(3 * bench.tick)

    assert await bench.twin.claim("k", "new", "second", bench.lease) is None

    record = await record_of(bench.store, "k")
    assert ("new", None) == (record.fingerprint, record.response)


@conforms
async def responses_are_kept_to_the_byte(bench: Bench) -> None:
    """Status, headers in order with repeats and any byte, and a large binary body come back."""
    headers = (
        (b"Set-Cookie", b"a=1"),
        (b"x-bytes", bytes(range(1, 256))),
        (b"set-cookie", b"b=2"),
        (b"x-empty", b""),
    )
    response = StoredResponse(201, headers, bytes(range(256)) * 4096)
    await bench.store.claim("k", "print", "first", bench.lease)
    await bench.store.finish("k", "print", "first", response, 20 * bench.tick)

    assert response == (await record_of(bench.twin, "k")).response


@conforms
async def no_body_is_not_an_empty_body(bench: Bench) -> None:
    """A body that was too large to keep is told from one of no bytes."""
    for key, body in (("none", None), ("empty", b"")):
        response = StoredResponse(204, (), body)
        await bench.store.claim(key, "print", "first", bench.lease)
        await bench.store.finish(key, "print", "first", response, 20 * bench.tick)

        assert response == (await record_of(bench.twin, key)).response


@conforms
async def extending_moves_the_end_of_the_lease(bench: Bench) -> None:
    """A lease that is extended counts from then on."""
    await bench.store.claim("k", "print", "first", bench.lease)
    await bench.advance(6 * bench.tick)

    assert await bench.store.extend("k", "print", "first", bench.lease)

    await bench.advance(6 * bench.tick)
    found = await taken(bench.twin, "k")
    assert 0 < found.record.free_at - found.now <= 4 * bench.tick


@conforms
async def a_released_key_is_free_at_once(bench: Bench) -> None:
    """After release the next request gets the key."""
    await bench.store.claim("k", "print", "first", bench.lease)

    await bench.store.release("k", "first")

    assert await bench.twin.claim("k", "other", "second", bench.lease) is None


@conforms
async def what_is_finished_stays(bench: Bench) -> None:
    """After finish, its own owner can neither extend, release nor finish it again."""
    await bench.store.claim("k", "print", "first", bench.lease)
    await bench.store.finish("k", "print", "first", OK, 20 * bench.tick)

    assert not await bench.store.extend("k", "print", "first", 100 * bench.tick)
    assert not await bench.store.finish(
        "k", "print", "first", OK._replace(status=500), 100 * bench.tick
    )
    await bench.store.release("k", "first")

    found = await taken(bench.twin, "k")
    assert OK == found.record.response
    assert found.record.free_at - found.now <= 20 * bench.tick


@conforms
async def a_store_that_was_closed_opens_again(bench: Bench) -> None:
    """An application whose lifespan runs twice closes its store between."""
    await bench.store.claim("k", "print", "first", bench.lease)
    await bench.store.close()

    assert await bench.store.claim("k", "print", "second", bench.lease) is not None


@conforms
async def one_of_a_crowd_wins(bench: Bench) -> None:
    """Of many claims at the same moment one gets the key, and all others see its record."""
    answers = await crowd(bench)

    winner = answers.index(None)
    assert [f"print {winner}"] * (CROWD - 1) == [
        found.record.fingerprint for found in answers if found is not None
    ]


@conforms
async def a_sweep_forgets_what_has_expired(bench: Bench) -> None:
    """A sweep removes up to its limit of what is over, running or finished, and nothing else."""
    for number in range(4):
        await bench.store.claim(f"over {number}", "print", "first", bench.tick)
    await bench.store.finish("over 0", "print", "first", OK, bench.tick)
    await bench.store.claim("runs", "print", "first", bench.lease)
    await bench.store.claim("done", "print", "first", bench.tick)
    await bench.store.finish("done", "print", "first", OK, bench.lease)
    await bench.advance(2 * bench.tick)

    counts = [await bench.store.sweep(3) for _ in range(3)]

    assert ([0, 0, 0] if bench.forgets else [3, 1, 0]) == counts
    assert (await record_of(bench.store, "runs")).response is None
    assert OK == (await record_of(bench.store, "done")).response


@conforms
async def closing_twice_is_harmless(bench: Bench) -> None:
    """A store may be closed by more than one hand."""
    await bench.store.claim("k", "print", "first", bench.lease)

    await bench.store.close()
    await bench.store.close()
