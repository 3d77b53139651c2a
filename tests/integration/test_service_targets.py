"""Hostile and healthy targets of a running service, and the states of their tasks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tarry.service.delivery import Fault
from tests.integration.hostile import METADATA_URL, HostileTargets, hostile_targets
from tests.integration.service import Service, service
from tests.integration.test_hostile import EXPECTED

TWO_ATTEMPTS = {"maxAttempts": 2, "initialDelayMs": 1, "maxDelayMs": 10}
HEALTHY_TASKS = 50
MAX_MEMORY_GROWTH_KIB = 100 * 1024
"""Without limits, the responses of the hostile targets are endless."""


@pytest.fixture(scope="module")
def hostile() -> Iterator[HostileTargets]:
    """Run targets that violate HTTP."""
    with hostile_targets() as targets:
        yield targets


@pytest.fixture(scope="module")
def running_service(
    tmp_path_factory: pytest.TempPathFactory, hostile: HostileTargets
) -> Iterator[Service]:
    """Run a service that trusts the CA of the targets."""
    trust_ca = ("env", f"SSL_CERT_FILE={hostile.ca_file}")
    with service(tmp_path_factory.mktemp("service"), command_prefix=trust_ca) as started:
        yield started


def _with_own_lane(url: str, name: str) -> str:
    """Return the URL with its own host name, and therefore with its own lane."""
    return url.replace("127.0.0.1", f"{name}.localhost", 1)


def _peak_memory_kib(running_service: Service) -> int:
    """Return the peak memory of the process in KiB."""
    lines = Path(f"/proc/{running_service.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _create_task(running_service: Service, hostile: HostileTargets, name: str) -> str:
    timeout = 500 if EXPECTED[name] is Fault.TIMEOUT else 30_000
    task_id: str = running_service.post(
        targetUrl=_with_own_lane(hostile.url, name) + name,
        body="hello",
        policy={**TWO_ATTEMPTS, "attemptTimeoutMs": timeout},
    )["taskId"]
    return task_id


def _check_task(name: str, task: dict[str, Any], attempts: list[dict[str, Any]]) -> None:
    expected = EXPECTED[name]
    results = [(attempt["responseStatus"], attempt["errorClass"]) for attempt in attempts]
    if expected == 200:
        assert "SUCCEEDED" == task["status"]
        assert [(200, None)] == results
    elif isinstance(expected, Fault):
        assert ("EXHAUSTED", "attempts") == (task["status"], task["reason"])
        assert [(None, str(expected))] * 2 == results
        assert all(attempt["errorMessage"] for attempt in attempts)
    else:
        retried = expected == 500
        reason = "attempts" if retried else "permanent"
        assert ("EXHAUSTED", reason) == (task["status"], task["reason"])
        assert [(expected, None)] * (2 if retried else 1) == results
    for attempt in attempts:
        assert len(attempt["responseExcerpt"] or "") <= 512
        assert len(attempt["errorMessage"] or "") <= 512


@pytest.mark.timeout(180)
def test_hostile_targets_do_not_affect_others(
    running_service: Service, hostile: HostileTargets
) -> None:
    """Each task has the expected status and reason; other tasks succeed; memory is bounded."""
    before = _peak_memory_kib(running_service)
    ids = {name: _create_task(running_service, hostile, name) for name in EXPECTED}
    healthy_ids = [
        running_service.post(targetUrl=hostile.url + "ok")["taskId"] for _ in range(HEALTHY_TASKS)
    ]
    assert {"SUCCEEDED"} == {
        running_service.wait_until_finished(task_id)["status"] for task_id in healthy_ids
    }
    for name, task_id in ids.items():
        _check_task(
            name, running_service.wait_until_finished(task_id), running_service.attempts(task_id)
        )
    assert 200 == running_service.request("GET", "/readyz")[0]
    assert _peak_memory_kib(running_service) - before < MAX_MEMORY_GROWTH_KIB


def test_redirect_to_metadata_is_logged_and_not_followed(
    running_service: Service, hostile: HostileTargets
) -> None:
    """The attempt log has the 302, and a task with the metadata address is rejected."""
    task = running_service.post(targetUrl=_with_own_lane(hostile.url, "redirecting") + "redirect")
    assert "EXHAUSTED" == running_service.wait_until_finished(task["taskId"])["status"]
    [attempt] = running_service.attempts(task["taskId"])
    assert (302, "127.0.0.1") == (attempt["responseStatus"], attempt["remoteAddress"])
    rejected = running_service.send("POST", "/retry-tasks", {"targetUrl": METADATA_URL})
    assert (422, "targetUrl") == (rejected.status, rejected.body["field"])


@pytest.mark.parametrize("certificate", ["expired", "selfsigned", "wronghost"])
def test_invalid_certificate_is_retried(
    running_service: Service, hostile: HostileTargets, certificate: str
) -> None:
    """The task is retried, because certificates are renewed, and no request is sent."""
    before = len(hostile.received_requests)
    task = running_service.post(targetUrl=hostile.tls_urls[certificate] + "ok", policy=TWO_ATTEMPTS)
    assert "EXHAUSTED" == running_service.wait_until_finished(task["taskId"])["status"]
    assert ["tls", "tls"] == [
        attempt["errorClass"] for attempt in running_service.attempts(task["taskId"])
    ]
    assert before == len(hostile.received_requests)


def test_valid_certificate_is_accepted(running_service: Service, hostile: HostileTargets) -> None:
    """A target with a valid certificate of a trusted CA succeeds."""
    task = running_service.post(targetUrl=hostile.tls_urls["good"] + "ok", policy=TWO_ATTEMPTS)
    assert "SUCCEEDED" == running_service.wait_until_finished(task["taskId"])["status"]


def test_connection_closed_before_the_request_is_retried(
    running_service: Service, hostile: HostileTargets
) -> None:
    """The error class of each attempt is `reset`."""
    task = running_service.post(targetUrl=hostile.closing_url, policy=TWO_ATTEMPTS)
    assert "attempts" == running_service.wait_until_finished(task["taskId"])["reason"]
    assert ["reset", "reset"] == [
        attempt["errorClass"] for attempt in running_service.attempts(task["taskId"])
    ]


def test_error_class_of_an_unknown_name_and_a_closed_port(running_service: Service) -> None:
    for url, error_class in (
        ("http://unknown.invalid/", "dns"),
        ("http://127.0.0.1:1/", "refused"),
    ):
        task = running_service.post(targetUrl=url, policy=TWO_ATTEMPTS)
        assert "attempts" == running_service.wait_until_finished(task["taskId"])["reason"]
        assert [error_class, error_class] == [
            attempt["errorClass"] for attempt in running_service.attempts(task["taskId"])
        ]
