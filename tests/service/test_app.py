"""Settings for API keys and for the location of data."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.app import (
    Service,
    are_api_keys_required,
    build_api_limits,
    data_location,
    make_store,
)
from tarry.service.delivery import Fault
from tarry.service.delivery import dns as dns_module
from tarry.service.records.transfer_mark import TransferMark, set_transfer
from tarry.service.records.workers import is_in_use, list_workers
from tarry.service.settings import Settings, load_settings
from tests.service.delivery.harness import new_request, send_all


def connect(service: Service) -> httpx.AsyncClient:
    """Return a client whose requests the service handles without a server."""
    transport = httpx.ASGITransport(app=service)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


@pytest.mark.parametrize(
    ("host", "require_keys", "expected"),
    [
        ("127.0.0.1", False, False),
        ("::1", False, False),
        ("localhost", False, False),
        ("127.0.0.1", True, True),
        ("0.0.0.0", False, True),  # noqa: S104 - nothing listens
        ("retry.example", False, True),
    ],
)
def test_api_keys_are_optional_only_on_loopback(
    host: str, require_keys: bool, expected: bool
) -> None:
    assert expected is are_api_keys_required(Settings(host=host, require_keys=require_keys))


def test_only_the_owner_can_read_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File and folder are private, because the file contains the data of callers."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tarry-data" / "tarry.db"
    mask = os.umask(0)
    try:
        make_store(Settings().store)
    finally:
        os.umask(mask)

    assert 0o600 == path.stat().st_mode & 0o777
    assert 0o700 == path.parent.stat().st_mode & 0o777
    assert str(path) == data_location(Settings())


@pytest.mark.parametrize("must_exist", [False, True])
def test_no_folder_is_created_for_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, must_exist: bool
) -> None:
    """A path in a folder that does not exist is probably mistyped: the error says what to do."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a b" / "mistyped"
    message = (
        f"there is no store at sqlite:{folder}/tarry.db. Is this the store of your service?"
        if must_exist
        else f"store: the folder {folder} does not exist, so there is no store in it. Correct the "
        "path, or run `mkdir -p -m 700 'a b/mistyped'` for a new store"
    )

    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}"):
        make_store("a b/mistyped/tarry.db", must_exist=must_exist)

    assert [] == list(tmp_path.iterdir())


async def test_a_new_store_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first start logs where it has created an empty store, the next one logs nothing."""
    path = tmp_path / "tarry.db"

    for must_exist in (False, True):
        store = make_store(str(path), must_exist=must_exist)
        await store.open()
        await store.close()
    messages = [(each.levelname, each.message) for each in caplog.records]
    assert [("WARNING", f"created an empty store at sqlite:{path}")] == messages


@pytest.mark.parametrize(
    ("name", "mode", "warnings"),
    [
        ("tarry.db", 0o644, ["mode 644): run chmod 600 {path}"]),
        ("tarry.db-wal", 0o606, ["mode 606): run chmod 600 {path}"]),
        ("bodies", 0o755, ["mode 755): run chmod 700 {path}"]),
        ("tarry.db", 0o660, []),
        ("bodies", 0o750, []),
    ],
)
async def test_a_restored_file_that_others_can_read_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, mode: int, warnings: list[str]
) -> None:
    """A warning names the mode and the command that changes it; the mode stays."""
    path = tmp_path / name
    path.mkdir() if name == "bodies" else path.touch()
    path.chmod(mode)

    Service(Settings(store=f"sqlite:{tmp_path / 'tarry.db'}"))
    expected = [f"other users have access to {path} ({text.format(path=path)}" for text in warnings]
    assert expected == caplog.messages
    assert mode == path.stat().st_mode & 0o777


def test_the_host_name_is_read_without_uname(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is named after its host, also on Windows, where `os.uname` does not exist."""
    monkeypatch.delattr(os, "uname")
    monkeypatch.setattr(socket, "gethostname", lambda: "host.example")

    process = Service(Settings(store="memory:")).engine._context.process

    assert "host.example" == process.host
    assert process.name.startswith(f"host.example-{os.getpid()}-")


