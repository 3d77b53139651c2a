"""Owners of leases."""

from __future__ import annotations

import os

import pytest

from tarry.idempotency import MemoryStore
from tarry.idempotency.lease import KeyLease, LeaseContext
from tests.idempotency.asgi_client import make_scope


def make_owner() -> str:
    """Create a lease and return its owner."""
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
    """All leases have different owners, also in a forked process."""
    read_fd, write_fd = os.pipe()
    if not (child_pid := os.fork()):
        os.write(write_fd, f"{make_owner()}\n{make_owner()}".encode())
        os._exit(0)
    os.waitpid(child_pid, 0)

    owners = [*os.read(read_fd, 1000).decode().split("\n"), make_owner(), make_owner()]

    assert 4 == len(set(owners))
