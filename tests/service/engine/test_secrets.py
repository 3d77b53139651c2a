"""Secrets in headers: resolved at each attempt, renewed after a 401, never stored or shown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.delivery.secret_sources import SecretUnavailable, SecretValue
from tarry.service.engine.secrets import Secret, SecretResolver
from tarry.service.model import Status
from tests.service.engine.harness import EngineHarness, FakeTarget

LANE = "default/http:a.example:80"
HEADERS = {"Authorization": "orders"}


class FakeSource:
    """A source that returns scripted values in order, and then repeats the last one."""

    def __init__(
        self,
        *values: str | Exception,
        lifetime_s: float = 100.0,
        renewable: bool = True,
        duration_s: float = 0.0,
    ) -> None:
        self.values = list(values)
        self.lifetime_s = lifetime_s
        self.is_renewable = renewable
        self.duration_s = duration_s
        self.fetch_count = 0

    async def fetch(self) -> SecretValue:
        """Return the next value, or raise it."""
        self.fetch_count += 1
        await asyncio.sleep(self.duration_s)
        value = self.values.pop(0) if len(self.values) > 1 else self.values[0]
        if isinstance(value, Exception):
            raise value
        return SecretValue(value, self.lifetime_s, 0.9 * self.lifetime_s)


def new_secret(
    source: FakeSource,
    name: str = "orders",
    tenant: str = "default",
    targets: Sequence[str] = ("*",),
) -> Secret:
    """Return a secret that is sent as a bearer token."""
    return Secret(tenant, name, source, template="Bearer {}", targets=targets)


class Target(FakeTarget):
    """A target that accepts the given values of `Authorization`, and rejects others with a 401."""

    def __init__(self, *accepted: str) -> None:
        self.accepted = accepted
        super().__init__(self.respond)

    async def respond(self, request: DeliveryRequest) -> DeliveryResult:
        """Return 200 or 401, with the value in the body."""
        sent = request.headers["Authorization"]
        status = 200 if sent in self.accepted else 401
        return DeliveryResult(status=status, excerpt=f"you sent {sent}".encode(), duration_ms=1.0)

    @property
    def sent(self) -> list[str]:
        """The values of `Authorization`."""
        return [request.headers["Authorization"] for request in self.requests]


async def test_secret_is_resolved_at_each_attempt() -> None:
    """A retry has the value of its own time, and the stored task has only the name."""
    target = FakeTarget(DeliveryResult(status=503), DeliveryResult(status=200))
    source = FakeSource("token-1", "token-2", lifetime_s=0.001)
    harness = EngineHarness(target, secrets=[new_secret(source)])
    await harness.engine.start()
    [task] = await harness.add(harness.new_task(secret_headers=HEADERS))
    await asyncio.sleep(600)
    sent = [request.headers["Authorization"] for request in target.requests]
    assert ["Bearer token-1", "Bearer token-2"] == sent
    stored = await harness.get_task(task)
    assert Status.SUCCEEDED is stored.status
    assert b"orders" in stored.packed_content
    assert b"token" not in stored.packed_content


async def test_value_is_obtained_once_for_many_tasks() -> None:
    """Tasks that become due at the same time wait for one fetch, and share its value."""
    source = FakeSource("token-1", duration_s=0.5)
    target = Target("Bearer token-1")
    harness = EngineHarness(target, secrets=[new_secret(source)])
    await harness.engine.start()
    await harness.add(*(harness.new_task(secret_headers=HEADERS) for _ in range(20)))
    await asyncio.sleep(10)
    assert (1, 20) == (source.fetch_count, len(target.requests))


async def test_commands_and_token_requests_are_limited() -> None:
    """At most 16 renewable secrets are fetched at a time; a file does not wait for them."""
    sources = [FakeSource("token-1", duration_s=1.0) for _ in range(40)]
    file = FakeSource("file-1", renewable=False)
    secrets = [new_secret(source, f"s{number}") for number, source in enumerate(sources)]
    resolver = SecretResolver([*secrets, new_secret(file, "file")], asyncio.get_running_loop().time)
    loads = [resolver.load("default", [secret.name]) for secret in secrets]
    tasks = [asyncio.ensure_future(load) for load in loads]
    await asyncio.sleep(0.5)
    assert 16 == sum(source.fetch_count for source in sources)
    await resolver.load("default", ["file"])
    await asyncio.gather(*tasks)
    assert 40 == sum(source.fetch_count for source in sources)


async def test_value_is_refreshed_in_the_background_before_it_expires() -> None:
    """After nine tenths of its lifetime, an attempt uses the value and starts a fetch."""
    source = FakeSource("token-1", "token-2")
    resolver = SecretResolver([new_secret(source)], asyncio.get_running_loop().time)
    await resolver.load("default", ["orders"])
    await asyncio.sleep(89)
    assert _headers(resolver) == {"Authorization": "Bearer token-1"}
    assert 1 == source.fetch_count
    await asyncio.sleep(2)
    assert _headers(resolver) == {"Authorization": "Bearer token-1"}
    await asyncio.sleep(1)
    assert _headers(resolver) == {"Authorization": "Bearer token-2"}
    assert 2 == source.fetch_count


def _headers(resolver: SecretResolver) -> dict[str, str]:
    resolved = resolver.get_cached("default", LANE, HEADERS)
    assert resolved is not None
    return resolved.headers


async def test_secret_that_is_not_available_charges_neither_task_nor_lane(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The task waits without attempts, other tasks of its lane are sent, the failure is logged."""
    with caplog.at_level(logging.WARNING, "tarry.service"):
        failure = SecretUnavailable("the token endpoint responded with 503")
        source = FakeSource(*[failure] * 5, "token-1")
        target = FakeTarget(DeliveryResult(status=200))
        harness = EngineHarness(target, secrets=[new_secret(source)])
        await harness.engine.start()
        [task] = await harness.add(harness.new_task(secret_headers=HEADERS))
        await asyncio.sleep(5)
        [other] = await harness.add(harness.new_task())
        await asyncio.sleep(1)
        assert Status.SUCCEEDED is (await harness.get_task(other)).status
        waiting = await harness.get_task(task)
        assert (Status.PENDING, 0) == (waiting.status, waiting.attempts)
        resolver = harness.engine.secrets
        assert "orders" == resolver.find_unavailable("default", task.lane, HEADERS)
        assert "deferred" in harness.event_kinds()
        assert not harness.context.health.failing
        await asyncio.sleep(60)
        finished = await harness.get_task(task)
        assert (Status.SUCCEEDED, 1) == (finished.status, finished.attempts)
        assert 6 == source.fetch_count
        assert resolver.find_unavailable("default", task.lane, HEADERS) is None
    secret = "tenant=default secret=orders"  # noqa: S105 - a part of the log
    assert [
        f"secret is not available, {secret}: the token endpoint responded with 503",
        f"secret is available again, {secret}",
    ] == [record.getMessage() for record in caplog.records]


