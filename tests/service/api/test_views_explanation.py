"""Explanations of tasks."""

from __future__ import annotations

import pytest

from tarry.core.policy import Policy
from tarry.service.api.views import explain_task
from tarry.service.model import AttemptRecord, DecisionRecord, LaneRecord, Status, Task, TaskContent
from tarry.wire.policies import SERVICE_PRESETS

NOW = 1_000_000
LANE = LaneRecord(name="t/https:a:443", tenant="t")


def build_attempt(number: int, **fields: object) -> AttemptRecord:
    """Return an attempt that got 503, with `fields` replaced."""
    values: dict[str, object] = {
        "response_status": 503,
        "outcome": "transient",
        "scheduled_at": fields.get("started_at", NOW),
        "started_at": NOW,
        **fields,
    }
    return AttemptRecord(attempt_number=number, **values)  # type: ignore[arg-type]


def build_task(**fields: object) -> Task:
    """Return a pending task, with `fields` replaced."""
    values: dict[str, object] = {"next_attempt_at": NOW, **fields}
    return Task(
        id="i",
        tenant="t",
        lane=LANE.name,
        key="k",
        fingerprint=b"",
        packed_content=b"",
        **values,  # type: ignore[arg-type]
    )


def explain_text(
    task: Task,
    *attempts: AttemptRecord,
    lane: LaneRecord | None = LANE,
    policy: Policy = SERVICE_PRESETS["quick"],
) -> str:
    """Return the text of the explanation."""
    returned = explain_task(
        task,
        TaskContent(url="https://a/"),
        list(attempts),
        named_policy=policy,
        lane=lane,
        now=NOW,
    )
    return returned.text


def test_the_default_policy_does_not_number_the_last_attempt() -> None:
    """The total budget ends a task with the default policy, not the number of its attempts."""
    text = explain_text(build_task(), policy=SERVICE_PRESETS["default"])
    assert "no attempt was made yet. Attempt 1 is due now." == text


STOP = DecisionRecord(action="stop", reason="attempts")
WAIT = DecisionRecord(action="wait", delay_ms=50.0, ceiling_ms=100.0, jitter="full")
UNJITTERED_WAIT = DecisionRecord(action="wait", delay_ms=50.0, ceiling_ms=50.0, jitter="none")
HINT = DecisionRecord(action="stop", reason="hint-too-long", hint_ms=9e6, hint_source="retry-after")


@pytest.mark.parametrize(
    ("task", "attempts", "lane", "expected"),
    [
        (build_task(), [], LANE, "no attempt was made yet. Attempt 1 of 5 is due now."),
        (
            build_task(next_attempt_at=NOW + 3_000),
            [],
            LANE,
            "no attempt was made yet. Attempt 1 of 5 is due in 3 s.",
        ),
        (
            build_task(status=Status.IN_FLIGHT, attempts=1),
            [build_attempt(1, decision=WAIT)],
            LANE,
            "attempt 1 got 503; waited 50 ms (ceiling 100 ms, full jitter). Attempt 2 is running.",
        ),
        (
            build_task(status=Status.IN_FLIGHT, attempts=1),
            [build_attempt(1, decision=UNJITTERED_WAIT)],
            LANE,
            "attempt 1 got 503; waited 50 ms (ceiling 50 ms, no jitter). Attempt 2 is running.",
        ),
        (
            build_task(status=Status.IN_FLIGHT, cancelling=True),
            [],
            LANE,
            (
                "no attempt was made yet. Attempt 1 is running, and is the last one: the task was "
                "cancelled."
            ),
        ),
        (
            build_task(status=Status.SUCCEEDED, attempts=2),
            [
                build_attempt(
                    1,
                    response_status=None,
                    error_class="refused",
                    error_message="Failed",
                    decision=WAIT,
                ),
                build_attempt(
                    2,
                    response_status=200,
                    outcome="success",
                    decision=DecisionRecord(action="done"),
                    started_at=NOW + 50,
                ),
            ],
            LANE,
            (
                "attempt 1 failed (refused); waited 50 ms (ceiling 100 ms, full jitter); "
                "attempt 2 got 200. It succeeded; no attempt follows."
            ),
        ),
        (
            build_task(status=Status.EXHAUSTED, attempts=7, reason="attempts"),
            [
                build_attempt(6, outcome="lost", response_status=None),
                build_attempt(7, decision=STOP),
            ],
            LANE,
            (
                "earlier attempts not shown: 5; attempt 6 was lost with its worker; attempt 7 "
                "got 503; stopped: no attempts left. It is a dead letter: no attempt follows "
                "until it is replayed (tarry tasks retry i)."
            ),
        ),
        (
            build_task(status=Status.EXHAUSTED, attempts=1, reason="hint-too-long"),
            [build_attempt(1, decision=HINT)],
            LANE,
            (
                "attempt 1 got 503; stopped: the server asked for a longer wait than max_hint "
                "allows (retry-after asked for 2.5 h). It is a dead letter: no attempt follows "
                "until it is replayed (tarry tasks retry i)."
            ),
        ),
        (
            build_task(status=Status.EXHAUSTED, reason="total-budget"),
            [],
            LANE,
            (
                "stopped: the total budget leaves no time for another attempt. It is a dead "
                "letter: no attempt follows until it is replayed (tarry tasks retry i)."
            ),
        ),
        (
            build_task(status=Status.CANCELLED),
            [],
            None,
            "no attempt was made. It was cancelled; no attempt follows.",
        ),
        (
            build_task(),
            [],
            LaneRecord(name="l", tenant="t", paused=True),
            (
                "no attempt was made yet. Attempt 1 of 5 waits until an operator resumes its "
                "downstream."
            ),
        ),
        (
            build_task(),
            [],
            LaneRecord(name="l", tenant="t", parked_until=NOW + 9_000, consecutive_opens=1),
            (
                "no attempt was made yet. Attempt 1 of 5 waits for its downstream: the breaker "
                "is open for another 9 s."
            ),
        ),
        (
            build_task(),
            [],
            LaneRecord(name="l", tenant="t", parked_until=NOW, consecutive_opens=1),
            (
                "no attempt was made yet. Attempt 1 of 5 waits for its downstream: its target "
                "failed, so only a few tasks at a time are tried until one succeeds."
            ),
        ),
        (
            build_task(attempts=3, attempts_before_replay=3),
            [build_attempt(3, decision=DecisionRecord(action="stop", reason="something new"))],
            LaneRecord(name="l", tenant="t", parked_until=NOW),
            (
                "earlier attempts not shown: 2; attempt 3 got 503; stopped: something new; was "
                "replayed. Attempt 4 of 8 waits for its downstream: the last attempt could not be "
                "made, so one task at a time is tried."
            ),
        ),
        (
            build_task(
                status=Status.EXHAUSTED, attempts=2, attempts_before_replay=1, reason="attempts"
            ),
            [build_attempt(1, decision=STOP), build_attempt(2, decision=STOP)],
            LANE,
            (
                "attempt 1 got 503; stopped: no attempts left; was replayed; attempt 2 got 503; "
                "stopped: no attempts left. It is a dead letter: no attempt follows until it "
                "is replayed (tarry tasks retry i)."
            ),
        ),
    ],
)
def test_a_task_is_explained(
    task: Task, attempts: list[AttemptRecord], lane: LaneRecord | None, expected: str
) -> None:
    """The text describes attempts, decisions and the next step."""
    assert expected == explain_text(task, *attempts, lane=lane)


