"""What the service can be told, and what it goes by unless it is."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

DEFAULT = "default"
SECRETS = frozenset({"encryption_keys", "signing_secrets"})
_REDACTED = "[redacted]"
GRACE_MS = 5_000
"""Milliseconds that a lease must leave after the longest attempt, to write down what came of it."""

_Positive = Annotated[int, Meta(ge=1)]
_NotNegative = Annotated[int, Meta(ge=0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every value that the service goes by."""

    store: Annotated[str, Meta(description="Where tasks are kept: sqlite:PATH or memory:")] = (
        "sqlite:tarry-data/tarry.db"
    )
    bodies: Annotated[
        str, Meta(description="Where large bodies are kept: a folder, or s3://, gs://, az://")
    ] = ""
    bodies_endpoint: Annotated[
        str, Meta(description="The server of an S3 that is not Amazon's: http://minio:9000")
    ] = ""
    host: Annotated[str, Meta(description="The address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="The port; 0 takes a free one")] = 8080
    dev: Annotated[bool, Meta(description="Allow loopback targets, for trying things out")] = False
    allow_target: Annotated[
        tuple[str, ...],
        Meta(description="Targets allowed beside public addresses: networks and host names"),
    ] = ()
    require_keys: Annotated[bool, Meta(description="Demand API keys also on loopback")] = False
    operator: Annotated[
        str, Meta(description="The tenant whose keys see the metrics of all tenants")
    ] = ""
    allow_host: Annotated[
        tuple[str, ...],
        Meta(description="Host names that requests may be sent to on loopback, beside its own"),
    ] = ()
    horizon_ms: Annotated[_Positive, Meta(description="How far ahead tasks are claimed")] = 1_000
    max_attempt_timeout_ms: Annotated[
        _Positive, Meta(description="The longest attemptTimeoutMs that a policy may ask for")
    ] = 60_000
    lease_ms: Annotated[
        int,
        Meta(ge=0, description="How long a claimed task is a worker's; 0 works it out"),
    ] = 0
    in_flight: Annotated[_Positive, Meta(description="Attempts at a time")] = 512
    lane_in_flight: Annotated[_Positive, Meta(description="Attempts at a time, of a lane")] = 128
    max_body_bytes: Annotated[
        _Positive, Meta(description="The largest body of a request to the API")
    ] = 10_485_760
    head_timeout_ms: Annotated[
        _Positive, Meta(description="How long the head of a request may take to arrive")
    ] = 10_000
    body_timeout_ms: Annotated[
        _Positive, Meta(description="How long the body of a request may take to arrive")
    ] = 60_000
    inline_body_bytes: Annotated[
        _NotNegative, Meta(description="Larger bodies go to where large bodies are kept")
    ] = 16_384
    max_response_bytes: Annotated[
        _Positive, Meta(description="How much of a target's answer is read")
    ] = 1_048_576
    tenant_pending: Annotated[
        _NotNegative, Meta(description="Live tasks that a tenant may have; 0 is no limit")
    ] = 0
    tenant_rate: Annotated[
        float, Meta(ge=0, description="Tasks a second that a tenant may add; 0 is no limit")
    ] = 0.0
    keep_succeeded_ms: Annotated[
        _Positive, Meta(description="How long succeeded and cancelled tasks are kept")
    ] = 604_800_000
    keep_dead_ms: Annotated[_Positive, Meta(description="How long dead letters are kept")] = (
        2_592_000_000
    )
    egress_proxy: Annotated[str, Meta(description="A proxy for all attempts: http://host:port")] = (
        ""
    )
    ca_file: Annotated[
        str, Meta(description="Certificates to trust instead of the system's: a PEM file")
    ] = ""
    signing_secrets: Annotated[
        tuple[str, ...],
        Meta(description="Standard Webhooks secrets (whsec_...), the newest first"),
    ] = ()
    encryption_keys: Annotated[
        tuple[str, ...],
        Meta(description="Keys that encrypt what is kept, the newest first"),
    ] = ()
    drain_ms: Annotated[
        _NotNegative, Meta(description="How long running attempts are waited for at the end")
    ] = 30_000
    log: Annotated[Literal["text", "json"], Meta(description="text or json")] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="The least level to log")
    ] = "info"

    @property
    def lease(self) -> int:
        """The length of a lease in ms."""
        return self.lease_ms or self.max_attempt_timeout_ms + 2 * GRACE_MS


class Loaded(msgspec.Struct, frozen=True):
    """The settings in force, and where each of them came from."""

    settings: Settings
    origins: dict[str, str]

    def harmless(self, name: str) -> Any:
        """Return a value as it may be seen: without its secrets."""
        value = getattr(self.settings, name)
        if name in SECRETS:
            return (_REDACTED,) * len(value)
        if name == "egress_proxy" and "@" in value:
            scheme, _, rest = value.rpartition("://")
            return f"{scheme}://{_REDACTED}@{rest.rpartition('@')[2]}"
        return value

    def shown(self, name: str) -> str:
        """Return a value as people see it."""
        value = self.harmless(name)
        if name in SECRETS:
            return f"{len(value)} kept secret" if value else "none"
        if isinstance(value, tuple):
            return ", ".join(map(str, cast("tuple[object, ...]", value))) or "none"
        return str(value).lower() if isinstance(value, bool) else str(value)