def test_an_unknown_store_is_an_error() -> None:
    """The error names the setting."""
    with pytest.raises(ConfigurationError, match="store must be a path, sqlite:PATH, memory:"):
        make_store("mysql:")


async def test_a_tenant_limit_of_zero_is_no_limit(tmp_path: Path) -> None:
    """`tenant_pending` and `tenant_lanes` are limits of the engine, unless they are 0."""
    settings = Settings(store="memory:", bodies=str(tmp_path))
    limits = [
        Service(replace(settings, tenant_pending=n, tenant_lanes=2 * n)).engine.limits
        for n in (0, 5)
    ]
    assert [(None, None), (5, 10)] == (
        [(each.max_tenant_unfinished_tasks, each.max_tenant_lanes) for each in limits]
    )


@pytest.mark.parametrize(("limit", "status"), [(2, 429), (0, 201)])
async def test_policy_versions_of_a_tenant_are_limited_by_the_settings(
    tmp_path: Path, limit: int, status: int
) -> None:
    """Above `tenant_policy_versions`, a new policy is a 429; 0 is no limit."""
    settings = Settings(store="memory:", bodies=str(tmp_path), tenant_policy_versions=limit)

    service = Service(settings)
    await service.open()
    async with connect(service) as client:
        responses = [
            await client.post("/retry-policies", json={"policyId": f"p{number}"})
            for number in (1, 2, 3)
        ]
    await service.close()
    assert [201, 201, status] == ([response.status_code for response in responses])


async def test_limits_of_downstreams_in_the_settings_apply(tmp_path: Path) -> None:
    """A lane that matches a pattern of the settings file has its limits, others do not."""
    file = tmp_path / "tarry.toml"
    file.write_text("""
[[downstreams]]
tenant = "trial-*"
lane = "https:*.example.com:443"
rate_per_second = 3
concurrency = 2
""")
    loaded = load_settings({"store": "memory:", "bodies": str(tmp_path)}, {}, file)

    lanes = Service(loaded.settings).engine._context.lanes
    names = ("trial-1/https:a.example.com:443", "acme/https:a.example.com:443")
    limiters = [lanes[name].downstream.limiter for name in names]
    assert [(3.0, 2), (None, 128)] == (
        [(limiter.rate, limiter._max_in_flight) for limiter in limiters]
    )


@pytest.mark.parametrize(("is_writable", "status"), [(True, 200), (False, 503)])
async def test_a_service_that_cannot_store_bodies_is_not_ready(
    tmp_path: Path, *, is_writable: bool, status: int
) -> None:
    """`/readyz` writes to the storage of bodies and names it if this fails."""
    bodies = tmp_path / "bodies"

    service = Service(Settings(store="memory:", bodies=str(bodies)))
    await service.open()
    if not is_writable:
        bodies.rmdir()
        bodies.touch()
    async with connect(service) as client:
        response = await client.get("/readyz")
    await service.close()
    assert status == response.status_code
    assert ([] if is_writable else ["bodies"]) == list(response.json().get("failing", {}))


@pytest.mark.parametrize(
    ("max_clients", "expected"), [(16_384, (2_000, 200)), (224, (112, 56)), (1, (0, 0))]
)
def test_waits_and_event_streams_leave_connections_for_other_tenants(
    max_clients: int, expected: tuple[int, int]
) -> None:
    """All waits and streams together occupy at most three quarters of the connections."""
    limits = build_api_limits(Settings(), max_clients)
    assert expected == (limits.max_waiting_requests, limits.max_event_streams)


async def test_signing_secrets_are_shared_only_if_configured(tmp_path: Path) -> None:
    """The secrets of the settings sign for the tenant `default`, or for all tenants."""
    settings = Settings(store="memory:", bodies=str(tmp_path))
    shared = Settings(store="memory:", bodies=str(tmp_path), share_signing_secrets=True)
    services = [Service(settings), Service(shared)]
    assert ["default", None] == ([service.engine.signers._fallback_tenant for service in services])


