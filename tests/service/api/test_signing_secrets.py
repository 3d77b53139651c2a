"""`/signing-secrets`: secrets are created, listed without their value, replaced and deleted."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from tarry.service.api.auth import make_api_key
from tarry.service.records.api_keys import put_api_key
from tarry.service.records.signing_secrets import list_signing_secrets
from tests.service.api.harness import NOW, ApiHarness

PATH = "/signing-secrets"
SECRET = "whsec_" + b64encode(b"s" * 32).decode()
LANE = "https:example.com:443"


async def create(api: ApiHarness, **fields: Any) -> Any:
    """Create a secret, and return its JSON."""
    response = await api.request("POST", PATH, fields)
    assert 201 == response.status, response.body
    return response.json


async def list_items(api: ApiHarness) -> list[dict[str, Any]]:
    """Return the listed secrets."""
    items: list[dict[str, Any]] = (await api.request("GET", PATH)).json["items"]
    return items


async def test_secret_is_shown_once(api: ApiHarness) -> None:
    """The response to the POST has the secret; lists do not."""
    created = await create(api)
    secret = created.pop("secret")
    assert secret.startswith("whsec_")
    expected = {"lane": None, "type": "HMAC", "createdAt": NOW, "expiresAt": None}
    assert {"secretId": created["secretId"], **expected} == created
    listed = await api.request("GET", PATH)
    assert [created] == listed.json["items"]
    assert secret.encode() not in listed.body
    [record] = await list_signing_secrets(api.store, "default")
    assert secret == api.codec.decrypt_secret(record.secret)
    assert secret != (await create(api))["secret"]


async def test_ed25519_secret_has_a_public_key(api: ApiHarness) -> None:
    """The response and lists have the public key; the private key stays in the service."""
    created = await create(api, type="ED25519", lane="HTTPS:Example.com")
    assert created["publicKey"].startswith("whpk_")
    assert "secret" not in created
    assert ("ED25519", LANE) == (created["type"], created["lane"])
    assert [created] == await list_items(api)


async def test_own_secret_is_stored_and_not_returned(api: ApiHarness) -> None:
    """The type of the secret is that of its prefix."""
    created = await create(api, secret=SECRET, type="ED25519")
    assert ("HMAC", None) == (created["type"], created.get("secret"))
    [record] = await list_signing_secrets(api.store, "default")
    assert SECRET == api.codec.decrypt_secret(record.secret)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"secret": "hunter2-hunter2"}, "secret"),
        ({"secret": "whsec_aHVudGVyMg=="}, "secret"),
        ({"secret": "whpk_" + b64encode(bytes(32)).decode()}, "secret"),
        ({"secret": "whsec_" + "A" * 300}, "secret"),
        ({"type": "RSA"}, "type"),
        ({"lane": ""}, "lane"),
        ({"lane": "https://example.com"}, "lane"),
        ({"expirePreviousMs": -1}, "expirePreviousMs"),
        ({"expire": 1}, "expire"),
    ],
)
async def test_invalid_secret_is_rejected_without_showing_it(
    api: ApiHarness, fields: dict[str, Any], field: str
) -> None:
    """The problem names the field; it does not have the secret."""
    response = await api.request("POST", PATH, fields)
    assert (422, field) == (response.status, response.problem["field"])
    if "secret" in fields:
        assert fields["secret"].encode() not in response.body
    assert [] == await list_items(api)


async def test_replaced_secret_expires(api: ApiHarness) -> None:
    """The previous secret of the lane expires after a day, or after `expirePreviousMs`."""
    first = await create(api)
    of_lane = await create(api, lane=LANE)
    second = await create(api)
    third = await create(api, expirePreviousMs=1_000)
    ids = [created["secretId"] for created in (third, second, of_lane, first)]
    expiry_times = {item["secretId"]: item["expiresAt"] for item in await list_items(api)}
    assert ids == list(expiry_times)
    assert [None, NOW + 1_000, None, NOW + 1_000] == list(expiry_times.values())
    fourth = await create(api)
    items = {item["secretId"]: item for item in await list_items(api)}
    assert items[third["secretId"]]["expiresAt"] == NOW + 86_400_000
    api.time.ms += 1_000
    ids = [fourth["secretId"], third["secretId"], of_lane["secretId"]]
    assert ids == [item["secretId"] for item in await list_items(api)]


async def test_secrets_belong_to_a_tenant() -> None:
    """Another tenant neither lists nor deletes a secret."""
    api = ApiHarness(keys=True)
    headers = {}
    for tenant in ("ann", "bob"):
        key, record = make_api_key(tenant, tenant)
        await put_api_key(api.store, record)
        headers[tenant] = {"authorization": f"Bearer {key}"}
    created = (await api.request("POST", PATH, {}, headers=headers["ann"])).json
    path = f"{PATH}/{created['secretId']}"
    assert [] == (await api.request("GET", PATH, headers=headers["bob"])).json["items"]
    assert 404 == (await api.request("DELETE", path, headers=headers["bob"])).status
    assert 1 == len((await api.request("GET", PATH, headers=headers["ann"])).json["items"])
    assert 204 == (await api.request("DELETE", path, headers=headers["ann"])).status
    assert 404 == (await api.request("DELETE", path, headers=headers["ann"])).status
    assert 401 == (await api.request("GET", PATH)).status


async def test_number_of_secrets_is_limited(api: ApiHarness) -> None:
    """The eleventh secret of a lane is rejected."""
    for _ in range(10):
        await create(api)
    response = await api.request("POST", PATH, {})
    assert 409 == response.status
    assert response.problem["type"].endswith("too-many-secrets")
    await create(api, lane=LANE)
