from __future__ import annotations

import asyncio

import pytest

from tarry.errors import ConfigurationError
from tarry.service.api.auth import ApiKeyCache, check_tenant, key_digest, make_key
from tarry.service.model import ApiKey
from tests.service.api.harness import TARGET, Reply, Rig, with_rig


async def key_for(rig: Rig, tenant: str) -> tuple[str, ApiKey]:
    """Make a key, and keep it."""
    secret, key = make_key(tenant, f"id-{tenant}")
    await rig.store.put_key(key)
    return secret, key


def test_a_key_is_random_and_kept_as_a_digest() -> None:
    """Nothing that is kept gives the key away."""
    first, key = make_key("acme", "1", "ci")
    second, _ = make_key("acme", "2")
    assert first != second
    assert first.startswith("tarry_")
    assert (key_digest(first), "acme", "ci") == (key.digest, key.tenant, key.name)
    assert first not in repr(key)


@pytest.mark.parametrize("tenant", ["", "a/b", "ü", ".x", "x" * 64, "a\n"])
def test_a_tenant_has_a_name_that_lanes_can_begin_with(tenant: str) -> None:
    """No slash above all."""
    with pytest.raises(ConfigurationError, match="tenant must have"):
        check_tenant(tenant)


def test_without_a_key_nobody_comes_in() -> None:
    """401 with a challenge, for every path but those of the watch and the documentation."""

    async def test(rig: Rig) -> None:
        paths = ["/retry-tasks", "/dead-letters", "/retry-policies", "/downstreams", "/events"]
        for path in [*paths, "/metrics", "/retry-tasks/x"]:
            reply = await rig.ask("GET", path)
            assert (401, 'Bearer realm="tarry"') == (
                reply.status,
                reply.header("www-authenticate"),
            )
        for path in ("/healthz", "/readyz", "/docs", "/openapi.json"):
            assert 200 == (await rig.ask("GET", path)).status
        assert 401 == (await rig.ask("POST", "/retry-tasks", {"targetUrl": TARGET})).status
        assert 0 == await rig.count()

    with_rig(test, keys=True)


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
def test_a_wrong_key_is_no_key(headers: dict[str, str]) -> None:
    """401, whatever is wrong with it."""

    async def test(rig: Rig) -> None:
        secret, _ = await key_for(rig, "acme")
        given = {name: value.replace("{}", secret) for name, value in headers.items()}
        assert 401 == (await rig.ask("GET", "/retry-tasks", headers=given)).status

    with_rig(test, keys=True)


def test_two_keys_that_differ_are_refused() -> None:
    """Nobody can tell which was meant; the same key twice is one."""

    async def test(rig: Rig) -> None:
        one, other = (await key_for(rig, "acme"))[0], (await key_for(rig, "shop"))[0]
        both = {"Authorization": f"Bearer {one}", "X-API-Key": other}
        reply = await rig.ask("GET", "/retry-tasks", headers=both)
        assert 401 == reply.status
        assert "Authorization and X-API-Key differ" in reply.problem["detail"]
        same = await rig.ask("GET", "/retry-tasks", headers={**both, "X-API-Key": one})
        assert 200 == same.status

    with_rig(test, keys=True)


@pytest.mark.parametrize(
    "header", ["Authorization: Bearer {}", "authorization: bearer  {}", "X-API-Key: {}"]
)
def test_a_key_opens_the_door(header: str) -> None:
    """As a bearer token, or in a header of its own."""

    async def test(rig: Rig) -> None:
        secret, _ = await key_for(rig, "acme")
        name, _, value = header.replace("{}", secret).partition(": ")
        assert 200 == (await rig.ask("GET", "/retry-tasks", headers={name: value})).status

    with_rig(test, keys=True)


