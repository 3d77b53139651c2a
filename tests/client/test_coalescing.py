"""Coalescing: `enqueue` calls that wait at the same time share one request."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import httpx
import pytest
import trio
import trio.testing

import tarry
from tarry.client import AsyncClient, Client
from tarry.client.api import ServiceApi
from tarry.client.coalescing import (
    EARLY_START_TASKS,
    MAX_COALESCED_BYTES,
    MAX_COALESCED_TASKS,
    MAX_RETURN_WAIT_S,
    SEND_ALONE,
    Batch,
    Coalescer,
    EnqueueCall,
    WaitStep,
)
from tarry.client.errors import InvalidRequest, ServiceUnreachable
from tarry.client.waiting import ThreadEvent
from tarry.core.policy import Policy
from tarry.testing import VirtualClock
from tests.client.fake_service import FakeService, StatusAndContent, problem_response

HOOK = "https://example.com/hook"
SINGLE, BATCH = "POST /retry-tasks", "POST /retry-tasks/batch"


@pytest.fixture(autouse=True)
def _no_slow_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regard no request as slow, so that the tests do not depend on the speed of the machine."""
    monkeypatch.setattr("tarry.client.coalescing.SLOW_REQUEST_S", 3600.0)


def request_sizes(service: FakeService) -> list[int]:
    """Return the number of tasks in each request that the service has received."""
    return [len(request.json.get("tasks", [0])) for request in service.requests]


async def enqueue_all(client: AsyncClient, count: int, **options: Any) -> list[Any]:
    """Add tasks at the same time; return their tasks and errors."""
    calls = [client.enqueue(HOOK, key=f"key-{n}", **options) for n in range(count)]
    return await asyncio.gather(*calls, return_exceptions=True)


async def run_enqueue(service: FakeService, count: int, **options: Any) -> list[Any]:
    """Open a client, and add tasks at the same time; return their tasks and errors."""
    async with AsyncClient(service.url, **options) as client:
        return await enqueue_all(client, count)


def test_waiting_calls_share_a_request(service: FakeService) -> None:
    """The first call is sent at once; the calls that wait for its end share one batch."""
    tasks = asyncio.run(run_enqueue(service, 10))
    assert [f"key-{n}" for n in range(10)] == [task.idempotency_key for task in tasks]
    assert [1, 9] == request_sizes(service)


def test_consecutive_calls_are_sent_alone(service: FakeService) -> None:
    """A program that makes one call at a time sends one request for each."""
    with Client(service.url) as client:
        tasks = [client.enqueue(HOOK, key=f"key-{n}") for n in range(3)]
    assert ["key-0", "key-1", "key-2"] == [task.idempotency_key for task in tasks]
    assert [SINGLE] * 3 == [f"{each.method} {each.path}" for each in service.requests]


def test_coalescing_can_be_turned_off(service: FakeService) -> None:
    """With `coalesce=False`, each call sends its own request."""
    asyncio.run(run_enqueue(service, 5, coalesce=False))
    assert [1] * 5 == request_sizes(service)


def test_threads_share_a_request(service: FakeService) -> None:
    """Threads that share a client and wait at the same time share one request."""
    can_respond, waiting_calls = threading.Event(), threading.Semaphore(0)

    def respond_later(request: Any) -> StatusAndContent:
        can_respond.wait()
        return service.add_task(request.json)

    def new_event() -> ThreadEvent:
        waiting_calls.release()
        return ThreadEvent()

    service.responses[SINGLE] = respond_later
    with Client(service.url) as client, ThreadPoolExecutor(8) as threads:
        client._coalescer = Coalescer(new_event)
        futures = [threads.submit(client.enqueue, HOOK, key=f"key-{n}") for n in range(8)]
        for _ in range(7):
            waiting_calls.acquire()
        can_respond.set()
        keys = [future.result().idempotency_key for future in futures]
    assert [f"key-{n}" for n in range(8)] == keys
    assert [1, 7] == request_sizes(service)