async def test_task_ends_at_its_total_budget_while_its_secret_is_not_available() -> None:
    """A task does not wait for longer than its policy allows."""
    source = FakeSource(SecretUnavailable("no"))
    harness = EngineHarness(FakeTarget(), secrets=[new_secret(source)])
    await harness.engine.start()
    [task] = await harness.add(
        harness.new_task(secret_headers=HEADERS, overrides={"totalBudgetMs": 60_000})
    )
    await asyncio.sleep(120)
    finished = await harness.get_task(task)
    assert (Status.EXHAUSTED, "total-budget") == (finished.status, finished.reason)
    assert 0 == finished.attempts


async def test_task_is_released_while_a_fetch_takes_long() -> None:
    """A slow source does not hold leases; the task is sent when the value is there."""
    source = FakeSource("token-1", duration_s=30)
    harness = EngineHarness(Target("Bearer token-1"), secrets=[new_secret(source)])
    await harness.engine.start()
    [task] = await harness.add(harness.new_task(secret_headers=HEADERS))
    await asyncio.sleep(2.5)
    released = await harness.get_task(task)
    assert 3_000 <= released.wake_at - task.wake_at < 3_100
    await asyncio.sleep(60)
    finished = await harness.get_task(task)
    assert (Status.SUCCEEDED, 1) == (finished.status, finished.attempts)
    assert 1 == source.fetch_count


async def test_rejected_value_is_renewed_within_the_attempt() -> None:
    """After a 401, the request is sent again with a new value; this is one attempt."""
    source = FakeSource("token-1", "token-2")
    target = Target("Bearer token-2")
    harness = EngineHarness(target, secrets=[new_secret(source)])
    await harness.engine.start()
    [task] = await harness.add(harness.new_task(secret_headers=HEADERS))
    await asyncio.sleep(10)
    assert ["Bearer token-1", "Bearer token-2"] == target.sent
    assert (Status.SUCCEEDED, 1) == _state(await harness.get_task(task))


def _state(task: object) -> tuple[object, object]:
    return getattr(task, "status"), getattr(task, "attempts")  # noqa: B009


