"""Conformance: policies, API keys and signing secrets."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from tarry.service.model import ApiKeyRecord, PolicyVersion, SigningSecretRecord
from tarry.service.records import signing_secrets
from tarry.service.records.api_keys import find_api_key, list_api_keys, put_api_key, revoke_api_key
from tarry.service.records.signing_secrets import (
    MAX_LANE_SIGNING_SECRETS,
    delete_signing_secret,
    list_signing_secrets,
    put_signing_secret,
)
from tarry.service.store import MAX_PAGE_BYTES, POLICY_RETENTION_MS, PolicyWriteStatus, Retention
from tests.service.stores.harness import (
    HOUR_MS,
    START_MS,
    StoreHarness,
    conformance_case,
    exhausted_result,
    task,
    task_id,
)

FEW_SIGNING_SECRETS = 20


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
async def replaced_versions_are_swept_unless_tasks_use_them(harness: StoreHarness) -> None:
    """A replaced version stays for a day, and longer if it is the version of a stored task."""
    store = harness.store
    for document in (b"1", b"2", b"3", b"4"):
        await store.put_policy(new_policy(document=document), replace=True)
    await harness.add(task(1, policy_id="p", policy_version=2), task(2, policy_id="p"))
    await store.put_policy(new_policy(tenant="beta"), replace=True)

    async def sweep_and_list() -> list[int]:
        while (await store.sweep(Retention(0, 0), 1)).has_more:
            pass
        found = [await store.get_policy("acme", "p", version) for version in range(1, 6)]
        return [policy.version for policy in found if policy is not None]

    assert [1, 2, 3, 4] == await sweep_and_list()
    harness.clock.advance(POLICY_RETENTION_MS - 1)
    assert [1, 2, 3, 4] == await sweep_and_list()
    await store.put_policy(new_policy(document=b"5"), replace=True)
    harness.clock.advance(1)
    await harness.reopen()
    store = harness.store
    assert [2, 4, 5] == await sweep_and_list()
    for number in (1, 2):
        await store.cancel("acme", task_id(number))
    assert [4, 5] == await sweep_and_list()
    harness.clock.advance(POLICY_RETENTION_MS)
    assert [5] == await sweep_and_list()
    assert await store.get_policy("beta", "p", 1) is not None


@conformance_case
async def a_quota_limits_policy_versions_per_tenant(harness: StoreHarness) -> None:
    """A new version above the quota is not written; an unchanged policy needs no quota."""
    store = harness.store
    await store.put_policy(new_policy(document=b"1"), replace=True, quota=2)
    _, second = await store.put_policy(new_policy(document=b"2"), replace=True, quota=2)

    for policy_id, expected in (("p", second), ("q", new_policy("q", b"3"))):
        policy = new_policy(policy_id, b"3")
        assert (PolicyWriteStatus.OVER_QUOTA, expected) == await store.put_policy(
            policy, replace=True, quota=2
        )
    unchanged, _ = await store.put_policy(new_policy(document=b"2"), replace=True, quota=2)
    other, _ = await store.put_policy(new_policy(tenant="beta"), replace=True, quota=2)
    assert [PolicyWriteStatus.UNCHANGED, PolicyWriteStatus.CREATED] == [unchanged, other]
    assert await store.get_policy("acme", "q") is None
    harness.clock.advance(POLICY_RETENTION_MS)
    await store.sweep(Retention(0, 0), 10)
    status, third = await store.put_policy(new_policy(document=b"3"), replace=True, quota=2)
    assert (PolicyWriteStatus.REPLACED, 3) == (status, third.version)


@conformance_case
async def numbers_of_a_deleted_policy_are_kept_while_tasks_refer_to_it(
    harness: StoreHarness,
) -> None:
    """Version numbers are used again only after the last task of the policy was deleted."""
    store = harness.store

    async def recreate() -> int:
        await store.sweep(Retention(HOUR_MS, HOUR_MS), 10)
        _, policy = await store.put_policy(new_policy(), replace=False)
        assert PolicyWriteStatus.DELETED is await store.delete_policy("acme", "p")
        return policy.version

    assert 1 == await recreate()
    await harness.add(task(1, policy_id="p"))
    await store.cancel("acme", task_id(1))
    assert [2, 3] == [await recreate(), await recreate()]
    harness.clock.advance(HOUR_MS)
    assert 1 == await recreate()


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
async def a_replayed_dead_letter_uses_its_policy_again(harness: StoreHarness) -> None:
    """A dead letter does not prevent the deletion of its policy; a replayed one does."""
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
    """A key is found with its name, role and creation time; an unknown digest returns None."""
    await put_api_key(harness.store, new_key(1, name="ci", role="read"))

    found = await find_api_key(harness.store, b"digest 1")

    assert new_key(1, name="ci", role="read", created_at=START_MS) == found
    assert await find_api_key(harness.store, b"digest 2") is None
    await harness.reopen()
    assert found == await find_api_key(harness.store, b"digest 1")


@conformance_case
async def a_revoked_key_has_its_time_of_revocation(harness: StoreHarness) -> None:
    """A revoked key is found; revoking or storing it again does not change the time."""
    await put_api_key(harness.store, new_key(1))
    harness.clock.advance(5)

    assert await revoke_api_key(harness.store, "key1")
    harness.clock.advance(5)
    assert await revoke_api_key(harness.store, "key1")
    await put_api_key(harness.store, new_key(1, name="other"))

    assert new_key(1, created_at=START_MS, revoked_at=START_MS + 5) == await find_api_key(
        harness.store, b"digest 1"
    )
    assert not await revoke_api_key(harness.store, "unknown")


@conformance_case
async def keys_are_listed_by_tenant(harness: StoreHarness) -> None:
    """Keys of one tenant or of all tenants are listed, including revoked keys."""
    for number in range(3):
        await put_api_key(harness.store, new_key(number))
    await put_api_key(harness.store, new_key(3, "beta"))
    await revoke_api_key(harness.store, "key1")

    async def key_ids(tenant: str | None = None) -> list[str]:
        return sorted(found.id for found in await list_api_keys(harness.store, tenant))

    assert ["key0", "key1", "key2"] == await key_ids("acme")
    assert ["key3"] == await key_ids("beta")
    assert ["key0", "key1", "key2", "key3"] == await key_ids()
    assert [] == await key_ids("unknown")


# --- signing secrets ------------------------------------------------------------------------------


def new_secret(number: int, **fields: Any) -> SigningSecretRecord:
    """Return a signing secret to store."""
    values = {"tenant": "acme", "id": f"secret{number:04}", "secret": b"%d" % number, **fields}
    return SigningSecretRecord(**values)


@conformance_case
async def a_signing_secret_replaces_those_of_its_lane(harness: StoreHarness) -> None:
    """Earlier secrets of the same tenant and lane expire; those of others do not."""
    store = harness.store
    others = [new_secret(1, tenant="beta"), new_secret(2, lane="acme/a", public_key="whpk_x")]
    for secret in (new_secret(3), *others):
        await put_signing_secret(store, secret, expire_previous_ms=100)
    harness.clock.advance(5)

    stored = await put_signing_secret(store, new_secret(4), expire_previous_ms=100)
    repeated = await put_signing_secret(store, new_secret(4), expire_previous_ms=0)

    assert new_secret(4, created_at=START_MS + 5) == stored == repeated
    await harness.reopen()
    expected = [
        new_secret(4, created_at=START_MS + 5),
        new_secret(3, created_at=START_MS, expires_at=START_MS + 105),
        new_secret(2, lane="acme/a", public_key="whpk_x", created_at=START_MS),
    ]
    assert expected == await list_signing_secrets(harness.store, "acme")
    [of_beta] = await list_signing_secrets(harness.store, "beta")
    assert of_beta.expires_at is None
    assert [] == await list_signing_secrets(harness.store, "unknown")


@conformance_case
async def an_expired_signing_secret_is_not_listed(harness: StoreHarness) -> None:
    """A secret expires at the earliest time that any replacement has set, and is swept then."""
    store = harness.store
    for number, expire_previous_ms in ((1, 0), (2, 100), (3, 50), (4, 200)):
        secret = new_secret(number, lane="acme/a")
        await put_signing_secret(store, secret, expire_previous_ms=expire_previous_ms)

    async def list_numbers() -> list[int]:
        return [int(secret.secret) for secret in await list_signing_secrets(store, "acme")]

    assert [4, 3, 2, 1] == await list_numbers()
    harness.clock.advance(49)
    await store.sweep(Retention(1000, 1000), 10)
    assert [4, 3, 2, 1] == await list_numbers()
    harness.clock.advance(1)
    assert [4, 3] == await list_numbers()
    await store.sweep(Retention(1000, 1000), 10)
    assert not await delete_signing_secret(store, "acme", "secret0002")
    harness.clock.advance(150)
    assert [4] == await list_numbers()
    assert await put_signing_secret(store, new_secret(5, lane="acme/a"), expire_previous_ms=0)
    assert [5] == await list_numbers()


@conformance_case
async def a_signing_secret_is_deleted_by_its_tenant_only(harness: StoreHarness) -> None:
    """A secret of another tenant is missing."""
    await put_signing_secret(harness.store, new_secret(1), expire_previous_ms=0)

    assert not await delete_signing_secret(harness.store, "beta", "secret0001")
    assert 1 == len(await list_signing_secrets(harness.store, "acme"))
    assert await delete_signing_secret(harness.store, "acme", "secret0001")
    assert not await delete_signing_secret(harness.store, "acme", "secret0001")
    assert [] == await list_signing_secrets(harness.store, "acme")


@conformance_case
async def the_number_of_signing_secrets_is_limited(harness: StoreHarness) -> None:
    """A tenant and each lane have a maximum; a rejected secret does not let others expire."""
    store = harness.store
    # Each of 1,000 secrets would take 4 ms.
    with patch.object(signing_secrets, "MAX_SIGNING_SECRETS", FEW_SIGNING_SECRETS):
        for number in range(MAX_LANE_SIGNING_SECRETS):
            await put_signing_secret(store, new_secret(number), expire_previous_ms=100)
        before = await list_signing_secrets(store, "acme")
        assert await put_signing_secret(store, new_secret(9999), expire_previous_ms=0) is None
        assert before == await list_signing_secrets(store, "acme")
        for number in range(MAX_LANE_SIGNING_SECRETS, FEW_SIGNING_SECRETS):
            secret = new_secret(number, lane=f"acme/{number}")
            assert await put_signing_secret(store, secret, expire_previous_ms=100)
        secret = new_secret(9999, lane="acme/other")
        assert await put_signing_secret(store, secret, expire_previous_ms=0) is None
        await delete_signing_secret(store, "acme", "secret0015")
        assert await put_signing_secret(store, secret, expire_previous_ms=0)