@pytest.mark.parametrize(
    ("is_running", "expected"),
    [
        (True, "Attempt 1 is running."),
        (False, "Attempt 1 waits for a free slot (limits of concurrency and rate)."),
        (None, "Attempt 1 is running in another process, or waits there for a free slot."),
    ],
)
def test_a_leased_task_is_explained(is_running: bool | None, expected: str) -> None:
    """The text distinguishes a running attempt from an attempt that waits for a slot."""
    returned = explain_task(
        build_task(status=Status.IN_FLIGHT),
        TaskContent(url="https://a/"),
        [],
        named_policy=None,
        lane=LANE,
        is_running=is_running,
        now=NOW,
    )
    assert returned.text.startswith(f"no attempt was made yet. {expected}")


LONG_WAIT = DecisionRecord(action="wait", delay_ms=20_000.0, ceiling_ms=20_000.0, jitter="full")
FIRST_ATTEMPT = build_attempt(1, started_at=NOW - 21_500, duration_ms=100.0, decision=LONG_WAIT)
DONE = DecisionRecord(action="done")


@pytest.mark.parametrize(
    ("task", "later_attempts", "expected"),
    [
        (
            build_task(status=Status.SUCCEEDED, finished_at=NOW),
            [build_attempt(2, response_status=200, started_at=NOW - 20_000, decision=DONE)],
            "was to wait 20 s (ceiling 20 s, full jitter), cut short after 1.4 s; attempt 2",
        ),
        (
            build_task(status=Status.SUCCEEDED, finished_at=NOW),
            [build_attempt(2, response_status=200, started_at=NOW - 1_390, decision=DONE)],
            "waited 20 s (ceiling 20 s, full jitter); attempt 2",
        ),
        (
            build_task(status=Status.SUCCEEDED, finished_at=NOW),
            [build_attempt(2, response_status=200, started_at=NOW + 18_600, decision=DONE)],
            "was to wait 20 s (ceiling 20 s, full jitter), waited 40 s; attempt 2",
        ),
        (
            build_task(status=Status.CANCELLED, finished_at=NOW - 20_400),
            [],
            "a retry was planned after 20 s (ceiling 20 s, full jitter). It was cancelled; no att",
        ),
        (
            build_task(status=Status.CANCELLED, finished_at=NOW - 1_400),
            [],
            "a retry was planned after 20 s (ceiling 20 s, full jitter). It was cancelled; no att",
        ),
        (
            build_task(status=Status.CANCELLED, finished_at=NOW),
            [build_attempt(2, started_at=NOW - 1_390, decision=WAIT)],
            (
                "waited 20 s (ceiling 20 s, full jitter); attempt 2 got 503; a retry was planned "
                "after 50 ms (ceiling 100 ms, full jitter). It was cancelled; no att"
            ),
        ),
        (
            build_task(next_attempt_at=NOW - 20_400),
            [],
            "was to wait 20 s (ceiling 20 s, full jitter), cut short after 1 s. Attempt 1 of 5 is",
        ),
        (
            build_task(status=Status.IN_FLIGHT, next_attempt_at=NOW - 20_400),
            [],
            "was to wait 20 s (ceiling 20 s, full jitter), cut short after 1 s. Attempt 1 is run",
        ),
    ],
    ids=[
        "retried",
        "as planned",
        "delayed",
        "cancelled",
        "cancelled late",
        "cancelled retry",
        "due",
        "running",
    ],
)
def test_a_wait_that_differs_from_the_plan_is_explained(
    task: Task, later_attempts: list[AttemptRecord], expected: str
) -> None:
    """The text has the planned and the actual wait, if they differ."""
    assert f"attempt 1 got 503; {expected}" in explain_text(task, FIRST_ATTEMPT, *later_attempts)


