"""Authentication by API key, and the check of the `Host` header."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.api.auth import ApiKeyCache, api_key_digest, check_tenant, make_api_key
from tarry.service.api.roles import Role
from tarry.service.model import ApiKeyRecord
from tarry.service.records.api_keys import put_api_key, revoke_api_key
from tarry.service.store import RecordAddress, StoredRecord, StoreLost
from tests.service.api.harness import TARGET, ApiHarness, Response
from tests.service.stores.reference_store import ReferenceStore

HOSTS = frozenset({"127.0.0.1", "Tarry.Internal", "fd00::1"})


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8080",
        "127.0.0.1",
        "127.8.8.8:1",
        "localhost:8080",
        "LOCALHOST.",
        "[::1]:8080",
        "[::1]",
        "tarry.internal:80",
        "tarry.internal.",
        "[fd00::1]:8080",
    ],
)
async def test_loopback_and_allowed_hosts_are_accepted(host: str) -> None:
    """Loopback names and the configured host names are accepted in any case, with any port."""
    api = ApiHarness(hosts=HOSTS)
    for path in ("/retry-tasks", "/retry-tasks", "/metrics", "/healthz"):
        assert 200 == (await api.request("GET", path, lines=[(b"host", host.encode())])).status


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8080",
        "evil.example",
        "127.0.0.1.evil.example:8080",
        "localhost.evil.example",
        "127.0.0.1@evil.example",
        "10.0.0.1:8080",
        "[fd00::2]:8080",
        "2130706433",
        "",
        "\xff",
    ],
)
async def test_other_hosts_are_rejected(host: str) -> None:
    """Reads and writes get a 421 that names the setting, which prevents DNS rebinding."""
    api = ApiHarness(hosts=HOSTS)
    lines = [(b"host", host.encode("latin-1"))]
    for path in ("/retry-tasks", "/downstreams", "/metrics", "/readyz", "/docs"):
        rejected = await api.request("GET", path, lines=lines)
        assert (421, "/docs#problem-wrong-host") == (rejected.status, rejected.problem["type"])
        assert "allow_host" in rejected.problem["detail"]
    same_origin = [(b"origin", b"http://" + lines[0][1]), *lines]
    rejected = await api.request("POST", "/retry-tasks", {"targetUrl": TARGET}, lines=same_origin)
    assert (421, 0) == (rejected.status, await api.count_tasks())


async def create_key(api: ApiHarness, tenant: str) -> tuple[str, ApiKeyRecord]:
    """Store a new key and return the secret and its record."""
    secret, key = make_api_key(tenant, f"id-{tenant}")
    await put_api_key(api.store, key)
    return secret, key


def test_only_the_digest_of_a_random_key_is_stored() -> None:
    """The record of a key does not contain the key."""
    first, key = make_api_key("acme", "1", "ci")
    second, _ = make_api_key("acme", "2")
    assert first != second
    assert first.startswith("tarry_")
    assert (api_key_digest(first), "acme", "ci") == (key.digest, key.tenant, key.name)
    assert first not in repr(key)


@pytest.mark.parametrize("tenant", ["", "a/b", "ü", ".x", "x" * 64, "a\n"])
def test_invalid_tenant_name_is_rejected(tenant: str) -> None:
    """A tenant name is 1 to 63 of A-Z a-z 0-9 . _ - and begins with a letter or digit."""
    with pytest.raises(ConfigurationError, match="tenant must be"):
        check_tenant(tenant)


async def test_a_missing_key_is_401() -> None:
    """All paths except health, documentation and dashboard files return 401 with a challenge."""
    api = ApiHarness(keys=True)
    paths = ["/retry-tasks", "/dead-letters", "/retry-policies", "/downstreams", "/events"]
    for path in [*paths, "/metrics", "/retry-tasks/x"]:
        response = await api.request("GET", path)
        assert (401, 'Bearer realm="tarry"') == (
            response.status,
            response.header("www-authenticate"),
        )
    for path in ("/", "/dashboard/main.js", "/healthz", "/readyz", "/docs", "/openapi.json"):
        assert 200 == (await api.request("GET", path)).status
    assert 401 == (await api.request("POST", "/retry-tasks", {"targetUrl": TARGET})).status
    assert 0 == await api.count_tasks()


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer nonsense"},
        {"Authorization": "Basic {}"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer {}x"},
        {"X-API-Key": "\xff"},
        {"X-API-Key": "x" * 5000},
        {"Authorization": "Basic x", "X-API-Key": "{}"},
    ],
)
async def test_an_invalid_key_is_401(headers: dict[str, str]) -> None:
    """Unknown, malformed and overlong keys are rejected."""
    api = ApiHarness(keys=True)
    secret, _ = await create_key(api, "acme")
    sent_headers = {name: value.replace("{}", secret) for name, value in headers.items()}
    assert 401 == (await api.request("GET", "/retry-tasks", headers=sent_headers)).status


async def test_two_different_keys_are_401() -> None:
    """Different keys in both headers are rejected, the same key is accepted."""
    api = ApiHarness(keys=True)
    one, other = (await create_key(api, "acme"))[0], (await create_key(api, "shop"))[0]
    both = {"Authorization": f"Bearer {one}", "X-API-Key": other}
    response = await api.request("GET", "/retry-tasks", headers=both)
    assert 401 == response.status
    assert "Authorization and X-API-Key do not have the same key" in response.problem["detail"]
    same = await api.request("GET", "/retry-tasks", headers={**both, "X-API-Key": one})
    assert 200 == same.status


@pytest.mark.parametrize("failure", ["hangs", "fails"])
async def test_metrics_need_no_store_for_a_known_key(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store does not respond, a key that was valid an hour ago can read the metrics."""
    monkeypatch.setattr("tarry.service.api.auth._MAX_STORE_WAIT_S", 0.0)

    async def read_records(_store: ReferenceStore, _addresses: Sequence[RecordAddress]) -> None:
        if failure == "fails":
            raise StoreUnavailable("connection refused")
        await asyncio.Event().wait()

    api = ApiHarness(keys=True)
    known, other = (await create_key(api, "acme"))[0], (await create_key(api, "shop"))[0]
    headers, other_headers = {"X-API-Key": known}, {"X-API-Key": other}
    with monkeypatch.context() as patch:
        patch.setattr("tarry.service.api.auth._MAX_STORE_WAIT_S", 60.0)
        assert 200 == (await api.request("GET", "/metrics", headers=headers)).status
    monkeypatch.setattr(ReferenceStore, "read_records", read_records)
    api.time.ms += 3_600_000
    response = await api.request("GET", "/metrics", headers=headers)
    assert (200, b"of acme\n") == (response.status, response.body)
    assert 503 == (await api.request("GET", "/metrics", headers=other_headers)).status
    api.time.ms += 5_001
    assert 503 == (await api.request("GET", "/metrics", headers=headers)).status