def test_each_call_gets_its_own_error(service: FakeService) -> None:
    """A task that the service rejects raises an error for its own caller only."""

    def reject_one(request: Any) -> StatusAndContent:
        results: list[dict[str, Any]] = []
        for task in request.json["tasks"]:
            if task["idempotencyKey"] == "key-3":
                _, problem = problem_response(422, "Invalid", "Wrong.", field="targetUrl")
                results.append({"status": 422, "problem": problem})
            else:
                results.append({"status": 201, "task": service.add_task(task)[1]})
        return 200, {"results": results}

    service.responses[BATCH] = reject_one
    *tasks, error, last_task = asyncio.run(run_enqueue(service, 5))
    assert ["key-0", "key-1", "key-2"] == [task.idempotency_key for task in tasks]
    assert "key-4" == last_task.idempotency_key
    assert isinstance(error, InvalidRequest)
    assert (422, "targetUrl") == (error.status, error.field)
    assert "POST /retry-tasks was answered with 422: Wrong." == str(error)


@pytest.mark.usefixtures("_no_wait")
def test_task_that_cannot_be_added_now_is_retried_alone(service: FakeService) -> None:
    """A task of a batch that the service could not store is sent by itself, and retried."""

    def reject_last(request: Any) -> StatusAndContent:
        *first, _ = request.json["tasks"]
        results = [{"status": 201, "task": service.add_task(task)[1]} for task in first]
        return 200, {"results": [*results, {"status": 503, "problem": {"title": "Not now"}}]}

    service.responses[BATCH] = reject_last
    service.faults.extend(["", "", "503", ""])
    tasks = asyncio.run(run_enqueue(service, 5))
    assert [f"key-{n}" for n in range(5)] == [task.idempotency_key for task in tasks]
    assert [1, 4, 1, 1] == request_sizes(service)


@pytest.mark.usefixtures("_no_wait")
def test_lost_connection_sends_the_same_keys_again(service: FakeService) -> None:
    """A batch whose response is lost is sent again with the same keys, and adds each task once."""
    service.faults.extend(["", "drop", "cut"])
    tasks = asyncio.run(run_enqueue(service, 6))
    assert 6 == len({task.task_id for task in tasks}) == len(service.tasks)
    assert [1, 5, 5, 5] == request_sizes(service)


async def test_unreachable_service_raises_an_error_for_each_call() -> None:
    """If a batch gets no response, each of its calls raises an error of its own."""
    policy = Policy(max_attempts=1)
    async with AsyncClient("http://127.0.0.1:9", policy=policy) as client:
        errors = await enqueue_all(client, 5)
    assert {ServiceUnreachable} == {type(error) for error in errors}
    assert 5 == len({id(error) for error in errors})
    assert all(error.__cause__ is not None for error in errors)


@pytest.mark.parametrize("status", [403, 404, 409, 413])
def test_rejected_batch_is_sent_as_single_tasks(service: FakeService, status: int) -> None:
    """If the service or a proxy rejects a batch as a whole, each of its tasks is sent alone."""
    service.responses[BATCH] = problem_response(status, "Rejected", "No batches.")
    tasks = asyncio.run(run_enqueue(service, 5))
    assert [f"key-{n}" for n in range(5)] == [task.idempotency_key for task in tasks]
    assert [1, 4, 1, 1, 1, 1] == request_sizes(service)


def test_response_without_a_result_for_each_task_is_not_used(service: FakeService) -> None:
    """After a batch response with the wrong number of results, each of the tasks is sent alone."""
    service.responses[BATCH] = 200, {"results": [{"status": 201, "task": None}]}
    tasks = asyncio.run(run_enqueue(service, 4))
    assert [f"key-{n}" for n in range(4)] == [task.idempotency_key for task in tasks]
    assert [1, 3, 1, 1, 1] == request_sizes(service)


def test_wrong_key_raises_an_error_for_each_call(service: FakeService) -> None:
    """After a 401 for a batch, its tasks are not sent alone: the key is the same."""
    service.responses[BATCH] = problem_response(401, "Unauthorized", "Unknown key.")
    _, *errors = asyncio.run(run_enqueue(service, 4))
    assert [401] * 3 == [error.status for error in errors]
    assert [1, 3] == request_sizes(service)


