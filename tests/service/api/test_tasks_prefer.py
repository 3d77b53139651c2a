"""`Prefer: wait` on an existing task."""

from __future__ import annotations

import asyncio
from base64 import b64decode

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.api.context import ApiLimits
from tarry.service.delivery import DeliveryResult
from tarry.service.engine.reporting import FinishedTask
from tarry.service.model import Status, Task
from tests.service.api.harness import ApiHarness, Response
from tests.service.api.test_auth import create_key


async def read_and_wait(api: ApiHarness, task_id: str, wait: int = 5) -> Response:
    """Read a task with `Prefer: wait`."""
    return await api.request("GET", f"/retry-tasks/{task_id}", headers={"Prefer": f"wait={wait}"})


async def test_reading_a_task_can_wait_for_its_result(api: ApiHarness) -> None:
    """The response has the finished task and the target's response."""
    task_id = (await api.create())["taskId"]
    request = asyncio.create_task(read_and_wait(api, task_id))
    assert task_id == await api.engine.waited_for.get()
    delivered = DeliveryResult(status=200, excerpt=b"done")
    api.engine.reporter.notify_waiters(task_id, FinishedTask(Status.SUCCEEDED, None, delivered))
    response = await request
    assert (200, "wait=5") == (response.status, response.header("preference-applied"))
    assert ("SUCCEEDED", "done") == (response.json["status"], response.json["response"]["body"])


@pytest.mark.parametrize(
    ("is_running", "intervals"),
    [(None, [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 0.45]), (False, [1.0, 1.0, 1.0])],
)
async def test_a_task_of_another_process_is_polled_sooner(
    api: ApiHarness, is_running: bool | None, intervals: list[float]
) -> None:
    """The first polls of a task that is not leased here are 50 ms apart, later ones a second."""
    waited: list[float] = []

    async def wait_until_finished(task_id: str, seconds: float) -> None:
        waited.append(round(seconds, 3))

    api.engine.is_running = lambda task_id: is_running  # type: ignore[method-assign]
    api.engine.wait_until_finished = wait_until_finished  # type: ignore[method-assign]
    await read_and_wait(api, (await api.create())["taskId"], 3)
    assert intervals == [seconds for seconds in waited if seconds]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("suffix", [b"", b"\xff"], ids=["text", "bytes"])
async def test_secrets_that_a_target_echoes_are_redacted_in_its_response(
    api: ApiHarness, method: str, suffix: bytes
) -> None:
    """Secrets of the task in body and headers, and secret response headers, are redacted."""
    document = {
        "targetUrl": "https://example.com/?token=sesame-one",
        "headers": {"Authorization": "Bearer sesame-two"},
        "idempotencyKey": "k",
    }
    path = "/retry-tasks"
    if method == "GET":
        path += f"/{(await api.create(**document))['taskId']}"
    request = asyncio.create_task(
        api.request(
            method, path, document if method == "POST" else None, headers={"Prefer": "wait=5"}
        )
    )
    task_id = await api.engine.waited_for.get()
    echo = DeliveryResult(
        status=200,
        headers=[("x-echo", "for sesame-one"), ("set-cookie", "a=b"), ("x-plain", "shown")],
        excerpt=b"you sent sesame-two" + suffix,
    )
    api.engine.reporter.notify_waiters(task_id, FinishedTask(Status.SUCCEEDED, None, echo))
    response = (await request).json["response"]
    expected = {"x-echo": "for [redacted]", "set-cookie": "[redacted]", "x-plain": "shown"}
    assert expected == response["headers"]
    body = b64decode(response["bodyBase64"]) if suffix else response["body"].encode()
    assert b"you sent [redacted]" + suffix == body


async def test_a_task_finished_by_another_process_is_noticed(api: ApiHarness) -> None:
    """The wait polls the store."""
    task_id = (await api.create())["taskId"]
    polls: list[str] = []

    async def wait_until_finished(task_id: str, seconds: float) -> None:
        polls.append(task_id)
        if len(polls) == 3:
            await api.exhaust_due_tasks()

    api.engine.wait_until_finished = wait_until_finished  # type: ignore[method-assign]
    response = await read_and_wait(api, task_id, 60)
    assert ("EXHAUSTED", "attempts") == (response.json["status"], response.json["reason"])
    assert 3 == len(polls)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_wait_of_a_disconnected_client_ends(method: str) -> None:
    """The slot is free for another request after the next poll, not only when the wait is over."""
    api = ApiHarness(limits=ApiLimits(max_waiting_requests=1))
    path, document = "/retry-tasks", None
    if method == "GET":
        path += f"/{(await api.create())['taskId']}"
    else:
        document = {"targetUrl": "https://example.com/"}
    polls: list[str] = []

    async def wait_until_finished(task_id: str, seconds: float) -> None:
        polls.append(task_id)

    api.engine.wait_until_finished = wait_until_finished  # type: ignore[method-assign]
    headers = {"Prefer": "wait=60"}
    for _ in range(2):
        response = await api.request(
            method, path, document, headers=headers, is_abandoned=lambda: len(polls) % 3 == 0
        )
        assert "PENDING" == response.json["status"]
    assert 6 == len(polls)


