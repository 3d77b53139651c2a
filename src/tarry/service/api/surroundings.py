"""What the API needs around it. The composition root makes it, and tests make another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from tarry.core.policy import Policy
    from tarry.service.delivery.messages import DeliveryResult
    from tarry.service.delivery.targets import Target
    from tarry.service.model import AttemptRecord, Status, Task, TaskContent
    from tarry.service.store import AddResult, CancelStatus, NewTask, RetryNowStatus, Store


class Chosen(Protocol):
    """A policy and its version; None for one that comes with the service."""

    policy: Policy
    version: int | None


class Policies(Protocol):
    """The policies in force."""

    def known(self, task: Task, overrides: Mapping[str, Any] | None) -> Chosen | None:
        """Return a task's policy if it is at hand."""
        ...

    async def read(self, tenant: str, policy_id: str, version: int | None = None) -> Chosen | None:
        """Look a policy up."""
        ...

    def forget(self, tenant: str, policy_id: str) -> None:
        """Look a policy up again the next time."""
        ...


class Event(Protocol):
    """Something that happened to a task or to a lane."""

    kind: str
    at: int
    lane: str
    task_id: str | None
    policy_id: str | None
    attempt: AttemptRecord | None
    reason: str | None
    next_attempt_at: int | None
    attempts: int | None


class Subscription(Protocol):
    """A bounded queue of a tenant's events."""

    missed: int

    async def next(self) -> Event:
        """Wait for the next event."""
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


class Events(Protocol):
    """What happens in this process."""

    def subscribe(self, tenant: str) -> Subscription:
        """Queue a tenant's events for a slow reader."""
        ...


class Settled(Protocol):
    """How a task ended, and the last answer of its target."""

    status: Status
    reason: str | None
    delivered: DeliveryResult | None


class Health(Protocol):
    """What is out of order."""

    @property
    def ills(self) -> dict[str, str]:
        """The parts that are out of order, and why."""
        ...


class Clock(Protocol):
    """The store's time."""

    def now(self) -> int:
        """Return epoch milliseconds."""
        ...


class Engine(Protocol):
    """What the API asks of the engine."""

    @property
    def events(self) -> Events:
        """What happens in this process."""
        ...

    @property
    def policies(self) -> Policies:
        """The policies in force."""
        ...

    @property
    def health(self) -> Health:
        """What is out of order."""
        ...

    @property
    def clock(self) -> Clock:
        """The store's time."""
        ...

    def submit(
        self, news: list[NewTask], contents: Sequence[TaskContent] | None = None
    ) -> Awaitable[Sequence[AddResult]]:
        """Add tasks; when it has answered they are durable, also when nobody waits for it."""
        ...

    async def settled(self, task_id: str, seconds: float) -> Settled | None:
        """Wait for the end of a task, for so long."""
        ...

    async def cancel(self, tenant: str, task_id: str) -> CancelStatus | None:
        """Cancel a task."""
        ...

    async def retry_now(self, tenant: str, task_id: str) -> RetryNowStatus | None:
        """Make a task due."""
        ...

    async def pause(self, lane: str) -> None:
        """Stop a lane until somebody resumes it."""
        ...

    async def resume(self, lane: str) -> None:
        """Open a lane."""
        ...

    async def reset(self, lane: str) -> None:
        """Forget what was learnt of a downstream, and open its lane."""
        ...

    def standing(self, lane: str) -> dict[str, Any] | None:
        """Say what this process knows of a lane."""
        ...


class Payloads(Protocol):
    """Where large bodies lie."""

    async def put(self, tenant: str, task_id: str, body: bytes) -> tuple[str, bytes]:
        """Keep a body; return its name and its SHA-256."""
        ...

    def check_ref(self, tenant: str, ref: str) -> str:
        """Return the name of a caller's object, or say what is wrong with it."""
        ...

    async def stamp(self, ref: str) -> tuple[int, str | None]:
        """Return the size and the tag of a caller's object, which must be there."""
        ...

    async def delete(self, refs: Sequence[str]) -> None:
        """Delete bodies; one that is not there is deleted."""
        ...


class Seal(Protocol):
    """How a content lies in a store."""

    def pack(self, content: TaskContent) -> bytes:
        """Return a content as a store keeps it."""
        ...

    def unpack(self, stored: bytes) -> TaskContent:
        """Return what `pack` was given."""
        ...


class Guard(Protocol):
    """Which targets may be called."""

    def check_url(self, target: Target) -> None:
        """Refuse a target whose URL alone shows that it is not allowed."""
        ...


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much one request, and one tenant, may ask for."""

    request: int = 1 << 20
    """Bytes of the JSON of one task, or of any other request that is no batch."""
    batch: int = 16 << 20
    """Bytes of the JSON of a batch."""
    inline: int = 16 << 10
    """Bytes of a body that is kept with its task; a larger one goes to the payloads."""
    headers: int = 100
    header_bytes: int = 32 << 10
    wait: int = 60
    """Seconds that `Prefer: wait` may ask for."""
    waiting: int = 1_000
    """Requests that wait for an outcome at a time; the preference of others is not applied."""
    streams: int = 100
    """Readers of `/events` at a time."""
    attempt_timeout: float = 300.0
    """Seconds that one attempt may be given by a policy; a lease is longer."""
    rate: float | None = None
    """Tasks a second that one tenant may add in the long run."""
    burst: float = 1_000.0
    """Tasks that a tenant may add at once before `rate` holds it back."""


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the API asks of others."""

    engine: Engine
    store: Store
    payloads: Payloads
    seal: Seal
    guard: Guard
    new_id: Callable[[], str]
    """Make a UUIDv7."""
    monotonic: Callable[[], float]
    metrics: Callable[[str | None], Awaitable[tuple[bytes, str]]]
    """Return the metrics, of one tenant or of all, as a text, and its content type."""
    keys: bool = False
    """Whether API keys are demanded; without them everything belongs to one tenant."""
    operator: str = ""
    """The tenant whose keys see the metrics of all."""
    hosts: frozenset[str] | None = None
    """The names, beside those of loopback, that requests may be sent to; None asks for none."""
    grpc: bool = True
    """Whether gRPC targets can be called."""
    limits: Limits = Limits()