@pytest.mark.parametrize("options", [{"wait": 1.0}, {}])
async def test_call_with_a_wait_or_deadline_is_sent_alone(
    service: FakeService, options: dict[str, Any]
) -> None:
    """A call that waits for its result, or that has a deadline, does not share its request."""
    async with AsyncClient(service.url) as client:
        if options:
            await enqueue_all(client, 4, **options)
        else:
            with tarry.deadline(30):
                await enqueue_all(client, 4)
    assert [1] * 4 == request_sizes(service)


class DelayedBatch:
    """The first batch that the service receives, whose response waits for `can_respond`."""

    def __init__(self, service: FakeService) -> None:
        self.is_received, self.can_respond = threading.Event(), threading.Event()
        self._service = service
        service.responses[BATCH] = self._respond_later

    def _respond_later(self, request: Any) -> StatusAndContent:
        del self._service.responses[BATCH]
        self.is_received.set()
        self.can_respond.wait()
        return self._service.respond(request)


async def test_cancelled_sender_does_not_affect_other_calls(service: FakeService) -> None:
    """If the call that sends a batch is cancelled, another call sends the batch again."""
    delayed_batch = DelayedBatch(service)

    async with AsyncClient(service.url) as client:
        calls = [asyncio.create_task(client.enqueue(HOOK, key=f"key-{n}")) for n in range(6)]
        await asyncio.to_thread(delayed_batch.is_received.wait)
        calls[1].cancel()
        await asyncio.wait(calls[1:2])
        delayed_batch.can_respond.set()
        assert calls[1].cancelled()
        tasks = await asyncio.gather(*calls[2:])
    assert ["key-2", "key-3", "key-4", "key-5"] == [task.idempotency_key for task in tasks]
    assert [1, 5, 4] == request_sizes(service)


def test_cancelled_waiting_call_is_not_sent(service: FakeService) -> None:
    """A call that is cancelled while it waits is not sent, and the next call sends the batch."""

    async def main() -> list[Any]:
        async with AsyncClient(service.url) as client:
            calls = [asyncio.create_task(client.enqueue(HOOK, key=f"key-{n}")) for n in range(6)]
            await asyncio.sleep(0)
            calls[2].cancel()
            await asyncio.wait(calls)
            return [call.result() for call in (*calls[:2], *calls[3:])]

    asyncio.run(main())
    assert ["key-0", "key-1", "key-3", "key-4", "key-5"] == list(service.tasks)


def test_cancelled_sender_on_trio_does_not_affect_other_calls(service: FakeService) -> None:
    """On trio, calls share requests, and if a sender is cancelled, another call sends the batch."""
    delayed_batch = DelayedBatch(service)
    keys: list[str] = []

    async def main() -> None:
        async with AsyncClient(service.url) as client, trio.open_nursery() as nursery:
            scopes = [trio.CancelScope() for _ in range(6)]

            async def enqueue(number: int) -> None:
                with scopes[number]:
                    keys.append((await client.enqueue(HOOK, key=f"key-{number}")).idempotency_key)

            for number in range(6):
                nursery.start_soon(enqueue, number)
            await trio.to_thread.run_sync(delayed_batch.is_received.wait)
            sender = next(n for n in range(6) if client_sends(client, n))
            keys.append(f"key-{sender}")  # cancelled below
            scopes[sender].cancel()
            await trio.testing.wait_all_tasks_blocked()
            delayed_batch.can_respond.set()

    def client_sends(client: AsyncClient, number: int) -> bool:
        assert client._coalescer is not None
        [batch] = client._coalescer._batches
        sender = next(call for call in batch.calls if call.sent_batch is batch)
        return f'"key-{number}"'.encode() in (sender.request.content or b"")

    trio.run(main)
    assert {f"key-{n}" for n in range(6)} == set(keys)
    assert [1, 5, 4] == request_sizes(service)


