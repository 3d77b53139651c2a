"""Hostile requests to a running service with keys and without --dev. Each is rejected with the
invalid field, and nothing is stored.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service import service, target
from tests.integration.tenants import Tenants, two_tenants

TARGET = "https://example.com/hook"
WITH_HOSTS = 'mount --bind "$0" /etc/hosts && exec "$@"'
NAMESPACE = ("unshare", "--map-root-user", "--mount", "sh", "-c", WITH_HOSTS)
HOSTS = {
    "rebound.example": "127.0.0.1",
    "six.example": "::1",
    "metadata.example": "169.254.169.254",
    "private.example": "10.0.0.1",
    "mapped.example": "::ffff:10.0.0.1",
}


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """Run a service with two tenants."""
    with two_tenants(tmp_path_factory.mktemp("service")) as both:
        yield both


# --- targets inside -------------------------------------------------------------------------------

INSIDE = [
    "http://127.0.0.1/",
    "http://127.1/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0177.0.0.1/",
    "http://127.0.0.1./",
    "http://localhost/",
    "http://LOCALHOST./",
    "http://a.localhost/",
    "http://0.0.0.0/",
    "http://[::]/",
    "http://[::1]/",
    "http://[0:0:0:0:0:0:0:1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[2002:7f00:1::]/",
    "http://[2001:0:7f00:1::]/",
    "http://[fe80::1%25eth0]/",
    "http://[fd00:ec2::254]/",
    "http://10.0.0.1/",
    "http://172.16.0.1/",
    "http://192.168.0.1/",
    "http://100.64.0.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://metadata.google.internal/",
    "http://168.63.129.16/",
    "http://224.0.0.1/",
    "http://255.255.255.255/",
    "http://\uff11\uff12\uff17.\uff10.\uff10.\uff11/",
    "http://①②⑦.0.0.1/",
    "http://127%2e0%2e0%2e1/",
    "http://example.com@127.0.0.1/",
    "http://127.0.0.1#@example.com/",
    "http://127.0.0.1\\@example.com/",
    "http:127.0.0.1/",
    "http:///127.0.0.1/",
    "//127.0.0.1/",
    "file:///etc/passwd",
    "gopher://127.0.0.1/",
    "grpc://127.0.0.1:50051/a.B/C",
    "grpcs://localhost:50051/a.B/C",
]


@pytest.mark.parametrize("field", ["targetUrl", "callbackUrl"])
def test_every_spelling_of_a_private_address_is_rejected(callers: Tenants, field: str) -> None:
    """As a target and as a callback; the problem names the field."""
    with callers.check_nothing_stored():
        for url in INSIDE:
            task = {"targetUrl": TARGET} | {field: url}
            refused = callers.ask("ann", "POST", "/retry-tasks", task)
            assert (422, field) == (refused.status, refused.body.get("field")), url
        tasks = [{"targetUrl": url} for url in INSIDE]
        results = callers.ask("ann", "POST", "/retry-tasks/batch", {"tasks": tasks}).body["results"]
        assert {422} == {result["status"] for result in results}


def test_a_name_that_resolves_to_a_private_address_is_blocked_at_connect(tmp_path: Path) -> None:
    """The URL does not show it, so the task is accepted; nothing is sent, and it is not retried."""
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{address} {name}\n" for name, address in HOSTS.items()))
    within = (*NAMESPACE, str(hosts))
    if subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
        pytest.skip("names of one's own need user namespaces: run as root, or allow them")
    with target() as to, service(tmp_path, dev=False, within=within) as running:
        port = to.url.rpartition(":")[2]
        urls = [f"http://{name}:{port}/{name}" for name in HOSTS]
        tasks = [running.post(targetUrl=url)["taskId"] for url in [*urls, f"grpc{urls[0][4:]}/M"]]
        for task_id in tasks:
            ended = running.wait_until_finished(task_id)
            assert ("EXHAUSTED", "permanent") == (ended["status"], ended["reason"])
            [attempt] = running.attempts(task_id)
            assert "blocked" == attempt["errorClass"]
        assert not to.seen


# --- in the document ------------------------------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"\xff\xfe{}", 400, None),
        (b'{"targetUrl": "https://example.com/\xff"}', 400, None),
        (b'{"targetUrl": "https://example.com/", "body": "\xff"}', 400, None),
        (f'{{"targetUrl": "{TARGET}", "body": {DEEP}}}'.encode(), 400, None),
        (f'{{"targetUrl": "{TARGET}", "policy": {{"a": {DEEP}}}}}'.encode(), 400, None),
        (DEEP.encode(), 422, ""),
        (b"[]", 422, ""),
        (b'{"targetUrl": 7}', 422, "targetUrl"),
        (b'{"targetUrl": "https://example.com/", "delayMs": 1e999}', 422, "delayMs"),
        (b'{"targetUrl": "https://example.com/", "delayMs": "1"}', 422, "delayMs"),
        (b'{"targetUrl": "https://example.com/", "nonsense": 1}', 422, "nonsense"),
        (b'{"targetUrl": "https://example.com/\\r\\nX-A: b"}', 422, "targetUrl"),
        (b'{"targetUrl": "https://example.com/", "method": "GET\\r\\nX"}', 422, "method"),
        (
            b'{"targetUrl": "https://example.com/", "headers": {"X-A": "b\\r\\nX-C: d"}}',
            422,
            "headers.X-A",
        ),
        (
            b'{"targetUrl": "https://example.com/", "idempotencyKey": "a\\r\\nX-C: d"}',
            422,
            "idempotencyKey",
        ),
        (
            b'{"targetUrl": "https://example.com/", "policy": {"maxAttempts": -1}}',
            422,
            "policy.maxAttempts",
        ),
        (
            b'{"targetUrl": "https://example.com/", "bodyRef": "bob/secret"}',
            422,
            "bodyRef",
        ),
    ],
)
def test_an_invalid_document_is_rejected_with_its_field(
    callers: Tenants, body: bytes, status: int, field: str | None
) -> None:
    """Over a socket: types, depth, encoding, line breaks."""
    with callers.check_nothing_stored():
        refused = callers.ask("ann", "POST", "/retry-tasks", body)
    assert (status, field) == (refused.status, refused.body.get("field"))
    assert "application/problem+json" == refused.headers["content-type"]
    assert refused.body["detail"]


# --- tasks of other tenants -----------------------------------------------------------------------


def test_a_key_is_required(callers: Tenants) -> None:
    """Except for health; an invalid key counts as none."""
    running = callers.running
    with callers.check_nothing_stored():
        for headers in ({}, {"authorization": "Bearer tarry_wrong"}, {"x-api-key": "ü"}):
            refused = running.reply("POST", "/retry-tasks", {"targetUrl": TARGET}, headers)
            assert 401 == refused.status
            assert "www-authenticate" in refused.headers
            for path in ("/retry-tasks", "/dead-letters", "/downstreams", "/metrics", "/events"):
                assert 401 == running.reply("GET", path, headers=headers).status
        assert 200 == running.request("GET", "/healthz")[0]


def test_resources_of_another_tenant_do_not_exist(callers: Tenants) -> None:
    """404 for every operation on them, and empty lists; the owner still has everything."""
    far = {"targetUrl": TARGET, "delayMs": 3_600_000, "idempotencyKey": "one"}
    mine = callers.ask("ann", "POST", "/retry-tasks", far)
    assert 201 == mine.status
    task_id = mine.body["taskId"]
    policy = {"policyId": "hers", "maxAttempts": 3}
    assert 201 == callers.ask("ann", "POST", "/retry-policies", policy).status
    before = callers.ask("ann", "GET", f"/retry-tasks/{task_id}").body

    for method, path in (
        ("GET", ""),
        ("GET", "/attempts"),
        ("GET", "/explain"),
        ("POST", "/retry"),
        ("DELETE", ""),
    ):
        assert 404 == callers.ask("bob", method, f"/retry-tasks/{task_id}{path}").status
    for path in ("/retry-tasks", "/dead-letters", "/downstreams"):
        assert [] == callers.ask("bob", "GET", path).body["items"]
    assert 404 == callers.ask("bob", "GET", "/retry-policies/hers").status
    assert 404 == callers.ask("bob", "DELETE", "/retry-policies/hers").status
    lane = before["lane"].replace("/", "%2F")
    assert 404 == callers.ask("bob", "POST", f"/downstreams/{lane}/pause").status
    named = callers.ask("bob", "POST", "/retry-tasks", {"targetUrl": TARGET, "policyId": "hers"})
    assert (422, "policyId") == (named.status, named.body["field"])

    his = callers.ask("bob", "POST", "/retry-tasks", far)
    assert 201 == his.status  # the same key, and another's: no conflict, and no leak
    assert task_id != his.body["taskId"]
    assert before == callers.ask("ann", "GET", f"/retry-tasks/{task_id}").body
    listed = callers.ask("ann", "GET", "/retry-tasks").body
    assert [task_id] == [task["taskId"] for task in listed["items"]]
    assert "bob" not in json.dumps(listed)


def test_only_the_operator_reads_metrics_of_the_process(tmp_path: Path) -> None:
    """A tenant reads only its own numbers."""
    with two_tenants(tmp_path, "--set", "operator=bob") as callers:
        far = {"targetUrl": TARGET, "delayMs": 3_600_000}
        for tenant in ("ann", "ann", "bob"):
            assert 201 == callers.ask(tenant, "POST", "/retry-tasks", far).status
        anns, bobs = (callers.ask(tenant, "GET", "/metrics").body for tenant in ("ann", "bob"))
    assert 'retry_tasks{status="PENDING"} 2.0' in anns
    assert "retry_attempts_total" not in anns
    assert 'retry_tasks{status="PENDING"} 3.0' in bobs
    assert "retry_attempts_total" in bobs