def test_errors_are_explained_without_secrets() -> None:
    """The text has the error class, and the error message with secrets redacted."""
    failed = build_attempt(
        1,
        response_status=None,
        error_class="tls",
        error_message="TLS error for hush-hush: wrong version.",
        decision=STOP,
    )
    returned = explain_task(
        build_task(status=Status.EXHAUSTED, reason="attempts"),
        TaskContent(url="https://a/?token=hush-hush"),
        [failed],
        named_policy=None,
        lane=None,
        now=NOW,
    )
    expected = "attempt 1 failed (tls: TLS error for [redacted]: wrong version); stopped: no"
    assert returned.text.startswith(expected)


def test_a_blocked_target_is_explained_with_the_setting() -> None:
    """The text has the complete error, which ends with the setting, and when to replay the task."""
    error = f"{'x' * 300}; the operator can allow it: --allow-target a (setting allow_target)"
    failed = build_attempt(
        1, response_status=None, error_class="blocked", error_message=error, decision=STOP
    )
    task = build_task(status=Status.EXHAUSTED, reason="permanent")
    text = explain_text(task, failed)
    assert f"attempt 1 failed (blocked: {error}); stopped" in text
    assert text.endswith(
        "It is a dead letter: replay it when the operator has allowed its target "
        f"(tarry tasks retry {task.id})."
    )


@pytest.mark.parametrize(
    ("wait_reason", "expected"),
    [
        ("Could not resolve a", "Could not resolve a."),
        (None, "the last attempt could not be made."),
    ],
)
def test_a_lane_parked_for_a_local_reason_is_explained(
    wait_reason: str | None, expected: str
) -> None:
    """The text has the reason, if this process knows it."""
    returned = explain_task(
        build_task(),
        TaskContent(url="https://a/"),
        [],
        named_policy=SERVICE_PRESETS["quick"],
        lane=LaneRecord(name="l", tenant="t", parked_until=NOW + 9_000),
        wait_reason=wait_reason,
        now=NOW,
    )
    assert f"Attempt 1 of 5 waits for another 9 s: {expected}" == returned.next.text


@pytest.mark.parametrize("status", Status)
def test_a_deleted_policy_is_mentioned_if_an_attempt_can_follow(status: Status) -> None:
    """The text mentions that a pending task or dead letter now uses the default policy."""
    returned = explain_task(
        build_task(status=status, policy_id="mine", policy_version=3),
        TaskContent(url="https://a/"),
        [],
        named_policy=None,
        lane=None,
        now=NOW,
    )
    expected = "Its policy mine was deleted: the task uses the default policy."
    is_final = status in {Status.SUCCEEDED, Status.CANCELLED}
    assert returned.text.endswith(expected) is not is_final
    assert (status is Status.PENDING) is ("Attempt 1 is due" in returned.text)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", (None, False)),
        (b'{"order": 7, "password": "hunter2"}', ('{"order": 7, "password": "[redacted]"}', False)),
        (b"sent with the-api-token-of-a-header", ("sent with [redacted]", False)),
        (b"x" * 513, ("x" * 512, True)),
        ("é".encode() * 2_000, ("é" * 512, True)),
        (b"x" + "é".encode() * 2_000, ("x" + "é" * 511, True)),  # cut within a character
        (b"\xff\x00", (None, False)),
    ],
    ids=["none", "json", "secret of a header", "long", "longest", "cut character", "binary"],
)
def test_the_beginning_of_the_body_is_shown(body: bytes, expected: tuple[str | None, bool]) -> None:
    """The excerpt of the request has 512 characters of text, without secrets."""
    content = TaskContent(
        url="https://a/", headers={"X-Token": "the-api-token-of-a-header"}, body=body
    )
    explanation = explain_task(
        build_task(), content, [], named_policy=None, lane=LANE, is_running=None, now=NOW
    )
    assert expected == (explanation.request_excerpt, explanation.request_truncated)
