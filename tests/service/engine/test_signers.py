"""Signing secrets: each tenant signs with its own, also while they are replaced."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from cryptography.fernet import Fernet

from tarry.errors import StoreUnavailable
from tarry.service.delivery import DeliveryRequest
from tarry.service.delivery.signing import Signer
from tarry.service.encryption import Codec
from tarry.service.model import PolicyVersion, SigningSecretRecord, Status, TaskContent
from tarry.service.records.signing_secrets import (
    delete_signing_secret,
    list_signing_secrets,
    put_signing_secret,
)
from tarry.service.store import RecordAddress, StoredRecord
from tests.service.engine.harness import EPOCH_S, EngineHarness, FakeTarget
from tests.service.stores.reference_store import ReferenceStore

LANE = "http:a.example:80"
OWN, OLD, NEW, SHARED = (
    f"whsec_{b64encode(name.encode() * 8).decode()}" for name in ("own-", "old-", "new-", "all-")
)


class SecretHarness(EngineHarness):
    """An engine whose target records the requests."""

    def __init__(self, **options: Any) -> None:
        self.codec: Codec = options.setdefault("codec", Codec())
        super().__init__(FakeTarget(), **options)
        self.next_number = 1

    async def put(
        self, secret: str, *, tenant: str = "default", lane: str | None = None, expire_ms: int = 0
    ) -> str:
        """Store a secret as the API does; return its id."""
        record = SigningSecretRecord(
            tenant=tenant,
            id=f"secret {self.next_number}",
            lane=None if lane is None else f"{tenant}/{lane}",
            secret=self.codec.encrypt_secret(secret),
        )
        self.next_number += 1
        await put_signing_secret(self.store, record, expire_previous_ms=expire_ms)
        self.engine.signers.invalidate(tenant)
        return record.id

    async def deliver(self, url: str = "http://a.example:80/", **changes: Any) -> DeliveryRequest:
        """Add a task, and return the request that the target has received."""
        await self.add(self.new_task(url, **changes))
        await asyncio.sleep(1)
        request: DeliveryRequest = self.context.delivery_client.requests[-1]  # type: ignore[attr-defined]
        return request


def signatures(request: DeliveryRequest) -> list[str]:
    """Return the signatures of a request; none without the header."""
    return dict(request.headers).get("webhook-signature", "").split()


def sign(request: DeliveryRequest, *secrets: str) -> list[str]:
    """Return the signatures that these secrets give for a request."""
    headers = dict(request.headers)
    timestamp = int(headers["webhook-timestamp"])
    signed = Signer(secrets).headers(headers["webhook-id"], timestamp, request.body)
    return dict(signed)["webhook-signature"].split()


async def test_tenants_sign_with_their_own_secrets() -> None:
    """Two tenants with the same target have different signatures; a third has none."""
    harness = SecretHarness()
    await harness.engine.start()
    await harness.put(OLD, tenant="ann")
    await harness.put(NEW, tenant="bob")
    of_ann = await harness.deliver(tenant="ann")
    of_bob = await harness.deliver(tenant="bob")
    assert sign(of_ann, OLD) == signatures(of_ann)
    assert sign(of_bob, NEW) == signatures(of_bob)
    assert [] == signatures(await harness.deliver(tenant="eve"))
    await harness.engine.stop(1)


async def test_secret_of_a_lane_replaces_that_of_the_tenant() -> None:
    """A lane with its own secret does not sign with the tenant's."""
    harness = SecretHarness()
    await harness.engine.start()
    await harness.put(OLD)
    await harness.put(OWN, lane=LANE)
    request = await harness.deliver()
    assert sign(request, OWN) == signatures(request)
    request = await harness.deliver("http://b.example:80/")
    assert sign(request, OLD) == signatures(request)
    await harness.engine.stop(1)


async def test_both_secrets_sign_until_the_old_one_expires() -> None:
    """A replaced secret signs until it expires; the signature of the new secret comes first."""
    harness = SecretHarness()
    await harness.engine.start()
    await harness.put(OLD)
    new_id = await harness.put(NEW, expire_ms=3_600_000)
    request = await harness.deliver()
    assert sign(request, NEW, OLD) == signatures(request)
    await asyncio.sleep(3_598)
    request = await harness.deliver()
    assert sign(request, NEW, OLD) == signatures(request)
    await asyncio.sleep(2)
    request = await harness.deliver()
    assert sign(request, NEW) == signatures(request)
    await delete_signing_secret(harness.store, "default", new_id)
    harness.engine.signers.invalidate("default")
    assert [] == signatures(await harness.deliver())
    await harness.engine.stop(1)


async def test_changes_by_another_process_are_used_within_seconds() -> None:
    """The secrets are loaded again while tasks of the tenant are sent."""
    harness = SecretHarness()
    await harness.engine.start()
    assert [] == signatures(await harness.deliver())
    record = SigningSecretRecord(tenant="default", id="s", secret=NEW.encode())
    await put_signing_secret(harness.store, record, expire_previous_ms=0)
    for _ in range(6):
        await harness.deliver()
    request = await harness.deliver()
    assert sign(request, NEW) == signatures(request)
    await delete_signing_secret(harness.store, "default", "s")
    await asyncio.sleep(10)  # without tasks of the tenant
    assert [] == signatures(await harness.deliver())
    await harness.engine.stop(1)