async def test_value_is_renewed_at_most_once() -> None:
    """A target that rejects every value does not cause a fetch for each attempt."""
    source = FakeSource("token-1", "token-2", "token-3")
    target = Target()
    harness = EngineHarness(target, secrets=[new_secret(source)])
    await harness.engine.start()
    for _ in range(5):
        [task] = await harness.add(harness.new_task(secret_headers=HEADERS))
        await asyncio.sleep(1)
        assert (Status.EXHAUSTED, 1) == _state(await harness.get_task(task))
    assert 2 == source.fetch_count
    assert ["Bearer token-1", *["Bearer token-2"] * 5] == target.sent


async def test_same_value_after_a_renewal_is_not_renewed_again() -> None:
    """If the source returns the rejected value again, it is used without further renewals."""
    source = FakeSource("token-1")
    target = Target()
    harness = EngineHarness(target, secrets=[new_secret(source)])
    await harness.engine.start()
    for _ in range(3):
        await harness.add(harness.new_task(secret_headers=HEADERS))
        await asyncio.sleep(20)
    assert 2 == source.fetch_count
    assert ["Bearer token-1"] * 3 == target.sent


async def test_static_secret_is_not_renewed() -> None:
    """A 401 for a secret from a file or a variable is the result of the attempt."""
    source = FakeSource("token-1", "token-2", renewable=False)
    target = Target("Bearer token-2")
    harness = EngineHarness(target, secrets=[new_secret(source)])
    await harness.engine.start()
    [task] = await harness.add(harness.new_task(secret_headers=HEADERS))
    await asyncio.sleep(10)
    assert ["Bearer token-1"] == target.sent
    assert (Status.EXHAUSTED, 1) == _state(await harness.get_task(task))


async def test_failed_renewal_is_not_an_attempt() -> None:
    """If no new value can be obtained after a 401, the task waits and no attempt is counted."""
    source = FakeSource("token-1", SecretUnavailable("no"), "token-2")
    target = Target("Bearer token-2")
    harness = EngineHarness(target, secrets=[new_secret(source)])
    await harness.engine.start()
    [task] = await harness.add(harness.new_task(secret_headers=HEADERS))
    await asyncio.sleep(0.5)
    assert (Status.PENDING, 0) == _state(await harness.get_task(task))
    await asyncio.sleep(10)
    assert ["Bearer token-1", "Bearer token-2"] == target.sent
    assert (Status.SUCCEEDED, 1) == _state(await harness.get_task(task))


async def test_renewal_ends_with_the_timeout_of_the_attempt() -> None:
    """A renewal that takes longer than the attempt may take is a local failure."""
    source = FakeSource("token-1", "token-2")
    target = Target("Bearer token-2")
    harness = EngineHarness(target, secrets=[new_secret(source)])
    await harness.engine.start()
    [task] = await harness.add(harness.new_task(secret_headers=HEADERS, delay_ms=1_000))
    await asyncio.sleep(0.5)
    await harness.engine.secrets.load("default", ["orders"])
    source.duration_s = 35  # an attempt may take 30 s
    await asyncio.sleep(33)
    released = await harness.get_task(task)
    assert released.wake_at - task.next_attempt_at > 30_000
    assert 0 == released.attempts
    await asyncio.sleep(10)
    assert (Status.SUCCEEDED, 1) == _state(await harness.get_task(task))
    assert 2 == source.fetch_count


async def test_values_are_redacted_in_the_attempt_log() -> None:
    """The excerpt contains neither the first value nor the renewed one."""
    source = FakeSource("token-1", "token-2")
    harness = EngineHarness(Target(), secrets=[new_secret(source)])
    await harness.engine.start()
    [task] = await harness.add(harness.new_task(secret_headers=HEADERS))
    await asyncio.sleep(10)
    [attempt] = await harness.list_attempts(task)
    assert "you sent [redacted]" == attempt.response_excerpt


async def test_secrets_of_a_lane_are_redacted_in_texts_of_other_tasks() -> None:
    """A caller cannot read a secret with another task, in any case, also an earlier value."""
    echo = b"was BEARER Token-1, is bearer TOKEN-2 and dG9rZW4tMg==; other-1"
    target = FakeTarget(DeliveryResult(status=200), DeliveryResult(status=400, excerpt=echo))
    secret = new_secret(FakeSource("token-1", "token-2", lifetime_s=1.0))
    other = new_secret(FakeSource("other-1"), "other", targets=["http:b.example:80"])
    harness = EngineHarness(target, secrets=[secret, other])
    await harness.engine.start()
    await harness.add(harness.new_task(secret_headers=HEADERS))
    await asyncio.sleep(10)
    await harness.add(harness.new_task(secret_headers=HEADERS))
    await asyncio.sleep(10)
    [task] = await harness.add(harness.new_task())
    await asyncio.sleep(1)
    [attempt] = await harness.list_attempts(task)
    expected = "was [redacted], is [redacted] and [redacted]g==; other-1"
    assert expected == attempt.response_excerpt


