"""The clients of the retry service, blocking and asynchronous, and the replays they return.

Both clients have the same methods. They send the requests that `ServiceApi` builds.
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import aclosing, closing, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tarry.client.coalescing import SEND_ALONE, Coalescer, EnqueueCall, ThreadEvent, Wait
from tarry.client.transport import (
    MAX_RECONNECT_DELAY_S,
    AsyncBufferingTransport,
    BufferingTransport,
    ClientConfig,
    EventStreamParser,
    is_event_stream,
    logger,
)
from tarry.errors import TarryError
from tarry.runtime import deadlines
from tarry.runtime.effects import effects
from tarry.runtime.event_loops import in_event_loop, in_trio, timeout

if TYPE_CHECKING:
    import asyncio
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Generator,
        Iterable,
        Iterator,
        Mapping,
    )
    from types import TracebackType
    from typing import Self, TypeAlias, Unpack

    import httpx
    import trio

    from tarry.client.api import ClientRequest, Health, Operation, ServiceApi
    from tarry.client.coalescing import Batch
    from tarry.client.options import (
        AttemptFilter,
        CancelOptions,
        DeadLetterFilter,
        Duration,
        EnqueueArguments,
        EnqueueOptions,
        PurgeOptions,
        ReplayOptions,
        TaskFilter,
    )
    from tarry.core.policy import Policy
    from tarry.wire.tasks import (
        AttemptLog,
        BatchResult,
        BulkCancelResult,
        DownstreamInfo,
        Explanation,
        Page,
        ReplayJob,
        RetryPolicy,
        RetryTask,
        SecretType,
        ServiceEvent,
        SigningSecret,
        WorkerInfo,
    )

    AsyncEvent: TypeAlias = asyncio.Event | trio.Event

T = TypeVar("T")
R = TypeVar("R")
"""Return type of `_run` for a replay: `ReplayJob`, or in `AsyncClient` an awaitable of it."""


class Client:
    """Client of a retry service: `tarry.Client("http://127.0.0.1:8080", key="...")`.

    `key` is the API key. `policy` controls how the client retries its own requests to the service.
    An attempt of such a request fails when no byte arrives for `timeout` seconds. `ca_file` is a
    PEM file of certificates to trust instead of those of the system. `transport` is an
    `httpx.HTTPTransport`; pass one to use proxies or client certificates, then `ca_file` is not
    used. Methods raise a `ServiceError` if the service rejects a request or does not respond.
    Threads may share a client. With `coalesce`, `enqueue` calls that wait at the same time share
    one request.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        policy: Policy | None = None,
        timeout: float = 10.0,
        ca_file: str | None = None,
        transport: httpx.BaseTransport | None = None,
        coalesce: bool = True,
    ) -> None:
        self._config = config = ClientConfig(url, key, policy, timeout, ca_file)
        from tarry.adapters.httpx import RetryTransport
        from tarry.client.api import ServiceApi

        self._api = ServiceApi()
        transport = transport or config.build_transport()
        self._transports = config.build_retry_transports(
            RetryTransport, BufferingTransport(transport)
        )
        self._coalescer = Coalescer(ThreadEvent) if coalesce else None

    def close(self) -> None:
        """Close the connections."""
        for transport in self._transports.values():
            transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._config.url!r})"

    def enqueue(
        self,
        url: str,
        body: Any = None,
        *,
        wait: float | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> RetryTask:
        """Add a task, which is an HTTP call that the service makes and retries.

        When this method returns, the task is stored durably. `body` is text, bytes or any JSON
        value. With `wait`, the service responds once the task has finished, or after `wait`
        seconds. The options are described in `EnqueueOptions`: method, headers, body_ref, policy,
        policy_version, key (the idempotency key), lane_key, delay, at, overrides, callback,
        callback_policy, prior_attempts, traceparent, tracestate.
        """
        request = self._api.enqueue(url, body, wait, options)
        # The deadline of one call must not end the request of others. On an event loop, the request
        # of others could not be retried, because a wait would block the loop.
        is_alone = wait is not None or deadlines.current() is not None or in_event_loop()
        if self._coalescer is None or is_alone:
            return self._send(request)
        return self._send_coalesced(self._coalescer, request)

    def enqueue_many(self, tasks: Iterable[EnqueueArguments]) -> list[BatchResult]:
        """Add tasks, each a dict of `enqueue` arguments; return their results in the same order."""
        return self._run(self._api.enqueue_many(tasks))

    def get(self, task: str | RetryTask) -> RetryTask:
        """Return the current state of a task."""
        return self._send(self._api.get(task))

    def tasks(self, **filters: Unpack[TaskFilter]) -> Iterator[RetryTask]:
        """Iterate over tasks, newest first; the filters are described in `TaskFilter`."""
        return self._iterate_pages(lambda cursor: self._api.tasks(cursor, filters))

    def attempts(self, task: str | RetryTask) -> Iterator[AttemptLog]:
        """Iterate over the attempts of a task, oldest first."""
        return self._iterate_pages(lambda cursor: self._api.attempts(cursor, task))

    def export_attempts(self, **filters: Unpack[AttemptFilter]) -> Iterator[AttemptLog]:
        """Iterate over the attempts of many tasks, without error messages and excerpts."""
        return self._iterate_pages(lambda cursor: self._api.export_attempts(cursor, filters))

    def explain(self, task: str | RetryTask) -> Explanation:
        """Return the explanation of why a task was retried or not, and what happens next."""
        return self._send(self._api.explain(task))

    def wait(self, task: str | RetryTask, timeout: Duration | None = None) -> RetryTask:
        """Wait for a task to finish, successfully or not; raise `NotFinished` after `timeout`."""
        return self._run(self._api.wait(task, timeout))

    def cancel(self, task: str | RetryTask) -> RetryTask:
        """Cancel a task. `task.cancelling` is True while a running attempt has not ended."""
        return self._run(self._api.cancel(task))

    def cancel_many(self, **options: Unpack[CancelOptions]) -> BulkCancelResult:
        """Cancel all unfinished tasks that match the filters of `SearchFilter`.

        With `dry_run`, the matching tasks are only counted. `all=True` cancels all tasks.
        """
        return self._run(self._api.cancel_many(options))

    def retry(self, task: str | RetryTask) -> RetryTask:
        """Make the next attempt of a task now; a dead or cancelled task gets all attempts again."""
        return self._send(self._api.retry(task))

    def dead_letters(self, **filters: Unpack[DeadLetterFilter]) -> Iterator[RetryTask]:
        """Iterate over dead letters, newest first; for the filters see `DeadLetterFilter`."""
        return self._iterate_pages(lambda cursor: self._api.dead_letters(cursor, filters))

    def replay(self, **options: Unpack[ReplayOptions]) -> Replay:
        """Start a replay of dead letters.

        The filters are described in `DeadLetterFilter`; `before` is the same as `finished_before`.
        `rate` is in tasks per second, by default 50; 0: all at once. With `dry_run`, the matching
        dead letters are only counted. `all=True` replays all dead letters.
        """
        return Replay(self._send(self._api.replay(options)), self._api, self._run)

    def replays(self) -> list[Replay]:
        """Return the latest replays, newest first."""
        page = self._send(self._api.replays())
        return [Replay(job, self._api, self._run) for job in page.items]

    def purge(self, **options: Unpack[PurgeOptions]) -> int:
        """Delete matching dead letters, or all with `all=True`; return how many were deleted."""
        return self._run(self._api.purge(options))

    def policies(self) -> Iterator[RetryPolicy]:
        """Iterate over policies; the built-in policies come last."""
        return self._iterate_pages(self._api.policies)

    def policy(self, policy_id: str, version: int | None = None) -> RetryPolicy:
        """Return a policy, by default in its newest version."""
        return self._send(self._api.policy(policy_id, version))

    def put_policy(self, policy_id: str, policy: Policy | Mapping[str, Any]) -> RetryPolicy:
        """Create a policy, or a new version of it. A mapping must use the API's field names."""
        return self._send(self._api.put_policy(policy_id, policy))

    def delete_policy(self, policy_id: str) -> None:
        """Delete a policy; raises `Conflict` while unfinished tasks use it."""
        self._send(self._api.delete_policy(policy_id))

    def downstreams(self) -> Iterator[DownstreamInfo]:
        """Iterate over all downstreams, each with its lane (queue of tasks), state and latency."""
        return self._iterate_pages(self._api.downstreams)

    def downstream_page(
        self, cursor: str | None = None, *, limit: int | None = None
    ) -> Page[DownstreamInfo]:
        """Return a page of up to `limit` downstreams; `next_cursor` is the cursor of the next."""
        return self._send(self._api.downstream_page(cursor, limit))

    def downstream(self, lane: str) -> DownstreamInfo:
        """Return a downstream, with the history of its breaker."""
        return self._send(self._api.downstream(lane))

    def pause(self, lane: str, *, create: bool = False) -> DownstreamInfo:
        """Start no more attempts of a lane until the lane is resumed.

        With `create`, also if no task has used the lane yet; else that raises `NotFound`.
        """
        return self._send(self._api.change_lane(lane, "pause", create=create))

    def resume(self, lane: str) -> DownstreamInfo:
        """Resume a lane that is paused, or whose breaker is open."""
        return self._send(self._api.change_lane(lane, "resume"))

    def reset(self, lane: str) -> DownstreamInfo:
        """Discard the statistics of a lane's downstream, and resume the lane."""
        return self._send(self._api.change_lane(lane, "reset"))

    def set_limits(
        self,
        lane: str,
        *,
        rate_per_second: float | None = None,
        concurrency: int | None = None,
        breaker: Mapping[str, Any] | None = None,
        budget: Mapping[str, Any] | None = None,
        create: bool = False,
    ) -> DownstreamInfo:
        """Replace the limits of a lane. A mapping must use the API's field names.

        With `create`, also if no task has used the lane yet; else that raises `NotFound`.
        """
        return self._send(
            self._api.set_limits(lane, rate_per_second, concurrency, breaker, budget, create=create)
        )

    def create_signing_secret(
        self,
        *,
        lane: str | None = None,
        type: SecretType = "HMAC",  # noqa: A002 - the API's word
        secret: str | None = None,
        expire_previous: Duration | None = None,
    ) -> SigningSecret:
        """Create a signing secret (Standard Webhooks) for a lane, or for all without their own.

        The result has the `secret`, which cannot be fetched again, or the `public_key` (ED25519).
        `secret` is your own secret; by default the service generates one of this `type`. The
        previous secrets sign, too, for `expire_previous` (by default 24 hours).
        """
        return self._send(self._api.create_signing_secret(lane, type, secret, expire_previous))

    def signing_secrets(self) -> list[SigningSecret]:
        """Return the signing secrets that have not expired, newest first, without the secrets."""
        return self._send(self._api.signing_secrets()).items

    def delete_signing_secret(self, secret_id: str) -> None:
        """Delete a signing secret; it signs no more attempts."""
        self._send(self._api.delete_signing_secret(secret_id))

    def events(self) -> Generator[ServiceEvent, None, None]:
        """Iterate over new events; events sent while the connection is lost are missed."""
        import httpx

        request = self._api.events("retry")
        while True:
            with closing(self._open(request)) as response:
                if not is_event_stream(response):
                    response.read()
                request.parse_response(response)  # raises unless it is an event stream
                parser = EventStreamParser()
                with suppress(httpx.RequestError):  # the stream was lost: reconnect below
                    for chunk in response.iter_bytes():
                        yield from parser.feed(chunk)
            logger.warning("event stream lost, reconnecting, url=%s", self._config.url)
            # From now on, connecting is retried forever, because the service was reachable before.
            request = self._api.events("retry_forever")
            effects.blocking_sleep(MAX_RECONNECT_DELAY_S * effects.draw_random(), None)

    def workers(self) -> list[WorkerInfo]:
        """Return the processes of the service. With API keys, only the operator may do this."""
        return self._send(self._api.workers()).items

    def health(self) -> Health:
        """Return whether the service accepts and processes tasks."""
        return self._send(self._api.health())

    def _open(self, request: ClientRequest[Any]) -> httpx.Response:
        """Send a request; return the buffered response, or the open response of an event stream."""
        import httpx

        transport, httpx_request = self._transports[request.mode], request.to_httpx(self._config)
        try:
            response: httpx.Response = transport.handle_request(httpx_request)
        except httpx.RequestError as error:
            raise self._config.unreachable_error(request, error) from error
        return response

    def _send(self, request: ClientRequest[T]) -> T:
        with closing(self._open(request)) as response:
            response.read()
            return request.parse_response(response)

    def _send_coalesced(
        self, coalescer: Coalescer[ThreadEvent], request: ClientRequest[RetryTask]
    ) -> RetryTask:
        """Send an `enqueue` request, perhaps in a batch with those of other threads."""
        call: EnqueueCall[ThreadEvent] = EnqueueCall(request)
        try:
            coalescer.add(call)
            while (step := coalescer.next_step(call)) is not None:
                if isinstance(step, Wait):
                    step.event.wait(step.max_wait_s)
                else:
                    self._send_batch(coalescer, step)
        except BaseException:
            coalescer.withdraw(call)
            raise
        result = coalescer.take_result(call)
        return self._send(request) if result is SEND_ALONE else result

    def _send_batch(self, coalescer: Coalescer[ThreadEvent], batch: Batch[ThreadEvent]) -> None:
        try:
            results = self._send(self._api.coalesce([call.request for call in batch.calls]))
        except Exception as error:  # noqa: BLE001 - each caller of the batch raises it
            coalescer.fail(batch, error)
        else:
            coalescer.complete(batch, results)

    def _run(self, operation: Operation[T]) -> T:
        """Send the requests and sleep the seconds that an operation yields; return its result."""
        response: Any = None
        try:
            while True:
                step = operation.send(response)
                if isinstance(step, (float, int)):
                    effects.blocking_sleep(step, None)
                else:
                    response = self._send(step)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except TarryError as error:
            operation.throw(error)  # the operation may add a note to the error
            raise

    def _iterate_pages(
        self, request_page: Callable[[str | None], ClientRequest[Page[T]]]
    ) -> Generator[T, None, None]:
        cursor: str | None = None
        while True:
            page = self._send(request_page(cursor))
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return


class AsyncClient:
    """The asynchronous version of `Client`, on asyncio or trio.

    Use it as `async with tarry.AsyncClient(url) as client`. `transport` is an
    `httpx.AsyncHTTPTransport`. To stop reading `events()`, close the generator, for example with
    `contextlib.aclosing`.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        policy: Policy | None = None,
        timeout: float = 10.0,
        ca_file: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        coalesce: bool = True,
    ) -> None:
        self._config = config = ClientConfig(url, key, policy, timeout, ca_file)
        from tarry.adapters.httpx import AsyncRetryTransport
        from tarry.client.api import ServiceApi

        self._api = ServiceApi()
        transport = transport or config.build_async_transport()
        self._transports = config.build_retry_transports(
            AsyncRetryTransport, AsyncBufferingTransport(transport)
        )
        self._coalescer = Coalescer(_new_event) if coalesce else None

    async def aclose(self) -> None:
        """Close the connections."""
        for transport in self._transports.values():
            await transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._config.url!r})"

    async def enqueue(
        self,
        url: str,
        body: Any = None,
        *,
        wait: float | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> RetryTask:
        """Add a task, an HTTP call that the service makes and retries; see `Client.enqueue`."""
        request = self._api.enqueue(url, body, wait, options)
        # The deadline of one call must not end the request of others.
        if self._coalescer is None or wait is not None or deadlines.current() is not None:
            return await self._send(request)
        return await self._send_coalesced(self._coalescer, request)

    async def enqueue_many(self, tasks: Iterable[EnqueueArguments]) -> list[BatchResult]:
        """Add tasks, each a dict of `enqueue` arguments; return their results in the same order."""
        return await self._run(self._api.enqueue_many(tasks))

    async def get(self, task: str | RetryTask) -> RetryTask:
        """Return the current state of a task."""
        return await self._send(self._api.get(task))

    def tasks(self, **filters: Unpack[TaskFilter]) -> AsyncIterator[RetryTask]:
        """Iterate over tasks, newest first; the filters are described in `TaskFilter`."""
        return self._iterate_pages(lambda cursor: self._api.tasks(cursor, filters))

    def attempts(self, task: str | RetryTask) -> AsyncIterator[AttemptLog]:
        """Iterate over the attempts of a task, oldest first."""
        return self._iterate_pages(lambda cursor: self._api.attempts(cursor, task))

    def export_attempts(self, **filters: Unpack[AttemptFilter]) -> AsyncIterator[AttemptLog]:
        """Iterate over the attempts of many tasks, without error messages and excerpts."""
        return self._iterate_pages(lambda cursor: self._api.export_attempts(cursor, filters))

    async def explain(self, task: str | RetryTask) -> Explanation:
        """Return the explanation of why a task was retried or not, and what happens next."""
        return await self._send(self._api.explain(task))

    async def wait(self, task: str | RetryTask, timeout: Duration | None = None) -> RetryTask:
        """Wait for a task to finish, successfully or not; raise `NotFinished` after `timeout`."""
        return await self._run(self._api.wait(task, timeout))

    async def cancel(self, task: str | RetryTask) -> RetryTask:
        """Cancel a task. `task.cancelling` is True while a running attempt has not ended."""
        return await self._run(self._api.cancel(task))

    async def cancel_many(self, **options: Unpack[CancelOptions]) -> BulkCancelResult:
        """Cancel all unfinished tasks that match the filters; see `Client.cancel_many`."""
        return await self._run(self._api.cancel_many(options))

    async def retry(self, task: str | RetryTask) -> RetryTask:
        """Make the next attempt of a task now; a dead or cancelled task gets all attempts again."""
        return await self._send(self._api.retry(task))

    def dead_letters(self, **filters: Unpack[DeadLetterFilter]) -> AsyncIterator[RetryTask]:
        """Iterate over dead letters, newest first; for the filters see `DeadLetterFilter`."""
        return self._iterate_pages(lambda cursor: self._api.dead_letters(cursor, filters))

    async def replay(self, **options: Unpack[ReplayOptions]) -> AsyncReplay:
        """Start a replay of dead letters; with `dry_run`, only count the matching dead letters."""
        return AsyncReplay(await self._send(self._api.replay(options)), self._api, self._run)

    async def replays(self) -> list[AsyncReplay]:
        """Return the latest replays, newest first."""
        page = await self._send(self._api.replays())
        return [AsyncReplay(job, self._api, self._run) for job in page.items]

    async def purge(self, **options: Unpack[PurgeOptions]) -> int:
        """Delete matching dead letters, or all with `all=True`; return how many were deleted."""
        return await self._run(self._api.purge(options))

    def policies(self) -> AsyncIterator[RetryPolicy]:
        """Iterate over policies; the built-in policies come last."""
        return self._iterate_pages(self._api.policies)

    async def policy(self, policy_id: str, version: int | None = None) -> RetryPolicy:
        """Return a policy, by default in its newest version."""
        return await self._send(self._api.policy(policy_id, version))

    async def put_policy(self, policy_id: str, policy: Policy | Mapping[str, Any]) -> RetryPolicy:
        """Create a policy, or a new version of it. A mapping must use the API's field names."""
        return await self._send(self._api.put_policy(policy_id, policy))

    async def delete_policy(self, policy_id: str) -> None:
        """Delete a policy; raises `Conflict` while unfinished tasks use it."""
        await self._send(self._api.delete_policy(policy_id))

    def downstreams(self) -> AsyncIterator[DownstreamInfo]:
        """Iterate over all downstreams, each with its lane (queue of tasks), state and latency."""
        return self._iterate_pages(self._api.downstreams)

    async def downstream_page(
        self, cursor: str | None = None, *, limit: int | None = None
    ) -> Page[DownstreamInfo]:
        """Return a page of up to `limit` downstreams; `next_cursor` is the cursor of the next."""
        return await self._send(self._api.downstream_page(cursor, limit))

    async def downstream(self, lane: str) -> DownstreamInfo:
        """Return a downstream, with the history of its breaker."""
        return await self._send(self._api.downstream(lane))

    async def pause(self, lane: str, *, create: bool = False) -> DownstreamInfo:
        """Start no more attempts of a lane until the lane is resumed.

        With `create`, also if no task has used the lane yet; else that raises `NotFound`.
        """
        return await self._send(self._api.change_lane(lane, "pause", create=create))

    async def resume(self, lane: str) -> DownstreamInfo:
        """Resume a lane that is paused, or whose breaker is open."""
        return await self._send(self._api.change_lane(lane, "resume"))

    async def reset(self, lane: str) -> DownstreamInfo:
        """Discard the statistics of a lane's downstream, and resume the lane."""
        return await self._send(self._api.change_lane(lane, "reset"))

    async def set_limits(
        self,
        lane: str,
        *,
        rate_per_second: float | None = None,
        concurrency: int | None = None,
        breaker: Mapping[str, Any] | None = None,
        budget: Mapping[str, Any] | None = None,
        create: bool = False,
    ) -> DownstreamInfo:
        """Replace the limits of a lane. A mapping must use the API's field names.

        With `create`, also if no task has used the lane yet; else that raises `NotFound`.
        """
        return await self._send(
            self._api.set_limits(lane, rate_per_second, concurrency, breaker, budget, create=create)
        )

    async def create_signing_secret(
        self,
        *,
        lane: str | None = None,
        type: SecretType = "HMAC",  # noqa: A002 - the API's word
        secret: str | None = None,
        expire_previous: Duration | None = None,
    ) -> SigningSecret:
        """Create a signing secret; see `Client.create_signing_secret`."""
        return await self._send(
            self._api.create_signing_secret(lane, type, secret, expire_previous)
        )

    async def signing_secrets(self) -> list[SigningSecret]:
        """Return the signing secrets that have not expired, newest first, without the secrets."""
        return (await self._send(self._api.signing_secrets())).items

    async def delete_signing_secret(self, secret_id: str) -> None:
        """Delete a signing secret; it signs no more attempts."""
        await self._send(self._api.delete_signing_secret(secret_id))

    def events(self) -> AsyncGenerator[ServiceEvent, None]:
        """Iterate over new events; events sent while the connection is lost are missed."""
        return self._read_events()

    async def workers(self) -> list[WorkerInfo]:
        """Return the processes of the service. With API keys, only the operator may do this."""
        return (await self._send(self._api.workers())).items

    async def health(self) -> Health:
        """Return whether the service accepts and processes tasks."""
        return await self._send(self._api.health())

    async def _open(self, request: ClientRequest[Any]) -> httpx.Response:
        """Send a request; return the buffered response, or the open response of an event stream."""
        import httpx

        transport, httpx_request = self._transports[request.mode], request.to_httpx(self._config)
        try:
            response: httpx.Response = await transport.handle_async_request(httpx_request)
        except httpx.RequestError as error:
            raise self._config.unreachable_error(request, error) from error
        return response

    async def _send(self, request: ClientRequest[T]) -> T:
        async with aclosing(await self._open(request)) as response:
            await response.aread()
            return request.parse_response(response)

    async def _send_coalesced(
        self, coalescer: Coalescer[AsyncEvent], request: ClientRequest[RetryTask]
    ) -> RetryTask:
        """Send an `enqueue` request, perhaps in a batch with those of other tasks."""
        call: EnqueueCall[AsyncEvent] = EnqueueCall(request)
        try:
            coalescer.add(call)
            while (step := coalescer.next_step(call)) is not None:
                if isinstance(step, Wait):
                    await _wait(step)
                else:
                    await self._send_batch(coalescer, step)
        except BaseException:
            coalescer.withdraw(call)
            raise
        result = coalescer.take_result(call)
        return await self._send(request) if result is SEND_ALONE else result

    async def _send_batch(self, coalescer: Coalescer[AsyncEvent], batch: Batch[AsyncEvent]) -> None:
        try:
            results = await self._send(self._api.coalesce([call.request for call in batch.calls]))
        except Exception as error:  # noqa: BLE001 - each caller of the batch raises it
            coalescer.fail(batch, error)
        else:
            coalescer.complete(batch, results)

    async def _run(self, operation: Operation[T]) -> T:
        response: Any = None
        try:
            while True:
                step = operation.send(response)
                if isinstance(step, (float, int)):
                    await effects.async_sleep(step)
                else:
                    response = await self._send(step)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except TarryError as error:
            operation.throw(error)  # the operation may add a note to the error
            raise

    async def _iterate_pages(
        self, request_page: Callable[[str | None], ClientRequest[Page[T]]]
    ) -> AsyncGenerator[T, None]:
        cursor: str | None = None
        while True:
            page = await self._send(request_page(cursor))
            for item in page.items:
                yield item
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _read_events(self) -> AsyncGenerator[ServiceEvent, None]:
        import httpx

        request = self._api.events("retry")
        while True:
            async with aclosing(await self._open(request)) as response:
                if not is_event_stream(response):
                    await response.aread()
                request.parse_response(response)  # raises unless it is an event stream
                parser = EventStreamParser()
                with suppress(httpx.RequestError):  # the stream was lost: reconnect below
                    async for chunk in response.aiter_bytes():
                        for event in parser.feed(chunk):
                            yield event
            logger.warning("event stream lost, reconnecting, url=%s", self._config.url)
            # From now on, connecting is retried forever, because the service was reachable before.
            request = self._api.events("retry_forever")
            await effects.async_sleep(MAX_RECONNECT_DELAY_S * effects.draw_random())


def _new_event() -> AsyncEvent:
    """Return an event of the running event loop."""
    if in_trio():
        import trio

        return trio.Event()
    import asyncio

    return asyncio.Event()


async def _wait(step: Wait[AsyncEvent]) -> None:
    if step.max_wait_s is None:
        await step.event.wait()
    else:
        with timeout(step.max_wait_s):
            await step.event.wait()


class BaseReplay(Generic[R]):
    """Base class of `Replay` and `AsyncReplay`, with the state of the replay as last fetched."""

    def __init__(
        self, job: ReplayJob, api: ServiceApi, run: Callable[[Operation[ReplayJob]], R]
    ) -> None:
        self._api = api
        self._run = run
        self.job: ReplayJob = job
        """State and progress of the replay, as the service last returned them."""

    @property
    def replay_id(self) -> str | None:
        """Id of the replay; None for a dry run."""
        return self.job.replay_id

    @property
    def status(self) -> str:
        """RUNNING, DONE, CANCELLED or DRY_RUN."""
        return self.job.status

    @property
    def matched(self) -> int:
        """Number of dead letters that matched the filter."""
        return self.job.matched

    @property
    def replayed(self) -> int:
        """Number of dead letters that were replayed so far."""
        return self.job.replayed

    @property
    def finished(self) -> dict[str, int]:
        """Number of replayed tasks that have finished so far, by their final status."""
        return self.job.finished

    def _update(self, job: ReplayJob) -> Self:
        self.job = job
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.job!r})"


