"""Conformance: policies and API keys."""

from __future__ import annotations

from typing import Any

from tarry.service.model import ApiKeyRecord, PolicyVersion
from tarry.service.store import MAX_PAGE_BYTES, PolicyWriteStatus
from tests.service.stores.harness import (
    START_MS,
    StoreHarness,
    conformance_case,
    exhausted_result,
    task,
)


def new_policy(policy_id: str = "p", document: bytes = b'{"a":1}', **fields: Any) -> PolicyVersion:
    """Return a policy to write."""
    return PolicyVersion(
        **{"tenant": "acme", "version": 0, **fields}, id=policy_id, document=document
    )


@conformance_case
async def writing_a_policy_is_idempotent(harness: StoreHarness) -> None:
    """Writing the same document is UNCHANGED, and writing another one is a CONFLICT."""
    status, first = await harness.store.put_policy(new_policy(version=7), replace=False)
    assert PolicyWriteStatus.CREATED is status
    assert new_policy(version=1, created_at=START_MS) == first
    harness.clock.advance(5)

    for replace in (False, True):
        same = await harness.store.put_policy(new_policy(), replace=replace)
        assert (PolicyWriteStatus.UNCHANGED, first) == same
    other = await harness.store.put_policy(new_policy(document=b"{}"), replace=False)
    assert (PolicyWriteStatus.CONFLICT, first) == other
    assert first == await harness.store.get_policy("acme", "p")


@conformance_case
async def a_replaced_policy_is_a_new_version(harness: StoreHarness) -> None:
    """The newest version is read by default, and older versions can be read too."""
    _, first = await harness.store.put_policy(new_policy(), replace=True)
    harness.clock.advance(5)

    status, second = await harness.store.put_policy(new_policy(document=b"{}"), replace=True)

    assert PolicyWriteStatus.REPLACED is status
    assert new_policy(document=b"{}", version=2, created_at=START_MS + 5) == second
    await harness.reopen()
    assert second == await harness.store.get_policy("acme", "p")
    assert [first, second, None] == [
        await harness.store.get_policy("acme", "p", version) for version in (1, 2, 3)
    ]
    status, third = await harness.store.put_policy(new_policy(), replace=True)
    assert (PolicyWriteStatus.REPLACED, 3) == (status, third.version)


@conformance_case
async def policies_belong_to_a_tenant(harness: StoreHarness) -> None:
    """Two tenants may have policies with the same id; an unknown policy is None."""
    await harness.store.put_policy(new_policy(), replace=False)

    assert await harness.store.get_policy("beta", "p") is None
    assert await harness.store.get_policy("acme", "unknown") is None
    status, _ = await harness.store.put_policy(
        new_policy(tenant="beta", document=b"{}"), replace=False
    )
    assert PolicyWriteStatus.CREATED is status
    assert PolicyWriteStatus.DELETED is await harness.store.delete_policy("beta", "p")
    assert await harness.store.get_policy("acme", "p") is not None


@conformance_case
async def policies_are_listed_by_id(harness: StoreHarness) -> None:
    """Pages have the newest version of each policy, without gaps or duplicates."""
    ids = [f"p{number}" for number in range(7)]
    for policy_id in reversed(ids):
        await harness.store.put_policy(new_policy(policy_id), replace=False)
    await harness.store.put_policy(new_policy("p3", b"{}"), replace=True)
    await harness.store.put_policy(new_policy("p3", tenant="beta"), replace=True)

    for limit in (1, 3, 7, 100):
        found: list[PolicyVersion] = []
        cursor = None
        for _ in range(20):
            page = await harness.store.list_policies("acme", cursor=cursor, limit=limit)
            assert len(page.items) <= limit
            found += page.items
            cursor = page.cursor
            if cursor is None:
                break
        assert ids == [policy.id for policy in found]
        assert [1, 1, 1, 2, 1, 1, 1] == [policy.version for policy in found]