async def test_cancelled_calls_do_not_block_the_others(service: FakeService) -> None:
    """If a waiting call of a batch is cancelled, and then its sender, the others are sent again."""
    delayed_batch = DelayedBatch(service)

    async with AsyncClient(service.url) as client:
        calls = [asyncio.create_task(client.enqueue(HOOK, key=f"key-{n}")) for n in range(6)]
        await asyncio.to_thread(delayed_batch.is_received.wait)
        for number in (2, 1):  # 1 is the sender
            calls[number].cancel()
            await asyncio.wait([calls[number]])
        delayed_batch.can_respond.set()
        tasks = await asyncio.gather(*calls[3:])
    assert ["key-3", "key-4", "key-5"] == [task.idempotency_key for task in tasks]
    assert [1, 5, 3] == request_sizes(service)


def test_error_that_cannot_be_copied_is_raised_for_each_call(service: FakeService) -> None:
    """An error of a custom transport that cannot be copied ends all calls of the batch."""

    class TransportError(Exception):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(first)

    class FailingTransport(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/batch"):
                raise TransportError("a", "b")
            return await super().handle_async_request(request)

    results = asyncio.run(run_enqueue(service, 4, transport=FailingTransport()))
    assert "key-0" == results[0].idempotency_key
    assert [TransportError] * 3 == [type(error) for error in results[1:]]


def test_client_works_after_a_fork(service: FakeService) -> None:
    """A process that was forked while a request was under way does not wait for this request."""
    with Client(service.url) as client:
        assert client._coalescer is not None
        call: EnqueueCall[ThreadEvent] = EnqueueCall(ServiceApi().enqueue(HOOK, None, None, {}))
        client._coalescer.add(call)
        client._coalescer.next_step(call)
        client._coalescer._process_id -= 1  # as in a child process
        assert "key-1" == client.enqueue(HOOK, key="key-1").idempotency_key


async def test_blocking_client_on_an_event_loop_does_not_share_requests(
    service: FakeService,
) -> None:
    """On an event loop, the blocking client cannot wait for a retry, so it sends its call alone."""
    with Client(service.url) as client:
        client._coalescer = None
        first = client.enqueue(HOOK, key="key-1")
        client._coalescer = Coalescer(ThreadEvent)
        client._coalescer.add(EnqueueCall(ServiceApi().enqueue(HOOK, None, None, {})))
        assert first.task_id != client.enqueue(HOOK, key="key-2").task_id
    assert [1, 1] == request_sizes(service)


class FakeEvent:
    """An event that counts how often it was set."""

    def __init__(self) -> None:
        self.set_count = 0

    def set(self) -> None:
        """Count the call."""
        self.set_count += 1


@pytest.fixture
def coalescer() -> Coalescer[FakeEvent]:
    """A coalescer without requests."""
    return Coalescer(FakeEvent)


def add_calls(
    coalescer: Coalescer[FakeEvent], count: int, size: int = 0
) -> list[EnqueueCall[FakeEvent]]:
    """Add calls whose tasks have a body of `size` bytes."""
    calls: list[EnqueueCall[FakeEvent]] = []
    for number in range(count):
        request = ServiceApi().enqueue(HOOK, "x" * size, None, {"key": f"key-{number}"})
        calls.append(EnqueueCall(request))
        coalescer.add(calls[-1])
    return calls


def next_batch(coalescer: Coalescer[FakeEvent], call: EnqueueCall[FakeEvent]) -> Batch[FakeEvent]:
    """Return the batch that the caller has to send now."""
    step = coalescer.next_step(call)
    assert isinstance(step, Batch)
    return step


def next_wait(coalescer: Coalescer[FakeEvent], call: EnqueueCall[FakeEvent]) -> WaitStep[FakeEvent]:
    """Return the wait of the caller."""
    step = coalescer.next_step(call)
    assert isinstance(step, WaitStep)
    return step


def take_calls(
    coalescer: Coalescer[FakeEvent], call: EnqueueCall[FakeEvent]
) -> list[EnqueueCall[FakeEvent]]:
    """Take a batch and complete it; return its calls."""
    batch = next_batch(coalescer, call)
    coalescer.complete(batch, [None] * len(batch.calls))
    return batch.calls


def test_batch_has_a_maximum_number_of_tasks(coalescer: Coalescer[FakeEvent]) -> None:
    """The calls that do not fit in a batch are sent with the next one."""
    [first] = add_calls(coalescer, 1)
    first_batch = next_batch(coalescer, first)
    calls = add_calls(coalescer, MAX_COALESCED_TASKS + 3)
    assert calls[:MAX_COALESCED_TASKS] == take_calls(coalescer, calls[-1])
    coalescer.complete(first_batch, [None])
    assert calls[MAX_COALESCED_TASKS:] == take_calls(coalescer, calls[-1])


def test_many_waiting_calls_are_sent_with_two_requests(coalescer: Coalescer[FakeEvent]) -> None:
    """If no request is under way, each of two requests sends half of the calls."""
    calls = add_calls(coalescer, 2 * EARLY_START_TASKS)
    first_batch = next_batch(coalescer, calls[0])
    second_batch = next_batch(coalescer, calls[-1])
    assert calls[:EARLY_START_TASKS] == first_batch.calls
    assert calls[EARLY_START_TASKS:] == second_batch.calls


def test_batch_has_a_maximum_size(coalescer: Coalescer[FakeEvent]) -> None:
    """A batch has a maximum size in bytes; a task above it is sent alone."""
    calls = add_calls(coalescer, 3, MAX_COALESCED_BYTES // 3)
    calls += add_calls(coalescer, 1, MAX_COALESCED_BYTES + 1)
    calls += add_calls(coalescer, 1)
    sizes = [len(take_calls(coalescer, calls[-1])) for _ in range(4)]
    assert [2, 1, 1, 1] == sizes


def test_end_of_a_request_wakes_one_waiting_call(coalescer: Coalescer[FakeEvent]) -> None:
    """When a request ends, the longest waiting call is woken, and it sends all waiting calls."""
    first, second = add_calls(coalescer, 2)
    batch = next_batch(coalescer, first)
    assert [first, second] == batch.calls
    third, fourth = add_calls(coalescer, 2)
    third_event = next_wait(coalescer, third).event
    fourth_event = next_wait(coalescer, fourth).event
    coalescer.complete(batch, [None, None])
    assert (1, 0) == (third_event.set_count, fourth_event.set_count)
    coalescer.withdraw(third)
    assert 1 == fourth_event.set_count
    assert [fourth] == take_calls(coalescer, fourth)


def test_many_waiting_calls_do_not_wait_for_the_first_request(
    coalescer: Coalescer[FakeEvent],
) -> None:
    """When many calls wait, a second request is sent; there is never a third."""
    [first] = add_calls(coalescer, 1)
    next_batch(coalescer, first)
    waiting = add_calls(coalescer, EARLY_START_TASKS - 1)
    next_wait(coalescer, waiting[-1])
    waiting += add_calls(coalescer, 1)
    second_batch = next_batch(coalescer, waiting[-1])
    assert waiting == second_batch.calls
    others = add_calls(coalescer, EARLY_START_TASKS)
    next_wait(coalescer, others[-1])


def test_slow_request_does_not_block_other_calls(
    coalescer: Coalescer[FakeEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first waiting call waits until the request is slow, and then sends all waiting calls."""
    monkeypatch.setattr("tarry.client.coalescing.SLOW_REQUEST_S", 0.5)
    with VirtualClock() as clock:
        [first] = add_calls(coalescer, 1)
        next_batch(coalescer, first)
        clock.advance(0.2)
        second, third = add_calls(coalescer, 2)
        assert pytest.approx(0.3) == next_wait(coalescer, second).max_wait_s
        assert next_wait(coalescer, third).max_wait_s is None
        clock.advance(0.3)
        assert [second, third] == take_calls(coalescer, second)


def complete_shared_request(coalescer: Coalescer[FakeEvent]) -> list[EnqueueCall[FakeEvent]]:
    """Complete a request of three calls, which the first call has sent; return the calls."""
    calls = add_calls(coalescer, 3)
    batch = next_batch(coalescer, calls[0])
    for call in calls[1:]:
        next_wait(coalescer, call)
    coalescer.complete(batch, [None] * 3)
    return calls


def test_next_request_waits_until_the_callers_have_returned(
    coalescer: Coalescer[FakeEvent],
) -> None:
    """Callers of a request that call `enqueue` again at once share the next request."""
    with VirtualClock():
        sender, *others = complete_shared_request(coalescer)
        coalescer.take_result(sender)
        [first] = add_calls(coalescer, 1)
        first_event, max_wait_s = next_wait(coalescer, first)
        assert MAX_RETURN_WAIT_S == pytest.approx(max_wait_s)
        coalescer.take_result(others[0])
        [second] = add_calls(coalescer, 1)
        next_wait(coalescer, second)
        coalescer.take_result(others[1])
        assert 1 == first_event.set_count
        assert [first, second] == take_calls(coalescer, first)


def test_caller_that_does_not_return_does_not_block_other_calls(
    coalescer: Coalescer[FakeEvent],
) -> None:
    """The next request waits only for a short time, and later requests do not wait again."""
    with VirtualClock() as clock:
        sender, *others = complete_shared_request(coalescer)
        coalescer.take_result(sender)
        clock.advance(MAX_RETURN_WAIT_S)
        calls = add_calls(coalescer, 1)
        assert calls == take_calls(coalescer, calls[0])
        calls = add_calls(coalescer, 1)
        assert calls == take_calls(coalescer, calls[0])
        for call in others:
            assert SEND_ALONE is coalescer.take_result(call)


def test_thread_event_is_cleared_by_a_wait() -> None:
    """A wait ends when the event is set, or after the timeout; setting it twice is an error."""
    event = ThreadEvent()
    event.wait(0)
    event.set()
    event.wait(None)
    event.set()
    with pytest.raises(RuntimeError):
        event.set()


@pytest.mark.parametrize("driver_name", ["sync", "asyncio"])
def test_lost_request_does_not_block_other_calls(
    service: FakeService, driver_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that wait for a request without a response are sent with another request."""
    monkeypatch.setattr("tarry.client.coalescing.SLOW_REQUEST_S", 0.01)
    can_respond = threading.Event()

    def hold_first_task(request: Any) -> StatusAndContent:
        service.lock.release()  # other requests are processed meanwhile
        if request.json["idempotencyKey"] == "key-0":
            can_respond.wait()
        service.lock.acquire()
        return service.add_task(request.json)

    async def main() -> None:
        async with AsyncClient(service.url) as client:
            calls = [asyncio.create_task(client.enqueue(HOOK, key=f"key-{n}")) for n in range(4)]
            await asyncio.wait(calls[1:])
            assert not calls[0].done()
            can_respond.set()
            await asyncio.wait(calls)

    service.responses[SINGLE] = hold_first_task
    if driver_name == "asyncio":
        asyncio.run(main())
    else:
        with Client(service.url) as client, ThreadPoolExecutor(4) as threads:
            first = threads.submit(client.enqueue, HOOK, key="key-0")
            others = [threads.submit(client.enqueue, HOOK, key=f"key-{n}") for n in range(1, 4)]
            wait(others)
            assert not first.done()
            can_respond.set()
    assert {f"key-{n}" for n in range(4)} == set(service.tasks)


def test_finished_call_takes_no_batch(coalescer: Coalescer[FakeEvent]) -> None:
    """A call that was finished by the request of another call sends nothing."""
    calls = add_calls(coalescer, 2)
    take_calls(coalescer, calls[0])
    later = add_calls(coalescer, 1)
    assert coalescer.next_step(calls[1]) is None
    assert later == take_calls(coalescer, later[0])


def test_errors_are_copied_with_their_notes(coalescer: Coalescer[FakeEvent]) -> None:
    """Each call of a failed batch has its own error, with the same attributes and notes."""
    calls = add_calls(coalescer, 2)
    error = ServiceUnreachable("no response", retry_after=3.0)
    error.add_note("a note")
    batch = next_batch(coalescer, calls[0])
    coalescer.fail(batch, error)
    first, second = calls[0].result, calls[1].result
    assert error is first
    assert isinstance(second, ServiceUnreachable)
    assert second is not error
    assert (3.0, ["a note"]) == (second.retry_after, second.__notes__)
    second.add_note("another note")
    assert ["a note"] == error.__notes__
