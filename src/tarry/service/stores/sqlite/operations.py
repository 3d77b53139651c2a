"""The write operations by name, with the types of their arguments and results.

The name and the types are what the writer process needs to run an operation for another process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import msgspec

from tarry.service.model import ApiKey, PolicyVersion, ReplayRecord
from tarry.service.store import (
    AddResult,
    CancelStatus,
    ClaimResult,
    FinishStatus,
    Lease,
    NewTask,
    PolicyWriteStatus,
    Release,
    Retention,
    RetryNowStatus,
    SweepResult,
    TaskFilter,
)
from tarry.service.stores.sqlite import (
    add,
    api_keys,
    claim,
    dead_letters,
    finish,
    lanes,
    policies,
    retention,
    transitions,
)
from tarry.service.stores.sqlite.add import InitialState
from tarry.service.stores.sqlite.finish import PackedResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.stores.sqlite.transaction import Transaction


P = ParamSpec("P")
T = TypeVar("T")


class Operation:
    """A function that runs in a transaction, and the decoders of its arguments and its result."""

    def __init__(self, run: Callable[..., Any], takes: Any, gives: Any) -> None:
        self.run: Callable[..., Any] = run
        self.taken: msgspec.msgpack.Decoder[tuple[Any, ...]] = msgspec.msgpack.Decoder(takes)
        self.given: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(gives)


def ping(tx: Transaction) -> int:
    """Write and read a value, to see whether the store works; return the store's time."""
    tx.execute("UPDATE meta SET value = ? WHERE name = 'pinged'", (tx.now,))
    return tx.now


OPERATIONS: dict[str, Operation] = {
    name: Operation(run, takes, gives)
    for name, run, takes, gives in (
        (
            "add",
            add.add,
            tuple[list[NewTask], Lease | None, int | None],
            list[InitialState | AddResult],
        ),
        ("claim", claim.claim, tuple[Lease, int, int, list[str]], ClaimResult),
        ("finish", finish.finish, tuple[list[PackedResult]], list[FinishStatus]),
        ("release", transitions.release, tuple[list[Release]], list[FinishStatus]),
        ("cancel", transitions.cancel, tuple[str, str], CancelStatus | None),
        ("retry_now", transitions.retry_now, tuple[str, str], RetryNowStatus | None),
        ("park", lanes.park, tuple[str, int, int, int], None),
        ("unpark", lanes.unpark, tuple[str], None),
        ("resume", lanes.resume, tuple[str], None),
        ("pause", lanes.pause, tuple[str], None),
        ("start_replay", dead_letters.start_replay, tuple[ReplayRecord], ReplayRecord),
        ("replay_step", dead_letters.replay_step, tuple[str, int], ReplayRecord | None),
        ("cancel_replay", dead_letters.cancel_replay, tuple[str, str], ReplayRecord | None),
        ("purge", dead_letters.purge, tuple[str, TaskFilter, int, int], tuple[int, int | None]),
        (
            "put_policy",
            policies.put_policy,
            tuple[PolicyVersion, bool],
            tuple[PolicyWriteStatus, PolicyVersion],
        ),
        ("delete_policy", policies.delete_policy, tuple[str, str], PolicyWriteStatus),
        ("put_key", api_keys.put_key, tuple[ApiKey], None),
        ("revoke_key", api_keys.revoke_key, tuple[str], bool),
        ("sweep", retention.sweep, tuple[Retention, int], SweepResult),
        ("forget_orphans", retention.forget_orphans, tuple[list[str]], None),
        ("ping", ping, tuple[()], int),
        ("recover_leases", transitions.recover_leases, tuple[int], bool),
    )
}


NAMES = {operation.run: name for name, operation in OPERATIONS.items()}


class Call(Generic[T]):
    """A write operation with its arguments."""

    __slots__ = ("arguments", "run")

    def __init__(
        self, run: Callable[Concatenate[Transaction, P], T], *arguments: P.args, **named: P.kwargs
    ) -> None:
        del named  # only in the signature for type checkers: arguments are sent by position
        self.run: Callable[..., T] = run
        self.arguments: tuple[Any, ...] = arguments

    def __call__(self, tx: Transaction) -> T:
        """Run the operation."""
        return self.run(tx, *self.arguments)
