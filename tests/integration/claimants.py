"""Processes that claim one idempotency key at the same moment.

Each process runs this file: it prints that it is ready, waits for a line, and prints how
many of its claims got the key.
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

SHARES = (17, 17, 16)
"""50 claims from 3 processes."""
ROOT = Path(__file__).parents[2]


def count_winners(engine: str, address: str, name: str) -> list[int]:
    """Start the processes and return how many claims of each process got the key."""
    command = [sys.executable, "-m", "tests.integration.claimants", engine, address, name]
    crowd = [
        subprocess.Popen(
            [*command, str(share)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in SHARES
    ]
    try:
        for process in crowd:
            assert process.stdout is not None
            assert "ready\n" == process.stdout.readline()
        for process in crowd:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [int(process.communicate(timeout=30)[0]) for process in crowd]
    finally:
        for process in crowd:
            process.kill()
            process.communicate()


def open_store(engine: str, address: str, name: str) -> IdempotencyStore:
    """Open a store with its own records, under a name."""
    if engine == "sqlite":
        return SqliteStore(address)
    if engine == "postgres":
        return PostgresStore(address, table=name)
    return RedisStore(address, prefix=name)


async def claim(store: IdempotencyStore, share: int) -> int:
    """Claim the key concurrently, and return how many claims got it."""
    owners = [f"{os.getpid()} {number}" for number in range(share)]
    answers = await asyncio.gather(*(store.claim("k", "print", owner, 60) for owner in owners))
    await store.close()
    return answers.count(None)


def main(engine: str, address: str, name: str, share: str) -> None:
    """Run one of the processes."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    won = asyncio.run(claim(open_store(engine, address, name), int(share)))
    sys.stdout.write(f"{won}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