def test_values_that_were_used_last_are_redacted() -> None:
    """Of many values, those that were replaced first are forgotten, also if one has returned."""
    secret = new_secret(FakeSource("unused"))
    for value in ("token-1", "token-2", "token-3", "token-4", "token-5", "token-1", "token-6"):
        secret.set_value(value)
    values = [text for text in secret.texts if not text.startswith("Bearer ")]
    assert ["token-6", "token-1", "token-5", "token-4", "token-3"] == values


async def test_texts_are_redacted_while_a_secret_of_the_lane_is_unknown() -> None:
    """After a start, a target may return a value that this process has not obtained yet."""
    answer = DeliveryResult(status=400, excerpt=b"you stored token-1", duration_ms=1.0)
    source = FakeSource(SecretUnavailable("it is away"), "token-1")
    harness = EngineHarness(FakeTarget(answer), secrets=[new_secret(source)])
    await harness.engine.start()
    excerpts = []
    for _ in range(2):
        [task] = await harness.add(harness.new_task())
        await asyncio.sleep(100)
        [attempt] = await harness.list_attempts(task)
        excerpts.append(attempt.response_excerpt)
    assert ["[redacted]", "you stored [redacted]"] == excerpts


@pytest.mark.parametrize(
    ("secret", "rule"),
    [
        (new_secret(FakeSource("token-1"), tenant="other"), "does not define their secret"),
        (
            new_secret(FakeSource("token-1"), targets=["http:b.example:80"]),
            "does not allow the target of their secret",
        ),
        (
            Secret("default", "orders", FakeSource("token-1"), header="X-Key"),
            "does not allow the header of their secret",
        ),
    ],
)
async def test_stored_task_waits_if_the_settings_do_not_allow_its_secret_any_more(
    secret: Secret, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is sent, no attempt is counted, and the reason is logged once."""
    target = FakeTarget()
    harness = EngineHarness(target, secrets=[secret])
    await harness.engine.start()
    [task] = await harness.add(harness.new_task(secret_headers=HEADERS))
    await asyncio.sleep(100)
    assert not target.requests
    assert (Status.PENDING, 0) == _state(await harness.get_task(task))
    resolver = harness.engine.secrets
    assert "orders" == resolver.find_unavailable("default", task.lane, HEADERS)
    message = (
        f"tasks wait, because the setting `secrets` {rule}, "
        f"tenant=default secret=orders lane={LANE}"
    )
    assert [message] == [record.getMessage() for record in caplog.records]


async def test_error_of_another_type_is_logged_without_its_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The message of an unexpected error could contain the value."""
    source = FakeSource(ValueError("token-1"))
    resolver = SecretResolver([new_secret(source)], asyncio.get_running_loop().time)
    with pytest.raises(SecretUnavailable, match=r"^it could not be obtained \(ValueError\)$"):
        await resolver.load("default", ["orders"])
    assert "token-1" not in caplog.text


async def test_close_cancels_a_fetch() -> None:
    """A fetch in progress ends when the service stops."""
    source = FakeSource("token-1", duration_s=1000)
    secret = new_secret(source)
    resolver = SecretResolver([secret], asyncio.get_running_loop().time)
    load = asyncio.ensure_future(resolver.load("default", ["orders"]))
    await asyncio.sleep(1)
    await resolver.close()
    with pytest.raises(SecretUnavailable):
        await load
    assert secret.fetch_task is None


async def test_secret_is_sent_with_a_stored_body_and_lane_keys() -> None:
    """A task with a stored body has the secret, too; `targets` ignores the lane key of a task."""

    async def read_body(_: object) -> bytes:
        return b"stored body"

    target = Target("Bearer token-1")
    secret = new_secret(FakeSource("token-1"), targets=["http:*.example:80"])
    harness = EngineHarness(target, secrets=[secret], read_body=read_body)
    await harness.engine.start()
    new_task = harness.new_task(secret_headers=HEADERS, body_ref="ref", lane_key="customer")
    [task] = await harness.add(new_task)
    await asyncio.sleep(10)
    assert (Status.SUCCEEDED, 1) == _state(await harness.get_task(task))
    assert b"stored body" == target.requests[0].body