@pytest.mark.parametrize(
    "header", ["Authorization", "X-API-Key", "Content-Type", "Host", "Sec-Fetch-Site"]
)
async def test_a_repeated_header_is_400(header: str) -> None:
    """Repeated headers are rejected even if equal, because a proxy may have read the other one."""
    api = ApiHarness(keys=True)
    secret, _ = await create_key(api, "ann")
    values = {"Authorization": f"Bearer {secret}", "X-API-Key": secret}
    line = (header.lower().encode(), values.get(header, "application/json").encode())
    for other in (line, (line[0], b"other")):
        for lines in ([line, other], [other, line]):
            response = await api.request("GET", "/retry-tasks", lines=lines)
            assert (400, header) == (response.status, response.problem["field"])


@pytest.mark.parametrize(
    "header", ["Authorization: Bearer {}", "authorization: bearer  {}", "X-API-Key: {}"]
)
async def test_a_valid_key_is_accepted(header: str) -> None:
    """A key can be sent as a bearer token or in the X-API-Key header."""
    api = ApiHarness(keys=True)
    secret, _ = await create_key(api, "acme")
    name, _, value = header.replace("{}", secret).partition(": ")
    assert 200 == (await api.request("GET", "/retry-tasks", headers={name: value})).status


async def test_resources_of_other_tenants_are_not_visible() -> None:
    """Tasks, policies, lanes and replays of another tenant are 404 and in no list."""
    api = ApiHarness(keys=True)
    one, _ = await create_key(api, "acme")
    other, _ = await create_key(api, "umbrella")

    async def request(secret: str, method: str, path: str, document: object = None) -> Response:
        return await api.request(method, path, document, headers={"X-API-Key": secret})

    task = (await request(one, "POST", "/retry-tasks", {"targetUrl": TARGET})).json
    await request(one, "PUT", "/retry-policies/mine", {})
    replay = (await request(one, "POST", "/dead-letters/replays", {"all": True})).json["replayId"]
    task_path = f"/retry-tasks/{task['taskId']}"
    requests = [
        ("GET", task_path),
        ("DELETE", task_path),
        ("GET", f"{task_path}/attempts"),
        ("GET", f"{task_path}/explain"),
        ("POST", f"{task_path}/retry"),
        ("GET", "/retry-policies/mine"),
        ("DELETE", "/retry-policies/mine"),
        ("GET", "/downstreams/https:example.com:443"),
        ("GET", "/downstreams/acme/https:example.com:443"),
        ("GET", f"/dead-letters/replays/{replay}"),
        ("DELETE", f"/dead-letters/replays/{replay}"),
    ]
    for method, path in requests:
        assert 404 == (await request(other, method, path)).status, path
    for path in ("/retry-tasks", "/downstreams", "/dead-letters/replays"):
        assert [] == (await request(other, "GET", path)).json["items"]
    # A lane of the same name can be paused, but it belongs to the tenant that paused it.
    pause_path = "/downstreams/https:example.com:443/pause"
    assert 404 == (await request(other, "POST", pause_path)).status
    assert 200 == (await request(other, "POST", f"{pause_path}?create=true")).status
    pause_path = "/downstreams/acme/https:example.com:443/pause"
    assert 422 == (await request(other, "POST", pause_path)).status
    assert task == (await request(one, "GET", task_path)).json
    assert "ACTIVE" == (await request(one, "GET", "/downstreams")).json["items"][0]["state"]


