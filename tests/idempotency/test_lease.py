"""Leases: who owns one."""

from __future__ import annotations

import os

import pytest

from tarry.idempotency import MemoryStore
from tarry.idempotency.lease import KeyLease, LeaseContext
from tests.idempotency.asking import scope_of


def owner() -> str:
    """The owner of a new lease."""
    terms = LeaseContext(
        MemoryStore(), lease=30.0, retention=60.0, max_response_bytes=0, store_errors=False
    )
    return KeyLease(terms, "k", "print", scope_of())._owner


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_no_two_requests_have_one_owner() -> None:
    """Neither in a process, nor in one that was forked from it."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, f"{owner()}\n{owner()}".encode())
        os._exit(0)
    os.waitpid(child, 0)

    owners = [*os.read(reading, 1000).decode().split("\n"), owner(), owner()]

    assert 4 == len(set(owners))
