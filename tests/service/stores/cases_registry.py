"""What every store must do: policies and API keys."""

from __future__ import annotations

from typing import Any

from tarry.service.model import ApiKey, PolicyVersion
from tarry.service.store import PolicyWriteStatus, Retention
from tests.service.stores.bench import (
    DAY,
    HOUR,
    NOON,
    Bench,
    conforms,
    stop,
    task,
)

KEEP = Retention(succeeded=HOUR, dead=DAY)


def policy(policy_id: str = "p", document: bytes = b'{"a":1}', **fields: Any) -> PolicyVersion:
    """A policy to write."""
    return PolicyVersion(
        **{"tenant": "acme", "version": 0, **fields}, id=policy_id, document=document
    )


@conforms
async def a_policy_is_written_once(bench: Bench) -> None:
    """The same again is the same; other content is a conflict that names the one that is there."""
    change, first = await bench.store.put_policy(policy(version=7), replace=False)
    assert PolicyWriteStatus.CREATED is change
    assert policy(version=1, created_at=NOON) == first
    bench.clock.advance(5)

    for replace in (False, True):
        same = await bench.store.put_policy(policy(), replace=replace)
        assert (PolicyWriteStatus.SAME, first) == same
    other = await bench.store.put_policy(policy(document=b"{}"), replace=False)
    assert (PolicyWriteStatus.CONFLICT, first) == other
    assert first == await bench.store.get_policy("acme", "p")


@conforms
async def a_replaced_policy_is_a_new_version(bench: Bench) -> None:
    """The newest is given by default, and older ones stay for those who pinned them."""
    _, first = await bench.store.put_policy(policy(), replace=True)
    bench.clock.advance(5)

    change, second = await bench.store.put_policy(policy(document=b"{}"), replace=True)

    assert PolicyWriteStatus.DONE is change
    assert policy(document=b"{}", version=2, created_at=NOON + 5) == second
    await bench.reopen()
    assert second == await bench.store.get_policy("acme", "p")
    assert [first, second, None] == [
        await bench.store.get_policy("acme", "p", version) for version in (1, 2, 3)
    ]
    change, third = await bench.store.put_policy(policy(), replace=True)
    assert (PolicyWriteStatus.DONE, 3) == (change, third.version)


@conforms
async def policies_are_those_of_a_tenant(bench: Bench) -> None:
    """The same id of two tenants is two policies; an unknown one is None."""
    await bench.store.put_policy(policy(), replace=False)

    assert await bench.store.get_policy("beta", "p") is None
    assert await bench.store.get_policy("acme", "unknown") is None
    change, _ = await bench.store.put_policy(policy(tenant="beta", document=b"{}"), replace=False)
    assert PolicyWriteStatus.CREATED is change
    assert PolicyWriteStatus.DONE is await bench.store.delete_policy("beta", "p")
    assert await bench.store.get_policy("acme", "p") is not None


@conforms
async def policies_are_listed_by_id(bench: Bench) -> None:
    """The newest version of each, in pages without gaps or repeats."""
    ids = [f"p{number}" for number in range(7)]
    for policy_id in reversed(ids):
        await bench.store.put_policy(policy(policy_id), replace=False)
    await bench.store.put_policy(policy("p3", b"{}"), replace=True)
    await bench.store.put_policy(policy("p3", tenant="beta"), replace=True)

    for limit in (1, 3, 7, 100):
        found: list[PolicyVersion] = []
        cursor = None
        for _ in range(20):
            page = await bench.store.list_policies("acme", cursor=cursor, limit=limit)
            assert len(page.items) <= limit
            found += page.items
            cursor = page.cursor
            if cursor is None:
                break
        assert ids == [one.id for one in found]
        assert [1, 1, 1, 2, 1, 1, 1] == [one.version for one in found]


