"""The owner of a lease."""

from __future__ import annotations

import os

import pytest

from tarry.idempotency import MemoryStore
from tarry.idempotency.lease import KeyLease, LeaseContext
from tests.idempotency.asgi_client import make_scope


def new_owner() -> str:
    """Return the owner of a new lease."""
    context = LeaseContext(
        MemoryStore(),
        lease_s=30.0,
        retention_s=60.0,
        max_response_bytes=0,
        stores_error_responses=False,
    )
    return KeyLease(context, "k", "print", make_scope())._owner


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_owners_are_unique() -> None:
    """No two requests have the same owner, in one process or in a forked one."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, f"{new_owner()}\n{new_owner()}".encode())
        os._exit(0)
    os.waitpid(child, 0)

    owners = [*os.read(reading, 1000).decode().split("\n"), new_owner(), new_owner()]

    assert 4 == len(set(owners))
