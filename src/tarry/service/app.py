"""The composition root: builds the components of the service from its settings."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from functools import partial
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError, MissingExtra
from tarry.runtime.effects import effects

try:
    from uuid_utils import uuid7

    from tarry.service.api.application import Api
    from tarry.service.api.auth import DEFAULT_TENANT, is_loopback
    from tarry.service.api.context import ApiContext, ApiLimits
    from tarry.service.delivery import DeliveryDispatcher
    from tarry.service.delivery.client_certificates import ClientCertificate
    from tarry.service.delivery.dns import DnsCache
    from tarry.service.delivery.grpc import GrpcDeliveryClient
    from tarry.service.delivery.grpc import is_installed as has_grpc
    from tarry.service.delivery.guard import Guard
    from tarry.service.delivery.http1.client import HttpDeliveryClient
    from tarry.service.delivery.secret_sources import (
        CommandSource,
        EnvironmentSource,
        FileSource,
        TokenEndpoint,
        TokenSource,
    )
    from tarry.service.delivery.signing import Signer
    from tarry.service.delivery.targets import parse_target
    from tarry.service.encryption import Codec
    from tarry.service.engine.claim_turns import ClaimTurns
    from tarry.service.engine.context import (
        ADDING,
        BODY_STORE,
        DATA,
        EngineContext,
        EngineLimits,
        HealthCheck,
        ServiceHealth,
        StoreClock,
        check_partitions,
    )
    from tarry.service.engine.engine import Engine
    from tarry.service.engine.lanes import Lanes
    from tarry.service.engine.limits import LimitPattern, LimitTable
    from tarry.service.engine.metrics import Metrics
    from tarry.service.engine.policies import PolicyCache
    from tarry.service.engine.reporting import Reporter
    from tarry.service.engine.result_writer import build_callback_task
    from tarry.service.engine.secrets import Secret, SecretResolver
    from tarry.service.engine.signers import SignerCache
    from tarry.service.engine.store_values import StoreValuesCache
    from tarry.service.engine.tracing import AttemptTracer
    from tarry.service.file_descriptors import current_limit, share_descriptors
    from tarry.service.model import WorkerRecord
    from tarry.service.payloads import BodyStore
    from tarry.service.settings import DEFAULT_STORE, check_setting, environment_variables
    from tarry.service.shutdown import cancel_and_wait, run_bounded
    from tarry.service.store import LeaseTerms, Retention
    from tarry.service.store_url import (
        StoreEngine,
        find_engine,
        missing_store,
        redact_store_url,
        sqlite_path,
    )
    from tarry.service.task_search import TaskFinder
    from tarry.service.transfer import check_not_moved
except ImportError as _missing:
    _message = f"the service needs {_missing.name}: pip install 'tarry[service]'"
    raise MissingExtra(_message) from _missing

if TYPE_CHECKING:
    from tarry.service.delivery import DeliveryClient
    from tarry.service.delivery.secret_sources import SecretSource
    from tarry.service.file_descriptors import DescriptorShares
    from tarry.service.settings import SecretDefinition, Settings
    from tarry.service.store import Store
    from tarry.wire.http import Receive, Scope, Send

# Checks of an S3 bucket cost money: these are at most 2,880 a day for each process.
_BODY_STORE_CHECK_INTERVAL_S = 30.0
_FAILING_BODY_STORE_CHECK_INTERVAL_S = 5.0
_STORE_CHECK_INTERVAL_S = 1.0
_logger = logging.getLogger("tarry.service")

_SERVER_STORE_BODIES = Path("tarry-data/bodies")
"""The folder for large bodies if the store is on a server. Processes on several machines need a
shared storage instead (setting `bodies`)."""
_CLOSE_TIMEOUT_S = 3.0
"""Time to close the connections to targets, or the store, in addition to the rest of `drain_ms`."""
_BLOCKED_PAUSE_S = 60.0
"""The time after which a target that was not allowed is tried again (`on_blocked`)."""


class Service:
    """One process of the service: an ASGI application that starts and stops the engine.

    With `writer_process`, a separate process writes to SQLite.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        delivery: DeliveryClient | None = None,
        writer_process: bool = False,
    ) -> None:
        self.settings: Settings = settings
        self._drain_deadline: float | None = None
        """When running attempts are cancelled, after `begin_shutdown`."""
        self._refreshing: asyncio.Task[None] | None = None
        target_guard = Guard(settings.allow_target, dev=settings.dev)  # blocks private addresses
        shares, in_flight = _share_descriptors(settings)
        self.max_clients: int = shares.max_clients  # connections that the server accepts
        self._delivery_client: DeliveryClient = delivery or _build_delivery_client(
            settings, target_guard, max_connections=shares.max_connections, in_flight=in_flight
        )
        self._token_client = _build_token_client(settings)
        self._secrets = SecretResolver(
            [_build_secret(each, self._token_client) for each in settings.secrets], effects.now
        )
        self.store: Store = make_store(
            settings.store,
            writer_process=writer_process,
            strict_durability=settings.strict_durability,
        )
        self._store_values = StoreValuesCache(self.store, effects.now)
        codec = Codec(settings.encryption_keys)
        body_store = _build_body_store(settings, codec)
        clock = StoreClock(effects.now)  # epoch ms of the store, from monotonic seconds
        signers = _build_signers(settings, self.store, clock, codec)
        limits = _build_engine_limits(settings, in_flight)
        limit_table = _build_limit_table(settings)
        lanes = Lanes(
            limit_table.build_downstream,
            max_leased=limits.max_leased,
            max_lane_leased=limits.max_lane_leased,
        )
        self.metrics: Metrics = Metrics(lanes)
        process = _build_worker_record(settings)
        self._tracer = _build_tracer(settings, process.name)
        health = ServiceHealth(effects.now)
        self.engine: Engine = Engine(
            EngineContext(
                store=self.store,
                delivery_client=self._delivery_client,
                policies=PolicyCache(self.store, clock.now_ms),
                lanes=lanes,
                limit_table=limit_table,
                claim_turns=ClaimTurns(),
                clock=clock,
                reporter=Reporter(self.metrics, clock.now_ms),
                health=health,
                store_check=_build_store_check(health, self.store),
                body_store_check=_build_body_store_check(health, body_store),
                process=process,
                lease_terms=LeaseTerms(
                    process.name, settings.lease_duration_ms, settings.horizon_ms
                ),
                limits=limits,
                retention=Retention(settings.keep_succeeded_ms, settings.keep_dead_ms),
                task_finder=TaskFinder(self.store, codec),
                draw=effects.draw_random,
                unix_time=effects.unix_time,
                unpack=codec.unpack,
                read_body=body_store.read,
                delete_bodies=body_store.delete,
                delete_unreferenced_bodies=partial(_delete_unreferenced, body_store, self.store),
                signers=signers,
                secrets=self._secrets,
                build_callback_task=partial(build_callback_task, new_id=_new_id, pack=codec.pack),
                blocked_pause_s=_BLOCKED_PAUSE_S if settings.on_blocked == "wait" else None,
                encrypt_attempt=codec.encrypt_attempt if settings.encryption_keys else None,
                tracer=self._tracer,
            )
        )
        require_api_keys = are_api_keys_required(settings)
        accepted_host_names = frozenset((settings.host, *settings.allow_host))
        self.api: Api = Api(
            ApiContext(
                engine=self.engine,
                store=self.store,
                body_store=body_store,
                codec=codec,
                target_guard=target_guard,
                new_id=_new_id,
                monotonic=effects.now,
                render_metrics=self._render_metrics,
                require_api_keys=require_api_keys,
                operator_tenant=settings.operator,
                role=settings.role,
                compatibility=settings.compatibility,
                accepted_host_names=None if require_api_keys else accepted_host_names,
                allowed_methods=settings.allow_methods,
                has_grpc=has_grpc(),
                limits=build_api_limits(settings, self.max_clients),
            ),
            version=version("tarry"),
        )

    async def open(self) -> None:
        """Open the store and start the engine, unless the tasks were moved to another store."""
        await self.store.open()
        # Before the check: `tarry migrate` marks the store, and then checks for processes. So
        # either this process finds the mark, or `tarry migrate` finds this process.
        await self.engine.announce()
        try:
            await check_not_moved(self.store, name_store(self.settings.store))
        except BaseException:
            await self.engine.withdraw()
            await self.store.close()
            raise
        await self.engine.start()
        self._refreshing = asyncio.create_task(self._store_values.run())

    def begin_shutdown(self) -> None:
        """Start no more attempts, and end waits for a result (`Prefer: wait`) and event streams."""
        if self._drain_deadline is None:
            self._drain_deadline = effects.now() + self.settings.drain_ms / 1000
        self.engine.stop_starting_attempts()
        self.api.close()

    async def close(self) -> None:
        """Wait for running attempts, release other leased tasks, and close all.

        Attempts may run until `drain_ms` after `begin_shutdown`.
        """
        self.begin_shutdown()
        await self.engine.stop(self._remaining_drain_s())
        if self._refreshing is not None:
            await cancel_and_wait([self._refreshing])
        steps = [self._store_values.close, self._secrets.close, self._delivery_client.close]
        if self._token_client is not None:
            steps.append(self._token_client.close)
        if self._tracer is not None:
            steps.append(self._tracer.close)
        for step in (*steps, self.store.close):
            await run_bounded(step(), self._remaining_drain_s() + _CLOSE_TIMEOUT_S)

    def _remaining_drain_s(self) -> float:
        assert self._drain_deadline is not None  # noqa: S101 - set by `begin_shutdown`
        return max(0.0, self._drain_deadline - effects.now())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI scope: a request, or the lifespan of the server."""
        if scope["type"] != "lifespan":
            await self.api(scope, receive, send)
            return
        await receive()  # lifespan.startup
        try:
            await self.open()
        except Exception as error:  # noqa: BLE001 - the server logs it and exits
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()  # lifespan.shutdown
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _render_metrics(self, tenant: str | None, accept: str) -> tuple[bytes, str]:
        # The last values: a store that hangs must not hide what this process does.
        counters, age_s = await self._store_values.get(tenant)
        return self.metrics.render(
            counters,
            self.engine.clock.now_s(),
            tenant,
            accept,
            counters_age_s=age_s,
            failing=self.engine.health.failing,
        )


def _share_descriptors(settings: Settings) -> tuple[DescriptorShares, int]:
    """Return the numbers of connections for which there are file descriptors, and `in_flight`."""
    limit = current_limit()
    shares = share_descriptors(limit, settings.in_flight)
    in_flight = min(settings.in_flight, shares.max_connections)
    if in_flight < settings.in_flight:
        _logger.warning(
            "in_flight is %d instead of %d: the process has only %d file descriptors; "
            "raise the hard limit (ulimit -Hn)", in_flight, settings.in_flight, limit
        )  # fmt: skip
    return shares, in_flight


def _build_delivery_client(
    settings: Settings, target_guard: Guard, *, max_connections: int, in_flight: int
) -> DeliveryClient:
    dns = DnsCache()  # one for both clients, because tenants share its slots for lookups
    proxy, ca_file = settings.egress_proxy or None, settings.ca_file or None
    client_certificates = [
        ClientCertificate(each.cert_file, each.key_file, tenant=each.tenant, targets=each.targets)
        for each in settings.client_certificates
    ]
    return DeliveryDispatcher(
        HttpDeliveryClient(
            target_guard,
            dns=dns,
            proxy=proxy,
            ca_file=ca_file,
            client_certificates=client_certificates,
            max_response_bytes=settings.max_response_bytes,
            max_connections=max_connections,
            max_pool_connections=in_flight,
        ),
        partial(
            GrpcDeliveryClient,
            target_guard,
            dns=dns,
            proxy=proxy,
            ca_file=ca_file,
            client_certificates=client_certificates,
        ),
    )


def _build_token_client(settings: Settings) -> DeliveryClient | None:
    """Return the client for the token endpoints of secrets, or None if there are none.

    It is a client of its own: the operator has set the addresses of the endpoints, so they are
    allowed there, but not as targets.
    """
    hosts = [parse_target(each.token_url).host for each in settings.secrets if each.token_url]
    if not hosts:
        return None
    guard = Guard([*settings.allow_target, *hosts], dev=settings.dev)
    proxy, ca_file = settings.egress_proxy or None, settings.ca_file or None
    return HttpDeliveryClient(guard, proxy=proxy, ca_file=ca_file)


def _build_body_store(settings: Settings, codec: Codec) -> BodyStore:
    return BodyStore(
        settings.bodies or default_bodies(settings.store),
        max_object_bytes=settings.max_body_bytes,
        endpoint=settings.bodies_endpoint,
        encrypt=codec.encrypt_body,
        decrypt=codec.decrypt_body,
    )


def _build_engine_limits(settings: Settings, in_flight: int) -> EngineLimits:
    return EngineLimits(
        max_running_attempts=in_flight,
        max_lane_running_attempts=settings.lane_in_flight,
        max_tenant_unfinished_tasks=settings.tenant_pending or None,
        max_tenant_lanes=settings.tenant_lanes or None,
        tenant_tasks_per_s=settings.tenant_rate or None,
        tenant_burst=max(EngineLimits().tenant_burst, settings.tenant_rate),
    )


def _build_limit_table(settings: Settings) -> LimitTable:
    patterns = [LimitPattern(each.tenant, each.lane, each.limits) for each in settings.downstreams]
    return LimitTable(patterns, max_in_flight=settings.lane_in_flight)


def _build_worker_record(settings: Settings) -> WorkerRecord:
    host_name = socket.gethostname()
    return WorkerRecord(
        name=f"{host_name}-{os.getpid()}-{secrets.token_hex(4)}",
        host=host_name,
        pid=os.getpid(),
        role=settings.role,
        version=version("tarry"),
        allow_target=tuple(sorted({*settings.allow_target, *(["--dev"] if settings.dev else [])})),
    )


def _build_tracer(settings: Settings, instance: str) -> AttemptTracer | None:
    if settings.traces != "otlp":
        return None
    return AttemptTracer.with_otlp_exporter(
        version=version("tarry"), instance=instance, unix_time=effects.unix_time
    )


def _build_store_check(health: ServiceHealth, store: Store) -> HealthCheck:
    return HealthCheck(
        health,
        (ADDING, DATA),
        partial(check_partitions, store, health),
        effects.now,
        interval_s=_STORE_CHECK_INTERVAL_S,
        failing_interval_s=_STORE_CHECK_INTERVAL_S,
    )


def _build_body_store_check(health: ServiceHealth, body_store: BodyStore) -> HealthCheck:
    return HealthCheck(
        health,
        (BODY_STORE,),
        body_store.check,
        effects.now,
        interval_s=_BODY_STORE_CHECK_INTERVAL_S,
        failing_interval_s=_FAILING_BODY_STORE_CHECK_INTERVAL_S,
    )


def _build_signers(
    settings: Settings, store: Store, clock: StoreClock, codec: Codec
) -> SignerCache:
    return SignerCache(
        store,
        clock.now_ms,
        codec.decrypt_secret,
        effects.unix_time,
        fallback=Signer(settings.signing_secrets) if settings.signing_secrets else None,
        fallback_tenant=None if settings.share_signing_secrets else DEFAULT_TENANT,
    )


def build_api_limits(settings: Settings, max_clients: int) -> ApiLimits:
    """Return the limits of the API for a process that accepts `max_clients` connections."""
    default_limits = ApiLimits()
    return ApiLimits(
        max_request_bytes=settings.max_body_bytes,
        inline_body_bytes=settings.inline_body_bytes,
        # A tenant can use half of each. With few file descriptors, its waits and streams would
        # otherwise occupy the connections of all clients.
        max_waiting_requests=min(default_limits.max_waiting_requests, max_clients // 2),
        max_event_streams=min(default_limits.max_event_streams, max_clients // 4),
        max_attempt_timeout_s=settings.max_attempt_timeout_ms / 1000,
        max_tenant_policy_versions=settings.tenant_policy_versions or None,
    )


def _build_secret(definition: SecretDefinition, token_client: DeliveryClient | None) -> Secret:
    template = definition.template or "{}"
    source: SecretSource
    if definition.file:
        source = FileSource(Path(definition.file))
    elif definition.environment:
        source = EnvironmentSource(definition.environment, environment_variables())
    elif definition.command:
        timeout_s, cache_s = definition.timeout_ms / 1000, definition.cache_ms / 1000
        source = CommandSource(definition.command, timeout_s=timeout_s, cache_s=cache_s)
    else:
        assert token_client is not None  # noqa: S101 - a secret has a token_url
        template = definition.template or "Bearer {}"
        client_secret = (
            FileSource(Path(definition.client_secret_file))
            if definition.client_secret_file
            else EnvironmentSource(definition.client_secret_environment, environment_variables())
        )
        endpoint = TokenEndpoint(
            url=parse_target(definition.token_url).url,
            client_id=definition.client_id,
            scope=definition.scope,
            parameters=definition.parameters,
            secret_in_body=definition.client_auth == "body",
        )
        source = TokenSource(endpoint, client_secret, token_client.send, tenant=definition.tenant)
    return Secret(
        definition.tenant,
        definition.name,
        source,
        template=template,
        targets=definition.targets,
        header=definition.header,
    )


def make_store(
    url: str,
    *,
    writer_process: bool = False,
    strict_durability: bool = False,
    must_exist: bool = False,
) -> Store:
    """Return the store for a path or URL; create a SQLite file that is missing.

    With `must_exist`, a store is not created: this function or `Store.open` raises
    `ConfigurationError`.
    """
    # A method that a store declares in one line is a class variable for pyright, which does not
    # accept it as a method of a protocol. mypy compares the types of all methods with `Store`.
    check_setting("store", url)
    engine = find_engine(url)
    if engine is StoreEngine.POSTGRES:
        from tarry.service.stores.postgres import PostgresTaskStore

        return PostgresTaskStore(url, strict_durability=strict_durability, must_exist=must_exist)  # pyright: ignore[reportReturnType]
    if engine is StoreEngine.REDIS:
        from tarry.service.stores.redis import RedisTaskStore

        return RedisTaskStore(url, strict_durability=strict_durability, must_exist=must_exist)  # pyright: ignore[reportReturnType]
    from tarry.service.stores.sqlite import IN_MEMORY, SqliteTaskStore

    if engine is StoreEngine.MEMORY:
        # Another process could not access a database in memory.
        return SqliteTaskStore(IN_MEMORY)  # pyright: ignore[reportReturnType]
    path = sqlite_path(url)
    if must_exist:
        check_store_file(path)
    else:
        _create_file(path)
    _warn_if_public(path)
    _warn_if_public(Path(f"{path}-wal"))
    return SqliteTaskStore(path, writer_process=writer_process)  # pyright: ignore[reportReturnType]


def check_store_file(path: Path) -> None:
    """Raise `ConfigurationError` if a SQLite file does not exist, or is empty."""
    if not path.exists() or not path.stat().st_size:
        raise missing_store(f"sqlite:{path.absolute()}")


def _create_file(path: Path) -> None:
    """Create the file of a store if it is missing, but not its folder: the path may be mistyped."""
    folder = path.parent
    try:
        if path == sqlite_path(DEFAULT_STORE):
            # Users who can write to the folder could replace the file.
            folder.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            path.touch(mode=0o600)  # requests of callers may contain secrets
    except FileNotFoundError:
        command = f"mkdir -p -m 700 {quote(str(folder))}"
        raise ConfigurationError(
            f"store: the folder {folder.absolute()} does not exist, so there is no store in it. "
            f"Correct the path, or run `{command}` for a new store"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"store: cannot create {path}: {error.strerror}") from error


def _warn_if_public(path: Path) -> None:
    """Log a warning if all users of the machine can use a file or folder, as after a restore.

    The mode is not changed, because it may be intended. Access for the group is not reported:
    Kubernetes grants it on volumes with an `fsGroup`.
    """
    if path.exists() and (mode := path.stat().st_mode & 0o777) & 0o007:
        fix = f"chmod {'700' if path.is_dir() else '600'} {path}"
        _logger.warning("other users have access to %s (mode %o): run %s", path, mode, fix)


def default_bodies(store_url: str) -> str:
    """Return where large bodies are stored if the setting `bodies` is empty."""
    engine = find_engine(store_url)
    if engine is StoreEngine.MEMORY:
        return "memory:///"
    folder = _SERVER_STORE_BODIES
    if engine is StoreEngine.SQLITE:
        folder = sqlite_path(store_url).parent / "bodies"
    _warn_if_public(folder)
    return str(folder)


def name_store(url: str) -> str:
    """Return the URL of a store for messages: without a password, and with an absolute path."""
    if find_engine(url) is StoreEngine.SQLITE:
        return f"sqlite:{sqlite_path(url).absolute()}"
    return redact_store_url(url)


def data_location(settings: Settings) -> str:
    """Describe where the data is stored, for the start message."""
    engine = find_engine(settings.store)
    if engine is StoreEngine.MEMORY:
        return "memory: it is lost when the process stops"
    if engine is StoreEngine.SQLITE:
        return str(sqlite_path(settings.store).absolute())
    return redact_store_url(settings.store)


def are_api_keys_required(settings: Settings) -> bool:
    """Return whether callers need an API key. On a loopback address, `require_keys` decides."""
    return settings.require_keys or not is_loopback(settings.host)


async def _delete_unreferenced(body_store: BodyStore, store: Store) -> int:
    async def task_exists(tenant: str, task_id: str) -> bool:
        return await store.get_task(tenant, task_id) is not None

    return await body_store.delete_unreferenced(task_exists, effects.unix_time(), limit=100)


def _new_id() -> str:
    return str(uuid7())
