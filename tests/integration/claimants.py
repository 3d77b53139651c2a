"""Processes that claim one idempotency key concurrently.

Each process runs this file: it prints "ready", waits for a line on stdin, and prints how many of
its claims got the key.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from tarry.idempotency.postgres_store import PostgresStore
from tarry.idempotency.redis_store import RedisStore
from tarry.idempotency.sqlite_store import SqliteStore
from tarry.idempotency.store import IdempotencyStore

CLAIMS_PER_PROCESS = (17, 17, 16)
"""50 claims from 3 processes."""
ROOT = Path(__file__).parents[2]


def count_winners(engine: str, address: str, name: str) -> list[int]:
    """Start the processes and return how many claims of each process got the key."""
    command = [sys.executable, "-m", "tests.integration.claimants", engine, address, name]
    processes = [
        subprocess.Popen(
            [*command, str(claims)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for claims in CLAIMS_PER_PROCESS
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert "ready\n" == process.stdout.readline()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [int(process.communicate(timeout=30)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def open_store(engine: str, address: str, name: str) -> IdempotencyStore:
    """Open a store whose table or key prefix is `name`."""
    if engine == "sqlite":
        return SqliteStore(address)
    if engine == "postgres":
        return PostgresStore(address, table=name)
    return RedisStore(address, prefix=name)


async def claim_concurrently(store: IdempotencyStore, claims: int) -> int:
    """Claim the key `claims` times concurrently, and return how many claims got it."""
    owners = [f"{os.getpid()} {number}" for number in range(claims)]
    results = await asyncio.gather(*(store.claim("k", "print", owner, 60) for owner in owners))
    await store.close()
    return results.count(None)


def main(engine: str, address: str, name: str, claims: str) -> None:
    """Run a process that makes claims."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    winners = asyncio.run(claim_concurrently(open_store(engine, address, name), int(claims)))
    sys.stdout.write(f"{winners}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
