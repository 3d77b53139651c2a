"""What is kept of a request that carries a key, and what that means for the next one with it.

    (free) ──claim──▶ RUNNING ──finish──▶ FINISHED ──time is up──▶ (free)
                         └──release, or its lease runs out──▶ (free)

One moment, `free_at`, drives it all: it is the end of the lease while the first request runs, and
the end of the record's life once it has finished. A key is free when that moment has passed.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class StoredResponse(NamedTuple):
    """What the first request was answered with."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes | None
    """None: it was too large to keep. It cannot be replayed, and the request is not run again."""


class Record(NamedTuple):
    """The state of one key that is not free."""

    fingerprint: str
    """A digest of what was asked for: the same key may not ask for something else."""
    free_at: float
    """On the clock of the store."""
    response: StoredResponse | None
    """None while the first request runs."""


class Replay(NamedTuple):
    """Answer as the first request was answered."""

    response: StoredResponse


class Conflict(NamedTuple):
    """The first request still runs; its lease ends after so many seconds."""

    retry_after: float


class Mismatch(NamedTuple):
    """The key was used for something else."""


Verdict: TypeAlias = Replay | Conflict | Mismatch


def judge(record: Record, fingerprint: str, now: float) -> Verdict:
    """Say what becomes of a request whose key is taken."""
    if record.fingerprint != fingerprint:
        return Mismatch()
    if record.response is None:
        return Conflict(max(0.0, record.free_at - now))
    return Replay(record.response)
