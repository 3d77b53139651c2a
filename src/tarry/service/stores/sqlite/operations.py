"""The write operations by name, with the types of their arguments and results.

The service sends the name and the arguments of an operation to the writer process.
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

    def __init__(self, run: Callable[..., Any], argument_types: Any, result_type: Any) -> None:
        self.run: Callable[..., Any] = run
        self.decode_arguments: Callable[[msgspec.Raw], tuple[Any, ...]] = msgspec.msgpack.Decoder(
            argument_types
        ).decode
        self.decode_result: Callable[[msgspec.Raw], Any] = msgspec.msgpack.Decoder(
            result_type
        ).decode


def ping(tx: Transaction) -> int:
    """Write a value, to check that the store works; return the store's time."""
    tx.execute("UPDATE meta SET value = ? WHERE name = 'pinged'", (tx.now,))
    return tx.now


OPERATIONS: dict[str, Operation] = {
    run.__name__: Operation(run, argument_types, result_type)
    for run, argument_types, result_type in (
        (add.add, tuple[list[NewTask], Lease | None, int | None], list[InitialState | AddResult]),
        (claim.claim, tuple[Lease, int, int, list[str]], ClaimResult),
        (finish.finish, tuple[list[PackedResult]], list[FinishStatus]),
        (transitions.release, tuple[list[Release]], list[FinishStatus]),
        (transitions.cancel, tuple[str, str], CancelStatus | None),
        (transitions.retry_now, tuple[str, str], RetryNowStatus | None),
        (transitions.recover_leases, tuple[int], bool),
        (lanes.park, tuple[str, int, int, int], None),
        (lanes.unpark, tuple[str], None),
        (lanes.resume, tuple[str], None),
        (lanes.pause, tuple[str], None),
        (dead_letters.start_replay, tuple[ReplayRecord], ReplayRecord),
        (dead_letters.replay_step, tuple[str, int], ReplayRecord | None),
        (dead_letters.cancel_replay, tuple[str, str], ReplayRecord | None),
        (dead_letters.purge, tuple[str, TaskFilter, int, int], tuple[int, int | None]),
        (
            policies.put_policy,
            tuple[PolicyVersion, bool],
            tuple[PolicyWriteStatus, PolicyVersion],
        ),
        (policies.delete_policy, tuple[str, str], PolicyWriteStatus),
        (api_keys.put_key, tuple[ApiKey], None),
        (api_keys.revoke_key, tuple[str], bool),
        (retention.sweep, tuple[Retention, int], SweepResult),
        (retention.forget_orphans, tuple[list[str]], None),
        (ping, tuple[()], int),
    )
}
"""All write operations, by the name of their function."""


class OperationCall(Generic[T]):
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