async def test_secrets_of_the_settings_sign_for_the_default_tenant_only() -> None:
    """Secrets of the settings sign in lanes for which the tenant has no secret in the store."""
    harness = SecretHarness(signing_secrets=[SHARED])
    await harness.engine.start()
    await harness.put(OWN, lane=LANE)
    request = await harness.deliver()
    assert sign(request, OWN) == signatures(request)
    request = await harness.deliver("http://b.example:80/")
    assert sign(request, SHARED) == signatures(request)
    assert [] == signatures(await harness.deliver(tenant="ann"))
    await harness.engine.stop(1)


async def test_task_is_not_sent_unsigned_while_the_store_is_unavailable() -> None:
    """The task waits until the secrets can be read. Secrets that were read before are used."""

    class UnreadableStore(ReferenceStore):
        is_readable = False

        read_count = 0

        async def read_records(
            self, addresses: Sequence[RecordAddress]
        ) -> tuple[int, list[StoredRecord | None]]:
            self.read_count += 1
            if not self.is_readable:
                raise StoreUnavailable("unavailable")
            return await super().read_records(addresses)

        async def get_policy(
            self, tenant: str, policy_id: str, version: int | None = None
        ) -> PolicyVersion | None:
            if not self.is_readable:
                raise StoreUnavailable("unavailable")
            return await super().get_policy(tenant, policy_id, version)

    loop = asyncio.get_running_loop()
    store = UnreadableStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    harness = SecretHarness(store=store)
    await harness.engine.start()
    store.is_readable = True
    await harness.put(OWN)
    store.is_readable = False
    [task] = await harness.add(harness.new_task())
    await asyncio.sleep(5)
    assert [] == harness.context.delivery_client.requests  # type: ignore[attr-defined]
    store.is_readable = True
    await asyncio.sleep(5)
    [request] = harness.context.delivery_client.requests  # type: ignore[attr-defined]
    assert sign(request, OWN) == signatures(request)
    assert Status.SUCCEEDED is (await harness.get_task(task)).status
    store.is_readable = False
    await asyncio.sleep(60)
    store.read_count = 0
    request = await harness.deliver()
    assert sign(request, OWN) == signatures(request)
    assert store.read_count <= 2
    await harness.engine.stop(1)


async def test_task_is_not_sent_unsigned_without_the_encryption_key() -> None:
    """The task waits, no attempt is counted, and the health check names the encryption."""
    harness = SecretHarness()
    await harness.engine.start()
    harness.codec = Codec([Fernet.generate_key().decode()])
    await harness.put(OWN)
    [record] = await list_signing_secrets(harness.store, "default")
    assert OWN.encode() not in record.secret
    [task] = await harness.add(harness.new_task())
    await asyncio.sleep(200)
    assert [] == harness.context.delivery_client.requests  # type: ignore[attr-defined]
    waiting = await harness.get_task(task)
    assert (Status.PENDING, 0, 0) == (waiting.status, waiting.attempts, waiting.lost_attempts)
    assert {"encryption"} == set(harness.context.health.failing)
    await harness.engine.stop(1)


async def test_stored_body_is_signed() -> None:
    """A large body is signed, also if the secret is replaced while the body is read."""

    async def read_body(_: TaskContent) -> bytes:
        await harness.put(NEW)
        return b"large"

    harness = SecretHarness(read_body=read_body)
    await harness.engine.start()
    await harness.put(OLD)
    request = await harness.deliver(body_ref="ref")
    assert (b"large", sign(request, OLD)) == (request.body, signatures(request))
    await harness.engine.stop(1)


async def test_waiting_tasks_share_one_load() -> None:
    """The policy and the secrets are read once, however many tasks of a tenant wait for them."""

    class SlowStore(ReferenceStore):
        secret_reads = policy_reads = 0

        async def read_records(
            self, addresses: Sequence[RecordAddress]
        ) -> tuple[int, list[StoredRecord | None]]:
            self.secret_reads += 1
            await asyncio.sleep(0.1)
            return await super().read_records(addresses)

        async def get_policy(
            self, tenant: str, policy_id: str, version: int | None = None
        ) -> PolicyVersion | None:
            self.policy_reads += 1
            await asyncio.sleep(0.1)
            return await super().get_policy(tenant, policy_id, version)

    loop = asyncio.get_running_loop()
    store = SlowStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    harness = SecretHarness(store=store)
    await harness.engine.start()
    await harness.put(OWN)
    store.secret_reads = 0
    await harness.add(*(harness.new_task() for _ in range(50)))
    await asyncio.sleep(0.9)
    requests = harness.context.delivery_client.requests  # type: ignore[attr-defined]
    assert 50 == len(requests)
    assert all(sign(request, OWN) == signatures(request) for request in requests)
    assert (1, 1) == (store.secret_reads, store.policy_reads)
    await harness.engine.stop(1)