async def test_idempotency_keys_are_scoped_to_a_tenant() -> None:
    """Two tenants can use the same idempotency key."""
    api = ApiHarness(keys=True)
    document = {"targetUrl": TARGET, "idempotencyKey": "k"}
    secrets = [(await create_key(api, tenant))[0] for tenant in ("acme", "umbrella")]
    responses = [
        await api.request("POST", "/retry-tasks", document, headers={"X-API-Key": secret})
        for secret in (*secrets, *secrets)
    ]
    assert [201, 201, 200, 200] == [response.status for response in responses]


async def test_lookups_are_cached_for_a_few_seconds(api: ApiHarness) -> None:
    """A created or revoked key takes effect when the cached lookup has expired."""
    lookups: list[bytes] = []
    read_records = api.store.read_records

    async def record_lookup(
        addresses: Sequence[RecordAddress],
    ) -> tuple[int, list[StoredRecord | None]]:
        lookups.extend(bytes.fromhex(address.key) for address in addresses)
        return await read_records(addresses)

    api.store.read_records = record_lookup  # type: ignore[method-assign]
    keys = ApiKeyCache(api.store, api.time.seconds)
    secret, key = make_api_key("acme", "1")
    assert [None, None] == [await keys.find(secret) for _ in range(2)]
    await put_api_key(api.store, key)
    api.time.ms += 5_000
    assert [("acme", Role.ADMIN)] * 2 == [await keys.find(secret) for _ in range(2)]
    await revoke_api_key(api.store, "1")
    api.time.ms += 5_000
    assert [None, None] == [await keys.find(secret) for _ in range(2)]
    assert 3 + 2 == len(lookups)  # the creation and the revocation read the key, too


