"""The dependencies of the API. `tarry.service.app` builds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service import defaults

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.delivery.guard import Guard
    from tarry.service.encryption import Codec
    from tarry.service.engine.engine import Engine
    from tarry.service.payloads import BodyStore
    from tarry.service.store import Store


class ApiLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one request and one process."""

    max_request_bytes: int = defaults.MAX_REQUEST_BYTES
    """Largest JSON body of a request, except a batch."""
    max_batch_bytes: int = 16 << 20
    inline_body_bytes: int = defaults.INLINE_BODY_BYTES
    """A task body up to this size is stored with its task, a larger one in `body_store`."""
    max_headers: int = 100
    """Largest number of headers of one task."""
    max_header_bytes: int = 32 << 10
    """Largest total size of the header names and values of one task."""
    max_wait_s: int = 60
    """Longest wait for a result (`Prefer: wait`); a longer one is reduced to this."""
    max_waiting_requests: int = 2_000
    """Requests that may wait for a result at the same time; further requests do not wait. A tenant
    may have as many as are still free, see `TenantShares`."""
    max_event_streams: int = 200
    """Open event streams. A tenant may have as many as are still free."""
    max_policy_analyses: int = 4
    """Analyses of policies that may run at the same time, each in a process of its own. A tenant
    may have as many as are still free."""
    max_attempt_timeout_s: float = defaults.MAX_ATTEMPT_TIMEOUT_MS / 1000
    """Longest attempt timeout of a policy. Leases are longer than this."""
    max_tenant_policy_versions: int | None = defaults.MAX_TENANT_POLICY_VERSIONS
    """Versions of all policies of a tenant (setting `tenant_policy_versions`); None: no limit."""


class ApiContext(msgspec.Struct, frozen=True, kw_only=True):
    """The objects and settings that the handlers of the API use."""

    engine: Engine
    store: Store
    body_store: BodyStore
    """Object storage for large task bodies."""
    codec: Codec
    """Encodes task content for the store, encrypted if encryption keys are configured."""
    target_guard: Guard
    """Blocks targets that attempts must not connect to."""
    new_id: Callable[[], str]
    """Returns a new UUIDv7."""
    monotonic: Callable[[], float]
    render_metrics: Callable[[str | None, str], Awaitable[tuple[bytes, str]]]
    """Returns the metrics of one tenant (None: of all tenants), and their content type. The second
    argument is the `Accept` header of the request."""
    require_api_keys: bool = False
    """Whether an API key is required; if not, every request belongs to the default tenant."""
    operator_tenant: str = ""
    """The tenant whose keys may read the metrics of all tenants, and list the processes."""
    accepted_host_names: frozenset[str] | None = None
    """Names accepted in the `Host` header, besides loopback names; None: all names."""
    role: str = "all"
    """The setting `role`: `all`, `api` or `worker`."""
    compatibility: tuple[str, ...] = ()
    """The setting `compatibility`: names of the APIs of other vendors that are served."""
    allowed_methods: tuple[str, ...] = ()
    """The setting `allow_methods`: methods of tasks besides `STANDARD_METHODS`."""
    has_grpc: bool = True
    """Whether gRPC targets are supported (grpcio is installed)."""
    limits: ApiLimits = ApiLimits()