@conforms
async def a_policy_in_use_is_not_deleted(bench: Bench) -> None:
    """While live tasks name it, waiting or in flight, a deletion is a conflict."""
    await bench.store.put_policy(policy(), replace=False)
    await bench.store.put_policy(policy(document=b"{}"), replace=True)
    await bench.add(task(1, policy_id="p"), task(2, tenant="beta", policy_id="other"))
    assert PolicyWriteStatus.CONFLICT is await bench.store.delete_policy("acme", "p")
    held = next(one for one in (await bench.claim()).tasks if one.tenant == "acme")
    assert PolicyWriteStatus.CONFLICT is await bench.store.delete_policy("acme", "p")
    await bench.store.finish([stop(held)])

    assert PolicyWriteStatus.DONE is await bench.store.delete_policy("acme", "p")

    assert await bench.store.get_policy("acme", "p") is None
    assert await bench.store.get_policy("acme", "p", 1) is None
    assert PolicyWriteStatus.MISSING is await bench.store.delete_policy("acme", "p")
    assert [] == (await bench.store.list_policies("acme")).items


@conforms
async def a_version_that_was_deleted_does_not_come_back(bench: Bench) -> None:
    """A task that pinned it must never go by another content."""
    await bench.store.put_policy(policy(), replace=False)
    await bench.store.put_policy(policy(document=b"{}"), replace=True)
    await bench.store.delete_policy("acme", "p")
    await bench.reopen()

    change, anew = await bench.store.put_policy(policy(), replace=False)

    assert (PolicyWriteStatus.CREATED, 3) == (change, anew.version)
    assert [None, None, anew, None] == [
        await bench.store.get_policy("acme", "p", version) for version in (1, 2, 3, 4)
    ]
    await bench.store.delete_policy("acme", "p")
    _, again = await bench.store.put_policy(policy(), replace=True)
    assert 4 == again.version


@conforms
async def a_replayed_letter_uses_its_policy_again(bench: Bench) -> None:
    """A dead letter does not keep its policy; once it lives again, it does."""
    await bench.store.put_policy(policy(), replace=False)
    dead = await bench.dead(1, policy_id="p")
    await bench.store.retry_now("acme", dead.id)

    assert PolicyWriteStatus.CONFLICT is await bench.store.delete_policy("acme", "p")
    await bench.store.cancel("acme", dead.id)
    assert PolicyWriteStatus.DONE is await bench.store.delete_policy("acme", "p")


# --- keys -----------------------------------------------------------------------------------------


def key(number: int, tenant: str = "acme", **fields: Any) -> ApiKey:
    """A key to keep."""
    return ApiKey(id=f"key{number}", tenant=tenant, digest=b"digest %d" % number, **fields)


@conforms
async def a_key_is_found_by_its_digest(bench: Bench) -> None:
    """With the name it was given and the time it was made; another digest finds nothing."""
    await bench.store.put_key(key(1, name="ci"))

    found = await bench.store.find_key(b"digest 1")

    assert key(1, name="ci", created_at=NOON) == found
    assert await bench.store.find_key(b"digest 2") is None
    await bench.reopen()
    assert found == await bench.store.find_key(b"digest 1")


@conforms
async def a_revoked_key_says_so(bench: Bench) -> None:
    """It is still found, with the time it ended, which neither revoking nor writing again moves."""
    await bench.store.put_key(key(1))
    bench.clock.advance(5)

    assert await bench.store.revoke_key("key1")
    bench.clock.advance(5)
    assert await bench.store.revoke_key("key1")
    await bench.store.put_key(key(1, name="again"))

    assert key(1, created_at=NOON, revoked_at=NOON + 5) == await bench.store.find_key(b"digest 1")
    assert not await bench.store.revoke_key("unknown")


@conforms
async def keys_are_listed_by_tenant(bench: Bench) -> None:
    """Those of one tenant or all, the revoked too."""
    for number in range(3):
        await bench.store.put_key(key(number))
    await bench.store.put_key(key(3, "beta"))
    await bench.store.revoke_key("key1")

    async def ids(tenant: str | None = None) -> list[str]:
        return sorted(found.id for found in await bench.store.list_keys(tenant))

    assert ["key0", "key1", "key2"] == await ids("acme")
    assert ["key3"] == await ids("beta")
    assert ["key0", "key1", "key2", "key3"] == await ids()
    assert [] == await ids("nobody")
