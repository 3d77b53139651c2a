"""`Prefer: wait` on a task that is there already."""

from __future__ import annotations

import asyncio
from base64 import b64decode

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.api.context import ApiLimits
from tarry.service.delivery.messages import DeliveryResult
from tarry.service.engine.reporting import TaskCompletion
from tarry.service.model import Status, Task
from tests.service.api.harness import Reply, Rig, with_rig


async def ask(rig: Rig, task_id: str, wait: int = 5) -> Reply:
    """Look at a task, and wait for its end."""
    return await rig.ask("GET", f"/retry-tasks/{task_id}", headers={"Prefer": f"wait={wait}"})


def test_a_look_can_wait_for_the_end() -> None:
    """The task as it ended, and the target's response, as if it had been waited for at first."""

    async def test(rig: Rig) -> None:
        task_id = (await rig.create())["taskId"]
        asking = asyncio.create_task(ask(rig, task_id))
        assert task_id == await rig.engine.waited_for.get()
        delivered = DeliveryResult(status=200, excerpt=b"done")
        rig.engine.waiters.notify(task_id, TaskCompletion(Status.SUCCEEDED, None, delivered))
        reply = await asking
        assert (200, "wait=5") == (reply.status, reply.header("preference-applied"))
        assert ("SUCCEEDED", "done") == (reply.json["status"], reply.json["response"]["body"])

    with_rig(test)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("tail", [b"", b"\xff"], ids=["text", "bytes"])
def test_secrets_that_a_target_echoes_are_redacted_in_its_response(
    method: str, tail: bytes
) -> None:
    """In its body, whatever that is, and in its headers; what goes by a secret's name as well."""

    async def test(rig: Rig) -> None:
        document = {
            "targetUrl": "https://example.com/?token=sesame-one",
            "headers": {"Authorization": "Bearer sesame-two"},
            "idempotencyKey": "k",
        }
        path = "/retry-tasks"
        if method == "GET":
            path += f"/{(await rig.create(**document))['taskId']}"
        asking = asyncio.create_task(
            rig.ask(
                method,
                path,
                document if method == "POST" else None,
                headers={"Prefer": "wait=5"},
            )
        )
        task_id = await rig.engine.waited_for.get()
        echo = DeliveryResult(
            status=200,
            headers=[("x-echo", "for sesame-one"), ("set-cookie", "a=b"), ("x-plain", "shown")],
            excerpt=b"you sent sesame-two" + tail,
        )
        rig.engine.waiters.notify(task_id, TaskCompletion(Status.SUCCEEDED, None, echo))
        response = (await asking).json["response"]
        expected = {"x-echo": "for [redacted]", "set-cookie": "[redacted]", "x-plain": "shown"}
        assert expected == response["headers"]
        body = b64decode(response["bodyBase64"]) if tail else response["body"].encode()
        assert b"you sent [redacted]" + tail == body

    with_rig(test)


def test_an_end_in_another_process_is_seen() -> None:
    """Nobody tells of it here: the store is looked at again and again."""

    async def test(rig: Rig) -> None:
        task_id = (await rig.create())["taskId"]
        looks: list[str] = []

        async def settled(task_id: str, seconds: float) -> None:
            looks.append(task_id)
            if len(looks) == 3:
                await rig.die()

        rig.engine.wait_for_completion = settled  # type: ignore[method-assign]
        reply = await ask(rig, task_id, 60)
        assert ("EXHAUSTED", "attempts") == (reply.json["status"], reply.json["reason"])
        assert 3 == len(looks)

    with_rig(test)


def test_a_task_that_has_ended_is_not_waited_for() -> None:
    """It is told at once."""

    async def test(rig: Rig) -> None:
        task_id = (await rig.create())["taskId"]
        await rig.die()
        reply = await ask(rig, task_id, 60)
        assert ("EXHAUSTED", "wait=60") == (
            reply.json["status"],
            reply.header("preference-applied"),
        )
        assert rig.engine.waited_for.empty()

    with_rig(test)


def test_a_task_that_is_not_there_is_not_waited_for() -> None:
    """404, as without the preference."""

    async def test(rig: Rig) -> None:
        assert 404 == (await ask(rig, "01890000-0000-7000-8000-0000000000ff")).status

    with_rig(test)


def test_a_store_that_goes_away_meanwhile_ends_no_wait() -> None:
    """The task is told as it was when the store was last seen."""

    async def test(rig: Rig) -> None:
        task_id = (await rig.create())["taskId"]

        async def settled(task_id: str, seconds: float) -> None:
            rig.store.get_task = away  # type: ignore[method-assign]

        async def away(tenant: str, task_id: str) -> Task | None:
            msg = "disk full"
            raise StoreUnavailable(msg)

        rig.engine.wait_for_completion = settled  # type: ignore[method-assign]
        reply = await ask(rig, task_id, 2)
        assert (200, "PENDING") == (reply.status, reply.json["status"])

    with_rig(test)


def test_only_so_many_may_wait_for_tasks_new_and_old() -> None:
    """One that waits leaves no room for a second, whichever way they came."""

    async def test(rig: Rig) -> None:
        task_id = (await rig.create())["taskId"]
        asking = asyncio.create_task(ask(rig, task_id))
        await rig.engine.waited_for.get()
        headers = {"Prefer": "wait=5"}
        document = {"targetUrl": "https://example.com/"}
        new = await rig.ask("POST", "/retry-tasks", document, headers=headers)
        old = await ask(rig, task_id)
        assert [None, None] == [one.header("preference-applied") for one in (new, old)]
        rig.engine.waiters.notify(task_id, TaskCompletion(Status.CANCELLED, None, None))
        assert "CANCELLED" == (await asking).json["status"]
        assert "wait=0" == (await ask(rig, task_id, 0)).header("preference-applied")

    with_rig(test, limits=ApiLimits(max_waiting_requests=1))


def test_nobody_waits_when_the_service_ends() -> None:
    """Whoever waits is answered with the task as it stands."""

    async def test(rig: Rig) -> None:
        task_id = (await rig.create())["taskId"]
        looks: list[str] = []

        async def settled(task_id: str, seconds: float) -> None:
            looks.append(task_id)
            rig.api.close()

        rig.engine.wait_for_completion = settled  # type: ignore[method-assign]
        assert "PENDING" == (await ask(rig, task_id, 60)).json["status"]
        assert 1 == len(looks)

    with_rig(test)
