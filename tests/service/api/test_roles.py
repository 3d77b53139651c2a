"""Roles of API keys: which operations a key may call."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.service.api.auth import make_api_key
from tarry.service.api.roles import ROLES
from tarry.service.api.routing import REQUIRED_ROLES, Operation, resource_operations
from tarry.service.records.api_keys import put_api_key
from tests.service.api.harness import TARGET, ApiHarness

ROLE_REQUIRED = "/docs#problem-role-required"


async def new_key(api: ApiHarness, role: str) -> dict[str, str]:
    """Store a key with this role; return the header that authenticates with it."""
    key, record = make_api_key("acme", f"key-{role}", role=role)
    await put_api_key(api.store, record)
    return {"x-api-key": key}


async def is_rejected(api: ApiHarness, method: str, path: str, headers: dict[str, str]) -> bool:
    """Return whether a request is rejected because of the role of its key."""
    document: dict[str, Any] | None = {} if method in {"POST", "PUT"} else None
    path = re.sub(r"{[^}]*}", "x", path)
    response = await api.request(method, path, document, headers=headers)
    if response.status != 403:
        return False
    is_problem = response.header("content-type") == "application/problem+json"
    return not is_problem or response.problem["type"] == ROLE_REQUIRED


async def all_operations(api: ApiHarness) -> dict[str, tuple[str, str, str]]:
    """Return method, path and required role of each operation that needs a key, by its id."""
    document = (await api.request("GET", "/openapi.json")).json
    found = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "security" in operation:
                assert "403" in operation["responses"]
                match = re.search("role `(.*)`", operation["description"])
                assert match is not None
                found[operation["operationId"]] = (method.upper(), path, match[1])
    return found


@pytest.mark.parametrize("role", ROLES)
async def test_each_operation_needs_its_role(role: str) -> None:
    """A key may call the operations of its role and of lower roles; others get a 403."""
    api = ApiHarness(keys=True)
    headers, operations = await new_key(api, role), await all_operations(api)
    assert len(operations) > len(REQUIRED_ROLES) > 10
    for method, path, required in operations.values():
        expected = ROLES.index(role) < ROLES.index(required)
        for _ in range(2):  # the second request finds the key in the cache
            assert expected == await is_rejected(api, method, path, headers), (method, path)


async def test_roles_of_the_groups_of_operations() -> None:
    """`read` reads everything, `write` changes tasks and downstreams, `admin` the rest."""
    api = ApiHarness(keys=True)
    operations = await all_operations(api)
    by_role: dict[str, set[str]] = {role: set() for role in ROLES}
    for method, path, role in operations.values():
        if method != "GET":
            by_role[role].add(path.split("/")[1])
    assert {"policy-advice", "policy-schedules", "policy-simulations"} == by_role["read"]
    assert {"retry-tasks", "task-cancellations", "dead-letters", "downstreams"} >= (
        by_role["write"] - {"replays"}
    )
    assert {"dead-letters", "retry-policies", "signing-secrets"} == by_role["admin"]
    assert {"read"} == {role for method, _, role in operations.values() if method == "GET"}
    not_get = {name for name, (method, *_) in operations.items() if method != "GET"}
    assert not_get == set(REQUIRED_ROLES)


def test_a_new_operation_without_a_role_fails() -> None:
    """An operation that is not a GET must be in the table, or the service does not start."""

    class Resource:
        @Operation("POST", "/new", "newOperation", None)
        async def create(self, _: Any) -> None:
            """Do something new."""

    ((operation, _),) = resource_operations(Resource())
    with pytest.raises(KeyError, match="newOperation"):
        operation.required_role  # noqa: B018 - the property raises


@pytest.mark.parametrize(
    ("method", "path", "required"),
    [
        ("POST", "/v2/publish/https://example.com", "write"),
        ("GET", "/v2/messages/x", "read"),
        ("DELETE", "/v2/messages/x", "write"),
        ("POST", "/v2/projects/p/locations/l/queues/q/tasks", "write"),
        ("GET", "/v2/projects/p/locations/l/queues/q/tasks", "read"),
    ],
)
async def test_apis_of_vendors_need_roles(method: str, path: str, required: str) -> None:
    """Compatible APIs need the role `write`, and `read` for GET requests."""
    api = ApiHarness(keys=True, compatibility=("qstash", "cloud_tasks"))
    headers = await new_key(api, "read")
    assert (required == "write") == await is_rejected(api, method, path, headers)
    assert not await is_rejected(api, method, path, await new_key(api, "write"))


async def test_the_problem_names_both_roles() -> None:
    """A 403 has the role of the key and the required role, and the request has no effect."""
    api = ApiHarness(keys=True)
    document = {"targetUrl": TARGET}
    headers = await new_key(api, "read")
    response = await api.request("POST", "/retry-tasks", document, headers=headers)
    assert (403, "read", "write") == (
        response.status,
        response.problem["role"],
        response.problem["requiredRole"],
    )
    assert 0 == await api.count_tasks()
    assert (
        201
        == (
            await api.request("POST", "/retry-tasks", document, headers=await new_key(api, "write"))
        ).status
    )


@pytest.mark.parametrize("role", ROLES)
async def test_whoami_returns_tenant_and_role(role: str) -> None:
    """A program such as the dashboard can find out what its key may do."""
    api = ApiHarness(keys=True)
    response = await api.request("GET", "/whoami", headers=await new_key(api, role))
    assert (200, {"tenant": "acme", "role": role}) == (response.status, response.json)


async def test_without_api_keys_every_caller_is_an_admin(api: ApiHarness) -> None:
    """Without API keys, there are no roles."""
    response = await api.request("GET", "/whoami")
    assert {"tenant": "default", "role": "admin"} == response.json


async def test_a_key_with_an_unknown_role_may_do_nothing() -> None:
    """A role that a newer version has stored gives no permission; such a role is not created."""
    api = ApiHarness(keys=True)
    key, record = make_api_key("acme", "1")
    record.role = "auditor"
    await put_api_key(api.store, record)
    assert await is_rejected(api, "GET", "/retry-tasks", {"x-api-key": key})
    with pytest.raises(ConfigurationError, match="role"):
        make_api_key("acme", "1", role="auditor")