async def test_a_finished_task_is_returned_immediately(api: ApiHarness) -> None:
    """Reading a finished task does not wait."""
    task_id = (await api.create())["taskId"]
    await api.exhaust_due_tasks()
    response = await read_and_wait(api, task_id, 60)
    assert ("EXHAUSTED", "wait=60") == (
        response.json["status"],
        response.header("preference-applied"),
    )
    assert api.engine.waited_for.empty()


async def test_an_unknown_task_is_404_with_a_preference(api: ApiHarness) -> None:
    """`Prefer: wait` for an unknown task returns 404 without a wait."""
    assert 404 == (await read_and_wait(api, "01890000-0000-7000-8000-0000000000ff")).status


async def test_a_store_failure_does_not_end_the_wait(api: ApiHarness) -> None:
    """If the store fails during the wait, the last known state is returned."""
    task_id = (await api.create())["taskId"]

    async def wait_until_finished(task_id: str, seconds: float) -> None:
        api.store.get_task = fail  # type: ignore[method-assign]

    async def fail(tenant: str, task_id: str) -> Task | None:
        msg = "disk full"
        raise StoreUnavailable(msg)

    api.engine.wait_until_finished = wait_until_finished  # type: ignore[method-assign]
    response = await read_and_wait(api, task_id, 2)
    assert (200, "PENDING") == (response.status, response.json["status"])


async def test_new_and_existing_tasks_share_the_limit_of_waiting_requests() -> None:
    """While one request waits, a limit of one applies to POST and to GET."""
    api = ApiHarness(limits=ApiLimits(max_waiting_requests=1))
    task_id = (await api.create())["taskId"]
    request = asyncio.create_task(read_and_wait(api, task_id))
    await api.engine.waited_for.get()
    headers = {"Prefer": "wait=5"}
    document = {"targetUrl": "https://example.com/"}
    new = await api.request("POST", "/retry-tasks", document, headers=headers)
    existing = await read_and_wait(api, task_id)
    assert [None, None] == [response.header("preference-applied") for response in (new, existing)]
    api.engine.reporter.notify_waiters(task_id, FinishedTask(Status.CANCELLED, None, None))
    assert "CANCELLED" == (await request).json["status"]
    assert "wait=0" == (await read_and_wait(api, task_id, 0)).header("preference-applied")


async def test_tenants_share_the_waiting_requests() -> None:
    """A tenant may have as many waiting requests as are free; then others can still wait."""
    api = ApiHarness(keys=True, limits=ApiLimits(max_waiting_requests=4))
    secrets = [(await create_key(api, tenant))[0] for tenant in ("acme", "beta")]

    async def create_and_wait(secret: str) -> Response:
        headers = {"X-API-Key": secret, "Prefer": "wait=5"}
        document = {"targetUrl": "https://example.com/"}
        return await api.request("POST", "/retry-tasks", document, headers=headers)

    waiting = [asyncio.create_task(create_and_wait(secrets[0])) for _ in range(2)]
    task_ids = [await api.engine.waited_for.get() for _ in waiting]
    assert (await create_and_wait(secrets[0])).header("preference-applied") is None
    waiting.append(asyncio.create_task(create_and_wait(secrets[1])))
    task_ids.append(await api.engine.waited_for.get())
    for task_id in task_ids:
        finished = FinishedTask(Status.CANCELLED, None, None)
        api.engine.reporter.notify_waiters(task_id, finished)
    responses = await asyncio.gather(*waiting)
    assert ["wait=5"] * 3 == [each.header("preference-applied") for each in responses]


async def test_shutdown_ends_all_waits(api: ApiHarness) -> None:
    """A waiting request is answered with the current state of the task."""
    task_id = (await api.create())["taskId"]
    polls: list[str] = []

    async def wait_until_finished(task_id: str, seconds: float) -> None:
        polls.append(task_id)
        api.api.close()

    api.engine.wait_until_finished = wait_until_finished  # type: ignore[method-assign]
    assert "PENDING" == (await read_and_wait(api, task_id, 60)).json["status"]
    assert 1 == len(polls)