async def test_on_blocked_decides_whether_tasks_wait(tmp_path: Path) -> None:
    """The engine parks the lane of a blocked target only with `on_blocked` "wait"."""
    services = [
        Service(Settings(store="memory:", bodies=str(tmp_path), on_blocked=on_blocked))
        for on_blocked in ("fail", "wait")
    ]
    assert [None, 60.0] == ([service.engine._context.blocked_pause_s for service in services])


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answer each DNS lookup with a private address; return the list of the names."""
    names: list[str] = []

    def start_lookup(host: str, on_answer: Callable[[str, Any], None]) -> None:
        names.append(host)
        asyncio.get_running_loop().call_soon(on_answer, host, ("10.0.0.1",))

    monkeypatch.setattr(dns_module, "start_lookup_thread", start_lookup)
    return names


LONGEST_HOST = f"{'.'.join(['x' * 61] * 4)}.local"


@pytest.mark.usefixtures("lookups")
@pytest.mark.parametrize("host", ["billing.internal", LONGEST_HOST], ids=len)
async def test_dead_letter_of_a_blocked_target_has_the_setting(tmp_path: Path, host: str) -> None:
    """Lists and the attempt log have the value to paste, also for the longest host name."""
    setting = f"the operator can allow it: --allow-target {host} (setting allow_target)"
    settings = Settings(store="memory:", bodies=str(tmp_path), on_blocked="fail")
    service = Service(settings)
    await service.open()
    async with connect(service) as client:
        created = await client.post(
            "/retry-tasks", json={"targetUrl": f"http://{host}/"}, headers={"Prefer": "wait=10"}
        )
        attempts = f"/retry-tasks/{created.json()['taskId']}/attempts"
        fields = [
            ("/dead-letters", "lastError"),
            ("/dead-letters/groups", "newestError"),
            ("/retry-tasks", "lastError"),
            (attempts, "errorMessage"),
        ]
        errors = [(await client.get(path)).json()["items"][0][name] for path, name in fields]
    await service.close()
    assert "EXHAUSTED" == created.json()["status"]
    assert [setting] * 4 == [error.partition("; ")[2] for error in (errors)]


async def test_http_and_grpc_share_the_slots_for_lookups(
    tmp_path: Path, lookups: list[str]
) -> None:
    """A name is looked up once for both clients, so a tenant does not have a share in each."""
    delivery = Service(Settings(store="memory:", bodies=str(tmp_path)))._delivery_client
    urls = ["http://a.example/", "grpc://a.example:1/S/M"]
    assert [Fault.BLOCKED, Fault.BLOCKED] == (
        [result.fault for result in await send_all(delivery, *map(new_request, urls))]
    )
    assert ["a.example"] == lookups


async def test_a_service_does_not_start_on_a_store_that_was_moved(tmp_path: Path) -> None:
    """The error names the new store; the process is not listed, and the store is closed."""
    path = tmp_path / "tarry.db"
    mark = TransferMark(
        id="transfer", is_source=True, other_store="postgresql://new", is_complete=True
    )

    store = make_store(str(path))
    await store.open()
    await set_transfer(store, mark)
    service = Service(Settings(store=str(path)))
    with pytest.raises(ConfigurationError, match="were moved to postgresql://new: serve that"):
        await service.open()
    assert [] == await list_workers(store)
    assert not await is_in_use(store)

    await set_transfer(store, None)
    await service.open()
    assert await is_in_use(store)
    await service.close()
    await store.close()


async def test_metrics_do_not_need_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store was never available, the metrics page has only what this process knows."""
    service = Service(Settings(store="memory:"))

    async def fail() -> bool:
        raise StoreUnavailable("disk full")

    monkeypatch.setattr(service.store, "try_lead", fail)
    page, _ = await service._render_metrics(None, "")

    assert b'retry_component_failing{component="store"} 0.0' in page
    assert b"retry_superseded_total 0.0" in page
    assert b"retry_tasks" not in page
    await service._store_values.close()
