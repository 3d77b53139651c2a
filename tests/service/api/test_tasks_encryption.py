"""Attempt logs whose texts are encrypted in the store."""

from __future__ import annotations

from cryptography.fernet import Fernet

from tarry.service.encryption import Codec
from tarry.service.model import AttemptRecord, Status
from tarry.service.store import TaskResult
from tests.service.api.harness import NOW, TARGET, ApiHarness


async def exhaust_task(api: ApiHarness, codec: Codec) -> str:
    """Create a task that ends after one attempt with encrypted texts; return its path."""
    task_id = (await api.create())["taskId"]
    [task] = await api.lease_due_tasks()
    attempt = AttemptRecord(
        attempt_number=1,
        scheduled_at=NOW,
        started_at=NOW,
        error_message="an error",
        error_class="reset",
        response_excerpt="an excerpt",
        outcome="transient",
    )
    result = TaskResult(
        task=task,
        attempt=codec.encrypt_attempt(attempt),
        status=Status.EXHAUSTED,
        reason="attempts",
    )
    await api.store.finish([result])
    return f"/retry-tasks/{task_id}"


async def test_encrypted_texts_of_an_attempt_are_shown(api: ApiHarness) -> None:
    """The error and the excerpt are decrypted for the attempt log and the explanation."""
    codec = Codec([Fernet.generate_key().decode()])
    path = await exhaust_task(api, codec)
    api.codec.decrypt_attempt = codec.decrypt_attempt  # type: ignore[method-assign]
    [attempt] = (await api.request("GET", f"{path}/attempts")).json["items"]
    assert ("an error", "an excerpt") == (attempt["errorMessage"], attempt["responseExcerpt"])
    explanation = (await api.request("GET", f"{path}/explain")).json["text"]
    assert "attempt 1 failed (reset: an error)" in explanation


async def test_texts_of_an_attempt_without_their_key_are_marked(api: ApiHarness) -> None:
    """If the key is missing, the attempt is listed, with `[encrypted]` instead of its texts."""
    path = await exhaust_task(api, Codec([Fernet.generate_key().decode()]))
    [attempt] = (await api.request("GET", f"{path}/attempts")).json["items"]
    texts = attempt["errorMessage"], attempt["responseExcerpt"]
    assert ("[encrypted]", "[encrypted]", "reset") == (*texts, attempt["errorClass"])
    explanation = (await api.request("GET", f"{path}/explain")).json["text"]
    assert "attempt 1 failed (reset: [encrypted])" in explanation


async def test_damaged_task_does_not_hide_other_tasks(api: ApiHarness) -> None:
    """A task whose content cannot be decoded is listed without its target."""
    pack = api.codec.pack
    api.codec.pack = lambda content: pack(content)[:-1]  # type: ignore[method-assign]
    await api.create()
    api.codec.pack = pack  # type: ignore[method-assign]
    await api.create()
    tasks = (await api.request("GET", "/retry-tasks")).json["items"]
    assert [TARGET, "[encrypted]"] == [task["targetUrl"] for task in tasks]
