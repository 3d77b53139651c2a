"""Hostile and well-behaved targets of a running service, and the states of their tasks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tarry.service.delivery import Fault
from tests.integration.hostile import METADATA, HostileTargets, hostile_targets
from tests.integration.service import Service, service
from tests.integration.test_hostile import EXPECTED

TWICE = {"maxAttempts": 2, "initialDelayMs": 1, "maxDelayMs": 10}
HONEST = 50
MOST_GROWTH = 100 * 1024
"""KiB: the hostile targets send gigabytes when they are let."""


@pytest.fixture(scope="module")
def hostile() -> Iterator[HostileTargets]:
    """Run the hostile targets."""
    with hostile_targets() as targets:
        yield targets


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, hostile: HostileTargets) -> Iterator[Service]:
    """Run a service that trusts the CA of the targets."""
    trusting = ("env", f"SSL_CERT_FILE={hostile.ca}")
    with service(tmp_path_factory.mktemp("service"), within=trusting) as one:
        yield one


def _with_own_lane(url: str, name: str) -> str:
    """Give a target its own host name, so that it does not park another lane."""
    return url.replace("127.0.0.1", f"{name}.localhost", 1)


def _peak_memory_kib(running: Service) -> int:
    """Return the peak memory of the process in KiB."""
    lines = Path(f"/proc/{running.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _post(running: Service, hostile: HostileTargets, name: str) -> str:
    timeout = 500 if EXPECTED[name] is Fault.TIMEOUT else 30_000
    task_id: str = running.post(
        targetUrl=_with_own_lane(hostile.url, name) + name,
        body="hello",
        policy={**TWICE, "attemptTimeoutMs": timeout},
    )["taskId"]
    return task_id


def _judge(name: str, task: dict[str, Any], log: list[dict[str, Any]]) -> None:
    expected = EXPECTED[name]
    shown = [(attempt["responseStatus"], attempt["errorClass"]) for attempt in log]
    if expected == 200:
        assert "SUCCEEDED" == task["status"]
        assert [(200, None)] == shown
    elif isinstance(expected, Fault):
        assert ("EXHAUSTED", "attempts") == (task["status"], task["reason"])
        assert [(None, str(expected))] * 2 == shown
        assert all(attempt["errorMessage"] for attempt in log)
    else:
        retried = expected == 500
        reason = "attempts" if retried else "permanent"
        assert ("EXHAUSTED", reason) == (task["status"], task["reason"])
        assert [(expected, None)] * (2 if retried else 1) == shown
    for attempt in log:
        assert len(attempt["responseExcerpt"] or "") <= 512
        assert len(attempt["errorMessage"] or "") <= 512


@pytest.mark.timeout(180)
def test_hostile_targets_do_not_affect_others(running: Service, hostile: HostileTargets) -> None:
    """Each task is retried or exhausted for its reason; others are served in little memory."""
    before = _peak_memory_kib(running)
    ids = {name: _post(running, hostile, name) for name in EXPECTED}
    honest = [running.post(targetUrl=hostile.url + "ok")["taskId"] for _ in range(HONEST)]
    assert {"SUCCEEDED"} == {running.wait_until_finished(task_id)["status"] for task_id in honest}
    for name, task_id in ids.items():
        _judge(name, running.wait_until_finished(task_id), running.attempts(task_id))
    assert 200 == running.request("GET", "/readyz")[0]
    assert _peak_memory_kib(running) - before < MOST_GROWTH


def test_redirect_to_metadata_is_logged_and_not_followed(
    running: Service, hostile: HostileTargets
) -> None:
    """There is one attempt, at the target of the task."""
    task = running.post(targetUrl=_with_own_lane(hostile.url, "there") + "redirect")
    assert "EXHAUSTED" == running.wait_until_finished(task["taskId"])["status"]
    [attempt] = running.attempts(task["taskId"])
    assert (302, "127.0.0.1") == (attempt["responseStatus"], attempt["remoteAddress"])
    refused = running.reply("POST", "/retry-tasks", {"targetUrl": METADATA})
    assert (422, "targetUrl") == (refused.status, refused.body["field"])


@pytest.mark.parametrize("kind", ["expired", "selfsigned", "wronghost"])
def test_invalid_certificate_is_retried(
    running: Service, hostile: HostileTargets, kind: str
) -> None:
    """Certificates are renewed, so the task is retried; the request is never sent."""
    before = len(hostile.seen)
    task = running.post(targetUrl=hostile.tls[kind] + "ok", policy=TWICE)
    assert "EXHAUSTED" == running.wait_until_finished(task["taskId"])["status"]
    assert ["tls", "tls"] == [attempt["errorClass"] for attempt in running.attempts(task["taskId"])]
    assert before == len(hostile.seen)


def test_valid_certificate_is_accepted(running: Service, hostile: HostileTargets) -> None:
    """A valid certificate succeeds, which shows that the test above can fail."""
    task = running.post(targetUrl=hostile.tls["good"] + "ok", policy=TWICE)
    assert "SUCCEEDED" == running.wait_until_finished(task["taskId"])["status"]


def test_target_that_closes_at_once(running: Service, hostile: HostileTargets) -> None:
    """The target closes before it reads anything, so there is no response."""
    task = running.post(targetUrl=hostile.closing, policy=TWICE)
    assert "attempts" == running.wait_until_finished(task["taskId"])["reason"]
    assert ["reset", "reset"] == [
        attempt["errorClass"] for attempt in running.attempts(task["taskId"])
    ]


def test_unknown_name_and_closed_port(running: Service) -> None:
    """The error classes before a connection are `dns` and `refused`."""
    for url, kind in (("http://nobody.invalid/", "dns"), ("http://127.0.0.1:1/", "refused")):
        task = running.post(targetUrl=url, policy=TWICE)
        assert "attempts" == running.wait_until_finished(task["taskId"])["reason"]
        assert [kind, kind] == [
            attempt["errorClass"] for attempt in running.attempts(task["taskId"])
        ]
