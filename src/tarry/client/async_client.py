"""The asynchronous client of the retry service, and the replays that it returns.

`make client` generates the blocking client, `tarry.client.client`, from this module. The clients
send the requests that `ServiceApi` builds. `tarry.client.waiting` has what differs between them.
"""

from __future__ import annotations

from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.client.coalescing import SEND_ALONE, Coalescer, EnqueueCall, WaitStep
from tarry.client.transport import (
    MAX_RECONNECT_DELAY_S,
    AsyncBufferingTransport,
    ClientConfig,
    EventStreamParser,
    is_event_stream,
    logger,
)
from tarry.client.waiting import (
    async_can_share_requests,
    async_sleep,
    async_wait_for_step,
    new_async_event,
)
from tarry.errors import TarryError
from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Iterable,
        Mapping,
    )
    from types import TracebackType
    from typing import Self, Unpack

    import httpx

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
    from tarry.client.waiting import AsyncEvent
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

T = TypeVar("T")


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
        self._coalescer = Coalescer(new_async_event) if coalesce else None

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
        """Add a task, which is an HTTP call that the service makes and retries.

        When this method returns, the task is stored durably. `body` is text, bytes or any JSON
        value. With `wait`, the service responds once the task has finished, or after `wait`
        seconds. The options are described in `EnqueueOptions`: method, headers, body_ref, policy,
        policy_version, key (the idempotency key), lane_key, delay, at, overrides, callback,
        callback_policy, prior_attempts, traceparent, tracestate.
        """
        request = self._api.enqueue(url, body, wait, options)
        if self._coalescer is None or wait is not None or not async_can_share_requests():
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
        """Cancel all unfinished tasks that match the filters of `CancelOptions`.

        With `dry_run`, the matching tasks are only counted. `all=True` cancels all tasks.
        """
        return await self._run(self._api.cancel_many(options))

    async def retry(self, task: str | RetryTask) -> RetryTask:
        """Make the next attempt of a task now; a dead or cancelled task gets all attempts again."""
        return await self._send(self._api.retry(task))

    def dead_letters(self, **filters: Unpack[DeadLetterFilter]) -> AsyncIterator[RetryTask]:
        """Iterate over dead letters, newest first; for the filters see `DeadLetterFilter`."""
        return self._iterate_pages(lambda cursor: self._api.dead_letters(cursor, filters))

    async def replay(self, **options: Unpack[ReplayOptions]) -> AsyncReplay:
        """Start a replay of dead letters.

        The filters are described in `DeadLetterFilter`; `before` is the same as `finished_before`.
        `rate` is in tasks per second, by default 50; 0: all at once. With `dry_run`, the matching
        dead letters are only counted. `all=True` replays all dead letters.
        """
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
        """Create a signing secret (Standard Webhooks) for a lane, or for all without their own.

        The result has the `secret`, which cannot be fetched again, or the `public_key` (ED25519).
        `secret` is your own secret; by default the service generates one of this `type`. The
        previous secrets sign, too, for `expire_previous` (by default 24 hours).
        """
        return await self._send(
            self._api.create_signing_secret(lane, type, secret, expire_previous)
        )

    async def signing_secrets(self) -> list[SigningSecret]:
        """Return the signing secrets that have not expired, newest first, without the secrets."""
        page = await self._send(self._api.signing_secrets())
        return page.items

    async def delete_signing_secret(self, secret_id: str) -> None:
        """Delete a signing secret; it signs no more attempts."""
        await self._send(self._api.delete_signing_secret(secret_id))

    def events(self) -> AsyncGenerator[ServiceEvent, None]:
        """Iterate over new events; events sent while the connection is lost are missed."""
        return self._read_events()

    async def workers(self) -> list[WorkerInfo]:
        """Return the processes of the service. With API keys, only the operator may do this."""
        page = await self._send(self._api.workers())
        return page.items

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
        """Send an `enqueue` request, perhaps in a batch with those of other callers."""
        call: EnqueueCall[AsyncEvent] = EnqueueCall(request)
        try:
            coalescer.add(call)
            while (step := coalescer.next_step(call)) is not None:
                if isinstance(step, WaitStep):
                    await async_wait_for_step(step)
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
        """Send the requests and sleep the seconds that an operation yields; return its result."""
        response: Any = None
        try:
            while True:
                step = operation.send(response)
                if isinstance(step, (float, int)):
                    await async_sleep(step)
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
            await async_sleep(MAX_RECONNECT_DELAY_S * effects.draw_random())


class AsyncReplay:
    """The asynchronous version of `Replay`."""

    def __init__(
        self,
        job: ReplayJob,
        api: ServiceApi,
        run: Callable[[Operation[ReplayJob]], Awaitable[ReplayJob]],
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

    async def refresh(self) -> Self:
        """Fetch the current state of the replay."""
        return self._update(await self._run(self._api.fetch_replay(self.job)))

    async def wait(self, timeout: Duration | None = None) -> Self:
        """Wait until all replayed tasks have finished; raise `NotFinished` after the timeout."""
        return self._update(await self._run(self._api.wait_for_replay(self.job, timeout)))

    async def cancel(self) -> Self:
        """Cancel the rest of the replay; raise `Conflict` if the replay has finished."""
        return self._update(await self._run(self._api.cancel_replay(self.job)))