async def test_the_key_cache_is_bounded(api: ApiHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid keys have their own limit, so they do not evict valid keys."""
    monkeypatch.setattr("tarry.service.api.auth._MAX_CACHED_API_KEYS", 10)

    secret, _ = await create_key(api, "acme")
    keys = ApiKeyCache(api.store, api.time.seconds)
    await keys.find(secret)
    await asyncio.gather(*(keys.find(f"wrong {i}") for i in range(50)))
    assert (1, 10) == (len(keys._valid_keys), len(keys._invalid_keys))


@pytest.mark.parametrize(("operator", "returned"), [("", b"of acme\n"), ("acme", b"of all\n")])
async def test_only_the_operator_reads_the_metrics_of_all_tenants(
    operator: str, returned: bytes
) -> None:
    api = ApiHarness(keys=True, operator=operator)
    secret, _ = await create_key(api, "acme")
    response = await api.request("GET", "/metrics", headers={"X-API-Key": secret})
    assert returned == response.body


async def test_keys_stay_valid_while_only_their_partition_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tenants of other partitions are served; without the partition's data, requests get 503."""
    calls = 0
    error: StoreUnavailable | None = StoreUnavailable("connection refused")

    async def read_records(_store: ReferenceStore, _addresses: Sequence[RecordAddress]) -> None:
        nonlocal calls
        calls += 1
        if error is not None:
            raise error
        await asyncio.Event().wait()

    api = ApiHarness(keys=True)
    known, other = (await create_key(api, "acme"))[0], (await create_key(api, "shop"))[0]
    headers = {"X-API-Key": known}
    assert 200 == (await api.request("GET", "/retry-tasks", headers=headers)).status
    monkeypatch.setattr(ReferenceStore, "read_records", read_records)
    monkeypatch.setattr(ReferenceStore, "partition_count", 2)
    monkeypatch.setattr("tarry.service.api.auth._MAX_STORE_WAIT_S", 0.02)
    response = await api.request("GET", "/retry-tasks", headers={"X-API-Key": other})
    assert (503, 1) == (response.status, calls)
    for failure in (StoreUnavailable("connection refused"), None):
        api.time.ms += 60_000
        calls, error = 0, failure
        for _ in range(3):
            assert 200 == (await api.request("GET", "/retry-tasks", headers=headers)).status
        assert 1 == calls  # the others do not wait for a partition that hangs
    api.time.ms += 60_000
    error = StoreLost("the partition is empty")
    assert 503 == (await api.request("GET", "/retry-tasks", headers=headers)).status
    api.time.ms += 3_600_000
    error = StoreUnavailable("connection refused")
    assert 503 == (await api.request("GET", "/retry-tasks", headers=headers)).status


async def test_a_revoked_key_is_rejected_after_a_slow_lookup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lookup continues when a request no longer waits for it, and its result is used."""
    monkeypatch.setattr(ReferenceStore, "partition_count", 2)
    monkeypatch.setattr("tarry.service.api.auth._MAX_STORE_WAIT_S", 0.02)

    api = ApiHarness(keys=True)
    secret, key = await create_key(api, "acme")
    headers = {"X-API-Key": secret}
    assert 200 == (await api.request("GET", "/retry-tasks", headers=headers)).status
    await revoke_api_key(api.store, key.id)
    read_records, may_end = ReferenceStore.read_records, asyncio.Event()

    async def read_slowly(
        store: ReferenceStore, addresses: Sequence[RecordAddress]
    ) -> tuple[int, list[StoredRecord | None]]:
        await may_end.wait()
        return await read_records(store, addresses)

    monkeypatch.setattr(ReferenceStore, "read_records", read_slowly)
    api.time.ms += 60_000
    assert 200 == (await api.request("GET", "/retry-tasks", headers=headers)).status
    may_end.set()
    await asyncio.sleep(0.01)
    assert 401 == (await api.request("GET", "/retry-tasks", headers=headers)).status


async def test_one_request_at_a_time_waits_for_the_partition_of_the_keys(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others continue at once with the last known tenant, until a lookup has succeeded."""
    responds = asyncio.Event()
    lookups: list[bytes] = []
    read_records = api.store.read_records

    async def read_when_available(
        addresses: Sequence[RecordAddress],
    ) -> tuple[int, list[StoredRecord | None]]:
        lookups.extend(bytes.fromhex(address.key) for address in addresses)
        await responds.wait()
        return await read_records(addresses)

    keys = ApiKeyCache(api.store, api.time.seconds)
    secrets = [(await create_key(api, tenant))[0] for tenant in ("acme", "shop", "bank")]
    known = [await keys.find(secret) for secret in secrets]
    monkeypatch.setattr(ReferenceStore, "partition_count", 2)
    monkeypatch.setattr("tarry.service.api.auth._MAX_STORE_WAIT_S", 0.0)
    api.store.read_records = read_when_available  # type: ignore[method-assign]
    for expected in (3, 1, 1):
        lookups.clear()
        api.time.ms += 60_000
        assert known == await asyncio.gather(*map(keys.find, secrets))
        assert expected == len(lookups)

    monkeypatch.setattr("tarry.service.api.auth._MAX_STORE_WAIT_S", 60.0)
    responds.set()
    lookups.clear()
    api.time.ms += 2_000
    assert known == [await keys.find(secret) for secret in secrets]
    assert 3 == len(lookups)
