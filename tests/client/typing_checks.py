"""Types of the clients, which mypy checks; this code is never run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from datetime import UTC, datetime, timedelta
from typing import assert_type

import tarry
from tarry.client import AsyncClient, Client
from tarry.client.api import Health
from tarry.client.async_client import AsyncReplay
from tarry.client.client import Replay
from tarry.client.options import EnqueueArguments
from tarry.wire.tasks import (
    AttemptLog,
    BatchResult,
    DownstreamInfo,
    Explanation,
    RetryPolicy,
    RetryTask,
    ServiceEvent,
    SigningSecret,
)


def check_client() -> None:
    """Check the types of the arguments and results of `Client`."""
    with Client("http://127.0.0.1:8080", key="k", policy=tarry.Policy(), timeout=5) as client:
        assert_type(client, Client)
        task = client.enqueue(
            "https://example.com", {"a": 1}, delay=timedelta(1), headers={"A": "b"}, wait=5
        )
        assert_type(task, RetryTask)
        assert_type(client.enqueue("https://example.com", at=datetime.now(UTC)), RetryTask)
        client.enqueue("https://example.com", polcy="x")  # type: ignore[call-arg]
        client.enqueue("https://example.com", delay="5")  # type: ignore[arg-type]
        new: EnqueueArguments = {"url": "https://example.com", "body": b"bytes"}
        assert_type(client.enqueue_many([new, {"url": "x", "key": "y"}]), list[BatchResult])
        assert_type(client.get(task), RetryTask)
        assert_type(client.tasks(status="PENDING"), Iterator[RetryTask])
        client.tasks(status="DONE")  # type: ignore[arg-type]
        assert_type(client.attempts(task), Iterator[AttemptLog])
        assert_type(client.explain("id"), Explanation)
        assert_type(client.wait(task, timeout=5), RetryTask)
        assert_type(client.cancel("id"), RetryTask)
        assert_type(client.retry("id"), RetryTask)
        assert_type(client.replay(dry_run=True, rate=5), Replay)
        assert_type(client.replay(all=True).wait(timedelta(1)), Replay)
        assert_type(client.purge(lane="x"), int)
        assert_type(client.policies(), Iterator[RetryPolicy])
        assert_type(client.put_policy("x", tarry.Policy()), RetryPolicy)
        assert_type(client.put_policy("x", {"maxAttempts": 3}), RetryPolicy)
        assert_type(client.pause("x"), DownstreamInfo)
        assert_type(client.create_signing_secret(type="ED25519"), SigningSecret)
        client.create_signing_secret(type="RSA")  # type: ignore[arg-type]
        assert_type(client.signing_secrets(), list[SigningSecret])
        assert_type(client.events(), Generator[ServiceEvent, None, None])
        assert_type(client.health(), Health)


async def check_async_client() -> None:
    """Check the types of the arguments and results of `AsyncClient`."""
    async with AsyncClient("http://127.0.0.1:8080") as client:
        assert_type(client, AsyncClient)
        assert_type(await client.enqueue("https://example.com", "text", key="k"), RetryTask)
        assert_type(client.dead_letters(lane="x"), AsyncIterator[RetryTask])
        assert_type(await client.replay(all=True), AsyncReplay)
        assert_type(await (await client.replay(all=True)).refresh(), AsyncReplay)
        assert_type(await client.replays(), list[AsyncReplay])
        assert_type(client.events(), AsyncGenerator[ServiceEvent, None])
