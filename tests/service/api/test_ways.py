"""A task can be made in two ways, whole or in pieces: nobody can tell by the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tarry.errors import Overloaded, StoreUnavailable
from tarry.service.api.auth import make_key
from tarry.service.api.context import ApiLimits
from tests.service.api.harness import TARGET, Reply, Rig, with_rig

TASK = json.dumps({"targetUrl": TARGET, "idempotencyKey": "k"}).encode()
SMALL = ApiLimits(
    max_request_bytes=4096, inline_body_bytes=64, tenant_tasks_per_s=1.0, tenant_burst=3.0
)
JSON = {"content-type": "application/json"}


def both_ways(
    body: bytes, headers: dict[str, str], *, error: Exception | None = None, **options: Any
) -> list[tuple[Sequence[Reply], int]]:
    """Ask twice in each way; return the answers, and how many tasks there are."""

    async def test(rig: Rig, pieces: bytes | list[bytes]) -> tuple[Sequence[Reply], int]:
        rig.engine.error = error
        asked = [
            await rig.ask("POST", "/retry-tasks", body=pieces, headers=headers) for _ in range(2)
        ]
        return asked, await rig.count()

    ways: list[bytes | list[bytes]] = [body, [body[:9], body[9:]]]
    return [with_rig(partial(test, pieces=way), **options) for way in ways]


@pytest.mark.parametrize(
    ("body", "headers", "statuses"),
    [
        (TASK, JSON, [201, 200]),
        (TASK[:-1] + b', "body": "' + b"x" * 100 + b'"}', JSON, [201, 200]),
        (TASK[:-1] + b', "policy": {"maxAttempts": 2}}', JSON, [201, 200]),
        (TASK[:-1] + b', "policyId": "none"}', JSON, [422, 422]),
        (TASK[:-1] + b', "bodyRef": "default/missing"}', JSON, [422, 422]),
        (TASK, {**JSON, "idempotency-key": '"k"'}, [201, 200]),
        (TASK, {**JSON, "idempotency-key": '"other"'}, [422, 422]),
        (TASK, {**JSON, "idempotency-key": '"k'}, [400, 400]),
        (TASK, {**JSON, "origin": "http://evil.example"}, [403, 403]),
        (TASK, {"content-type": "text/plain"}, [415, 415]),
        (TASK + b" " * 4096, JSON, [413, 413]),
        (TASK[:-1], JSON, [400, 400]),
        (TASK[:-1] + b', "body": ' + b"[" * 3000 + b"]" * 1000, JSON, [400, 400]),
        (TASK.replace(b"https", b"ftp"), JSON, [422, 422]),
        (TASK, {**JSON, "prefer": "wait=0"}, [201, 200]),
    ],
)
def test_an_answer_is_the_same_both_ways(
    body: bytes, headers: dict[str, str], statuses: list[int]
) -> None:
    """Status, headers and body, and what is kept."""
    (whole, kept), (pieces, kept_too) = both_ways(body, headers, limits=SMALL)
    assert statuses == [reply.status for reply in whole]
    assert [reply.messages for reply in pieces] == [reply.messages for reply in whole]
    assert kept_too == kept == (201 in statuses)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StoreUnavailable("gone"), 503),
        (Overloaded("too much", retry_after=2.0), 503),
        (ZeroDivisionError(), 500),
    ],
)
def test_an_error_is_told_the_same_both_ways(error: Exception, status: int) -> None:
    """Whatever the engine raises."""
    (whole, _), (pieces, _) = both_ways(TASK, JSON, error=error)
    assert {status} == {reply.problem["status"] for reply in whole}
    assert [reply.messages for reply in pieces] == [reply.messages for reply in whole]


def test_another_host_is_refused_both_ways() -> None:
    """421, where no key is needed."""
    (whole, _), (pieces, _) = both_ways(TASK, JSON, hosts=frozenset({"tarry.internal"}))
    assert {421} == {reply.problem["status"] for reply in whole}
    assert [reply.messages for reply in pieces] == [reply.messages for reply in whole]


def test_a_key_is_asked_for_both_ways() -> None:
    """One that is not known, one that is looked up, and one that was a moment ago."""

    async def test(rig: Rig, pieces: bytes | list[bytes]) -> list[Any]:
        secret, key = make_key("acme", "1")

        async def ask(**headers: str) -> Reply:
            return await rig.ask("POST", "/retry-tasks", body=pieces, headers=headers)

        unknown = [await ask(), await ask(authorization=f"Bearer {secret}")]
        await rig.store.put_key(key)
        rig.time.ms += 60_000
        known = [await ask(authorization=f"Bearer {secret}") for _ in range(3)]
        assert [401, 401, 201, 200, 200] == [reply.status for reply in (*unknown, *known)]
        assert 1 == await rig.count("acme")
        return [reply.messages for reply in (*unknown, *known)]

    ways: list[bytes | list[bytes]] = [TASK, [TASK, b""]]
    whole, cut = (with_rig(partial(test, pieces=way), keys=True) for way in ways)
    assert cut == whole


def test_what_is_cancelled_inside_is_an_answer() -> None:
    """A write that is given up on does not leave its caller without a word."""

    async def test(rig: Rig) -> None:
        await rig.create()
        given_up = asyncio.get_running_loop().create_future()
        given_up.cancel()
        rig.engine.submit = lambda *_: given_up  # type: ignore[method-assign]
        assert 500 == (await rig.ask("POST", "/retry-tasks", body=TASK)).problem["status"]

    with_rig(test)