def test_what_is_anothers_is_not_there() -> None:
    """Another tenant's tasks, policies, lanes and replays are 404, and in no list."""

    async def test(rig: Rig) -> None:
        one, _ = await key_for(rig, "acme")
        other, _ = await key_for(rig, "umbrella")

        async def ask(secret: str, method: str, path: str, document: object = None) -> Reply:
            return await rig.ask(method, path, document, headers={"X-API-Key": secret})

        task = (await ask(one, "POST", "/retry-tasks", {"targetUrl": TARGET})).json
        await ask(one, "PUT", "/retry-policies/mine", {})
        replay = (await ask(one, "POST", "/dead-letters/replays", {})).json["replayId"]
        place = f"/retry-tasks/{task['taskId']}"
        asked = [
            ("GET", place),
            ("DELETE", place),
            ("GET", f"{place}/attempts"),
            ("GET", f"{place}/explain"),
            ("POST", f"{place}/retry"),
            ("GET", "/retry-policies/mine"),
            ("DELETE", "/retry-policies/mine"),
            ("GET", "/downstreams/https:example.com:443"),
            ("POST", "/downstreams/https:example.com:443/pause"),
            ("POST", "/downstreams/acme/https:example.com:443/pause"),
            ("GET", f"/dead-letters/replays/{replay}"),
            ("DELETE", f"/dead-letters/replays/{replay}"),
        ]
        for method, path in asked:
            assert 404 == (await ask(other, method, path)).status, path
        for path in ("/retry-tasks", "/downstreams", "/dead-letters/replays"):
            assert [] == (await ask(other, "GET", path)).json["items"]
        assert task == (await ask(one, "GET", place)).json
        assert "OPEN" == (await ask(one, "GET", "/downstreams")).json["items"][0]["state"]

    with_rig(test, keys=True)


def test_the_same_key_of_two_tenants_is_two_keys() -> None:
    """An idempotency key belongs to its tenant."""

    async def test(rig: Rig) -> None:
        document = {"targetUrl": TARGET, "idempotencyKey": "k"}
        secrets = [(await key_for(rig, tenant))[0] for tenant in ("acme", "umbrella")]
        replies = [
            await rig.ask("POST", "/retry-tasks", document, headers={"X-API-Key": secret})
            for secret in (*secrets, *secrets)
        ]
        assert [201, 201, 200, 200] == [reply.status for reply in replies]

    with_rig(test, keys=True)


def test_answers_of_the_store_are_believed_for_a_while() -> None:
    """Good and bad ones; a key that is revoked, or made, shows when that has passed."""

    async def test(rig: Rig) -> None:
        looked: list[bytes] = []
        key_of = rig.store.find_key

        async def counted(digest: bytes) -> ApiKey | None:
            looked.append(digest)
            return await key_of(digest)

        rig.store.find_key = counted  # type: ignore[method-assign]
        keys = ApiKeyCache(rig.store, rig.time.seconds)
        secret, key = make_key("acme", "1")
        assert [None, None] == [await keys.find_tenant(secret) for _ in range(2)]
        await rig.store.put_key(key)
        rig.time.ms += 5_000
        assert ["acme", "acme"] == [await keys.find_tenant(secret) for _ in range(2)]
        await rig.store.revoke_key("1")
        rig.time.ms += 5_000
        assert [None, None] == [await keys.find_tenant(secret) for _ in range(2)]
        assert 3 == len(looked)

    with_rig(test)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of wrong keys neither fills the memory nor pushes out the right ones."""
    monkeypatch.setattr("tarry.service.api.auth._MAX_CACHED_KEYS", 10)

    async def test(rig: Rig) -> None:
        secret, _ = await key_for(rig, "acme")
        keys = ApiKeyCache(rig.store, rig.time.seconds)
        await keys.find_tenant(secret)
        await asyncio.gather(*(keys.find_tenant(f"wrong {i}") for i in range(50)))
        assert (1, 10) == (len(keys._valid), len(keys._invalid))

    with_rig(test)


@pytest.mark.parametrize(("operator", "told"), [("", b"of acme\n"), ("acme", b"of all\n")])
def test_metrics_of_all_are_an_operators(operator: str, told: bytes) -> None:
    """A key shows the numbers of its tenant, unless that is the operator."""

    async def test(rig: Rig) -> None:
        secret, _ = await key_for(rig, "acme")
        reply = await rig.ask("GET", "/metrics", headers={"X-API-Key": secret})
        assert told == reply.body

    with_rig(test, keys=True, operator=operator)
