"""A service on a Redis Cluster of which one node is dead, hangs, or is full.

Tenants on the other nodes are served as before, and results of their attempts are stored. This
also applies to a process that starts or stops meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from tarry.service.api.auth import make_api_key
from tarry.service.records.api_keys import put_api_key
from tarry.service.stores.redis import RedisTaskStore
from tarry.service.stores.redis.partitions import find_partition
from tests.integration.redis_cluster import SLOTS, ClusterNode, redis_cluster_nodes
from tests.integration.service import Service, Target, service, target

redis = import_module("redis")
crc = import_module("redis.crc")

PARTITIONS = 16
OUTAGE_S = 9.0
"""Longer than a lease: results that were not stored meanwhile would be repeated."""
SETTINGS = ("max_attempt_timeout_ms=1000", "lease_ms=6000", "require_keys=true")
MAX_POST_S = 5.0
"""After this time, a POST to the dead node must have failed."""
APPEND_ONLY = ("--appendonly", "yes", "--appendfsync", "always")


@contextmanager
def killed(node: ClusterNode) -> Generator[None]:
    """Kill a node, and start it again."""
    node.server.stop()
    try:
        yield
    finally:
        node.server.start()


@contextmanager
def full(node: ClusterNode) -> Generator[None]:
    """Refuse writes that need memory."""
    node.client.config_set("maxmemory", 1)
    try:
        yield
    finally:
        node.client.config_set("maxmemory", 0)


def suspended(node: ClusterNode) -> AbstractContextManager[None]:
    """Suspend a node, so that it does not respond."""
    return node.server.suspended()


@dataclass
class Tenant:
    """A tenant whose tasks are posted one after the other."""

    name: str
    secret: str
    node: int
    posts: list[tuple[float, float, int]] = field(default_factory=list)
    """Start, duration and status of each POST."""
    task_ids: dict[str, str] = field(default_factory=dict)
    """The paths of tasks by id."""

    def post(self, running_service: Service, url: str) -> None:
        """Post one task, and record the result."""
        path = f"/{self.name}/{len(self.posts)}"
        started_at = time.monotonic()
        response = running_service.send(
            "POST",
            "/retry-tasks",
            {"targetUrl": f"{url}{path}"},
            {"authorization": f"Bearer {self.secret}"},
        )
        duration = time.monotonic() - started_at
        if response.status == 201:
            self.task_ids[response.body["taskId"]] = path
        else:
            assert response.status == 503, response
            assert "retry-after" in response.headers
        self.posts.append((started_at, duration, response.status))


def node_of(partition: int) -> int:
    """Return the number of the node that has a partition."""
    return int(crc.key_slot(f"{{{partition}}}".encode()) * 3 // SLOTS)


def create_tenants(url: str) -> list[Tenant]:
    """Create a store, and an API key for one tenant on each node; the first has partition 0."""
    first = node_of(0)
    names: dict[int, str] = {}
    for number in range(200):
        names.setdefault(node_of(find_partition(f"t{number}", PARTITIONS)), f"t{number}")

    async def create() -> list[Tenant]:
        store = RedisTaskStore(url)
        await store.open()
        tenants: list[Tenant] = []
        for node in (first, *sorted({0, 1, 2} - {first})):
            secret, record = make_api_key(names[node], names[node])
            await put_api_key(store, record)
            tenants.append(Tenant(names[node], secret, node))
        await store.close()
        return tenants

    return asyncio.run(create())


@contextmanager
def posting(tenants: list[Tenant], running_service: Service, url: str) -> Iterator[None]:
    """Post tasks of each tenant until the end of the block."""
    stop = Event()
    errors: list[BaseException] = []

    def post(tenant: Tenant) -> None:
        try:
            while not stop.is_set():
                tenant.post(running_service, url)
                stop.wait(0.02)
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=post, args=(tenant,)) for tenant in tenants]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors


def delivered(tenant: Tenant, receiver: Target) -> int:
    """Return how many tasks of a tenant were delivered."""
    return sum(bool(receiver.received_requests[path]) for path in tenant.task_ids.values())


@pytest.mark.parametrize(
    ("outage", "number"), [(killed, 2), (suspended, 2), (full, 2), (suspended, 0)]
)
def test_tenants_on_other_nodes_are_served(outage: Any, number: int, tmp_path: Path) -> None:
    """Their tasks are accepted and delivered once; those of the dead node wait for it.

    API keys are in partition 0, on the node of the first tenant.
    """
    with redis_cluster_nodes(3, "--appendonly", "yes") as nodes, target() as receiver:
        store_url = f"redis+cluster://127.0.0.1:{nodes[0].port}?partitions={PARTITIONS}"
        tenants = create_tenants(store_url)
        victim = tenants[number]
        others = [each for each in tenants if each is not victim]
        with service(tmp_path, *store_flags(store_url)) as running_service:
            with posting(tenants, running_service, receiver.url):
                time.sleep(1)
                started_at = time.monotonic()
                with outage(nodes[victim.node]):
                    time.sleep(OUTAGE_S)
                    statuses = running_service.send("GET", "/readyz").status
                    metrics = running_service.send(
                        "GET", "/metrics", None, {"authorization": f"Bearer {tenants[0].secret}"}
                    ).status
                    counts = [(delivered(each, receiver), len(each.task_ids)) for each in others]
                ended_at = time.monotonic()
                time.sleep(2)
            assert 200 == statuses
            assert 200 == metrics

            def is_all_delivered() -> bool:
                return all(delivered(each, receiver) == len(each.task_ids) for each in tenants)

            running_service.wait_for(is_all_delivered)

        for tenant, (delivered_count, count) in zip(others, counts, strict=True):
            during = [post for post in tenant.posts if started_at < post[0] < ended_at]
            assert {201} == {status for _, _, status in tenant.posts}
            assert len(during) > 100
            assert delivered_count >= count - 5, (tenant.name, delivered_count, count)
            numbers = [len(receiver.received_requests[path]) for path in tenant.task_ids.values()]
            assert {1} == set(numbers)
        assert max(duration for _, duration, _ in victim.posts) < MAX_POST_S
        assert any(status == 503 for _, _, status in victim.posts)
        lines = (tmp_path / "log").read_text().splitlines()
    changes = [line for line in lines if " is failing" in line or "has recovered" in line]
    assert all(" partition " in line for line in changes), changes
    names = [line.partition(" is failing")[0] for line in changes if " is failing" in line]
    assert len(changes) <= 4 * PARTITIONS, changes
    assert names


def store_flags(store_url: str) -> list[str]:
    """Return the flags of a service on a store."""
    return ["--store", store_url, *(flag for each in SETTINGS for flag in ("--set", each))]


def cluster_store_url(nodes: list[ClusterNode]) -> str:
    """Return the URL of a store that names all nodes."""
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    return f"redis+cluster://{hosts}?partitions={PARTITIONS}"


@pytest.mark.parametrize("outage", [killed, suspended, full])
def test_a_process_starts_while_a_node_is_unavailable(outage: Any, tmp_path: Path) -> None:
    """It serves the other tenants, names the node, and serves all when the node is back."""
    with redis_cluster_nodes(3, *APPEND_ONLY) as nodes, target() as receiver:
        store_url = cluster_store_url(nodes)
        tenants = create_tenants(store_url)
        *others, victim = tenants
        down = nodes[victim.node]
        new_task = {"targetUrl": f"{receiver.url}/later", "delayMs": 5000}
        headers = {"authorization": f"Bearer {victim.secret}"}
        with service(tmp_path, *store_flags(store_url)) as first:
            assert 201 == first.send("POST", "/retry-tasks", new_task, headers).status
            first.stop()
        running_service = Service(tmp_path, *store_flags(store_url))
        try:
            with outage(down):
                running_service.start()

                def failing_components() -> dict[str, str]:
                    response = running_service.send("GET", "/readyz")
                    assert 200 == response.status
                    failing: dict[str, str] = response.body.get("failing", {})
                    return failing

                running_service.wait_for(lambda: bool(failing_components()))
                assert all(" partition " in name for name in failing_components())
                for tenant in others:
                    tenant.post(running_service, receiver.url)
                running_service.wait_for(
                    lambda: [1, 1] == [delivered(each, receiver) for each in others]
                )
                victim.post(running_service, receiver.url)
                assert [503] == [status for _, _, status in victim.posts]
                assert not receiver.received_requests["/later"]
                lines = (tmp_path / "log").read_text().splitlines()
                lines = [line for line in lines if " is failing: " in line]
                assert lines
                assert all(f"127.0.0.1:{down.port}" in line for line in lines), lines

            def is_victim_served() -> bool:
                victim.post(running_service, receiver.url)
                return bool(victim.task_ids) and bool(receiver.received_requests["/later"])

            running_service.wait_for(is_victim_served)
            running_service.wait_for(lambda: delivered(victim, receiver) == len(victim.task_ids))
            assert 1 == len(receiver.received_requests["/later"])
            running_service.wait_for(lambda: not failing_components())
        finally:
            if running_service.is_running:
                running_service.kill()


@pytest.mark.parametrize("outage", [killed, suspended])
def test_a_process_does_not_start_without_partition_0(outage: Any, tmp_path: Path) -> None:
    """The error names the node, and nothing is created on the other nodes."""
    with redis_cluster_nodes(3, *APPEND_ONLY) as nodes:
        store_url = cluster_store_url(nodes)
        create_tenants(store_url)
        first = nodes[node_of(0)]
        others = [node for node in nodes if node is not first]
        keys = [set(node.client.scan_iter()) for node in others]
        process = Service(tmp_path, *store_flags(store_url))
        with outage(first):
            process.launch()
            assert 0 != process.process.wait()
        assert f"127.0.0.1:{first.port}" in (tmp_path / "log").read_text()
        assert keys == [set(node.client.scan_iter()) for node in others]
        while first.client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
            time.sleep(0.02)
        process.start()
        process.stop()


@pytest.mark.parametrize("outage", [killed, suspended])
def test_a_process_stops_while_a_node_is_unavailable(outage: Any, tmp_path: Path) -> None:
    """It does not wait for the node; the results of other tenants are stored."""
    may_respond = Event()

    def respond(_path: str, number: int) -> int:
        if number == 1:
            may_respond.wait()
        return 200

    with redis_cluster_nodes(3, *APPEND_ONLY) as nodes, target(respond) as receiver:
        store_url = cluster_store_url(nodes)
        tenants = create_tenants(store_url)
        victim = tenants[-1]
        settings = ["max_attempt_timeout_ms=30000", "lease_ms=35000", "drain_ms=3600000"]
        flags = [flag for each in settings for flag in ("--set", each)]
        with service(tmp_path, *store_flags(store_url), *flags) as running_service:
            for tenant in tenants:
                tenant.post(running_service, receiver.url)
            running_service.wait_for(
                lambda: [1, 1, 1] == [delivered(each, receiver) for each in tenants]
            )
            with outage(nodes[victim.node]):
                running_service.process.terminate()
                may_respond.set()
                assert 0 == running_service.process.wait()
            log = (tmp_path / "log").read_text()
            assert "results not stored at stop" in log
            assert "attempts cancelled at stop" not in log
            running_service.start()

            def read_status(tenant: Tenant) -> str | None:
                (task_id,) = tenant.task_ids
                headers = {"authorization": f"Bearer {tenant.secret}"}
                response = running_service.send("GET", f"/retry-tasks/{task_id}", None, headers)
                return response.body["status"] if response.status == 200 else None

            assert ["SUCCEEDED"] * 2 == [read_status(each) for each in tenants[:2]]
            running_service.wait_for(lambda: read_status(victim) == "IN_FLIGHT")
