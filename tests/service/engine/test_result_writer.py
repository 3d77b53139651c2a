from __future__ import annotations

import msgspec

from tarry.service.encryption import PlainCodec
from tarry.service.engine.attempts import exhausted_result
from tarry.service.engine.result_writer import build_callback_task
from tarry.service.model import AttemptRecord, Task, TaskContent

TASK = Task(
    id="i", tenant="t", lane="t/https:a:443", key="k", fingerprint=b"", content=b"", attempts=2
)
CONTENT = TaskContent(url="https://a/x?token=hush", callback_url="https://b/done")


def test_callback_has_the_result_of_the_task() -> None:
    """It has the fields of the API, the target URL without its query, and the right body size."""
    attempt = AttemptRecord(number=3, scheduled_at=1, started_at=1, status=410, outcome="permanent")
    finish = exhausted_result(TASK, attempt, "permanent")

    made = build_callback_task(TASK, CONTENT, finish, new_id=lambda: "j", pack=PlainCodec().pack)

    content = PlainCodec().unpack(made.content)
    assert {
        "taskId": "i",
        "idempotencyKey": "k",
        "targetUrl": "https://a/x",
        "status": "EXHAUSTED",
        "reason": "permanent",
        "attemptNumber": 3,
        "responseStatus": 410,
        "createdAt": 0,
    } == msgspec.json.decode(content.body)
    assert ("https://b/done", len(content.body)) == (content.url, content.body_size)