class Replay(BaseReplay["ReplayJob"]):
    """A replay of dead letters. `refresh`, `wait` and `cancel` update its properties."""

    def refresh(self) -> Self:
        """Fetch the current state of the replay."""
        return self._update(self._run(self._api.fetch_replay(self.job)))

    def wait(self, timeout: Duration | None = None) -> Self:
        """Wait until all replayed tasks have finished; raise `NotFinished` after the timeout."""
        return self._update(self._run(self._api.wait_for_replay(self.job, timeout)))

    def cancel(self) -> Self:
        """Cancel the rest of the replay; raise `Conflict` if the replay has finished."""
        return self._update(self._run(self._api.cancel_replay(self.job)))


class AsyncReplay(BaseReplay[Awaitable["ReplayJob"]]):
    """The asynchronous version of `Replay`."""

    async def refresh(self) -> Self:
        """Fetch the current state of the replay."""
        return self._update(await self._run(self._api.fetch_replay(self.job)))

    async def wait(self, timeout: Duration | None = None) -> Self:
        """Wait until all replayed tasks have finished; raise `NotFinished` after the timeout."""
        return self._update(await self._run(self._api.wait_for_replay(self.job, timeout)))

    async def cancel(self) -> Self:
        """Cancel the rest of the replay; raise `Conflict` if the replay has finished."""
        return self._update(await self._run(self._api.cancel_replay(self.job)))