@conformance_case
async def pages_of_large_policies_are_short(harness: StoreHarness) -> None:
    """A page ends with the policy that reaches the limit in bytes, and the next page continues."""
    for policy_id in ("p0", "p1", "p2"):
        policy = new_policy(policy_id, bytes(MAX_PAGE_BYTES // 2))
        await harness.store.put_policy(policy, replace=False)

    first = await harness.store.list_policies("acme", limit=1000)
    second = await harness.store.list_policies("acme", cursor=first.cursor, limit=1000)

    assert ["p0", "p1"] == [policy.id for policy in first.items]
    assert (["p2"], None) == ([policy.id for policy in second.items], second.cursor)


@conformance_case
async def a_policy_in_use_is_not_deleted(harness: StoreHarness) -> None:
    """Deleting a policy of a PENDING or IN_FLIGHT task is a CONFLICT."""
    await harness.store.put_policy(new_policy(), replace=False)
    await harness.store.put_policy(new_policy(document=b"{}"), replace=True)
    await harness.add(task(1, policy_id="p"), task(2, tenant="beta", policy_id="other"))
    assert PolicyWriteStatus.CONFLICT is await harness.store.delete_policy("acme", "p")
    claimed = (await harness.claim()).tasks
    leased = next(task for task in claimed if task.tenant == "acme")
    assert PolicyWriteStatus.CONFLICT is await harness.store.delete_policy("acme", "p")
    await harness.store.finish([exhausted_result(leased)])

    assert PolicyWriteStatus.DELETED is await harness.store.delete_policy("acme", "p")

    assert await harness.store.get_policy("acme", "p") is None
    assert await harness.store.get_policy("acme", "p", 1) is None
    assert PolicyWriteStatus.MISSING is await harness.store.delete_policy("acme", "p")
    assert [] == (await harness.store.list_policies("acme")).items


@conformance_case
async def a_deleted_version_number_is_not_used_again(harness: StoreHarness) -> None:
    """A policy that is created again has a new version number."""
    await harness.store.put_policy(new_policy(), replace=False)
    await harness.store.put_policy(new_policy(document=b"{}"), replace=True)
    await harness.store.delete_policy("acme", "p")
    await harness.reopen()

    status, recreated = await harness.store.put_policy(new_policy(), replace=False)

    assert (PolicyWriteStatus.CREATED, 3) == (status, recreated.version)
    assert [None, None, recreated, None] == [
        await harness.store.get_policy("acme", "p", version) for version in (1, 2, 3, 4)
    ]
    await harness.store.delete_policy("acme", "p")
    _, repeated = await harness.store.put_policy(new_policy(), replace=True)
    assert 4 == repeated.version


@conformance_case
async def a_revived_dead_letter_uses_its_policy_again(harness: StoreHarness) -> None:
    """A dead letter does not prevent the deletion of its policy; a revived one does."""
    await harness.store.put_policy(new_policy(), replace=False)
    dead = await harness.add_dead_letter(1, policy_id="p")
    await harness.store.retry_now("acme", dead.id)

    assert PolicyWriteStatus.CONFLICT is await harness.store.delete_policy("acme", "p")
    await harness.store.cancel("acme", dead.id)
    assert PolicyWriteStatus.DELETED is await harness.store.delete_policy("acme", "p")


# --- API keys -------------------------------------------------------------------------------------


def new_key(number: int, tenant: str = "acme", **fields: Any) -> ApiKeyRecord:
    """Return an API key to store."""
    return ApiKeyRecord(id=f"key{number}", tenant=tenant, digest=b"digest %d" % number, **fields)


@conformance_case
async def a_key_is_found_by_its_digest(harness: StoreHarness) -> None:
    """A key is found with its name and creation time; an unknown digest returns None."""
    await harness.store.put_api_key(new_key(1, name="ci"))

    found = await harness.store.find_api_key(b"digest 1")

    assert new_key(1, name="ci", created_at=START_MS) == found
    assert await harness.store.find_api_key(b"digest 2") is None
    await harness.reopen()
    assert found == await harness.store.find_api_key(b"digest 1")


@conformance_case
async def a_revoked_key_has_its_time_of_revocation(harness: StoreHarness) -> None:
    """A revoked key is found; revoking or storing it again does not change the time."""
    await harness.store.put_api_key(new_key(1))
    harness.clock.advance(5)

    assert await harness.store.revoke_api_key("key1")
    harness.clock.advance(5)
    assert await harness.store.revoke_api_key("key1")
    await harness.store.put_api_key(new_key(1, name="other"))

    assert new_key(
        1, created_at=START_MS, revoked_at=START_MS + 5
    ) == await harness.store.find_api_key(b"digest 1")
    assert not await harness.store.revoke_api_key("unknown")


@conformance_case
async def keys_are_listed_by_tenant(harness: StoreHarness) -> None:
    """Keys of one tenant or of all tenants are listed, including revoked keys."""
    for number in range(3):
        await harness.store.put_api_key(new_key(number))
    await harness.store.put_api_key(new_key(3, "beta"))
    await harness.store.revoke_api_key("key1")

    async def key_ids(tenant: str | None = None) -> list[str]:
        return sorted(found.id for found in await harness.store.list_api_keys(tenant))

    assert ["key0", "key1", "key2"] == await key_ids("acme")
    assert ["key3"] == await key_ids("beta")
    assert ["key0", "key1", "key2", "key3"] == await key_ids()
    assert [] == await key_ids("unknown")
