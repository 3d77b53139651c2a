"""A machine that makes random calls on all stores: as callers, workers, people, maintenance."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from tarry.service.model import ApiKey, AttemptRecord, PolicyVersion, ReplayRecord, Status, Task
from tarry.service.store import (
    AddResult,
    Lease,
    NewTask,
    Release,
    Retention,
    Store,
    TaskFilter,
    TaskResult,
)
from tests.service.stores.comparison import (
    TENANTS,
    StoreComparison,
    check_claim,
    without_engine_details,
)
from tests.service.stores.harness import DAY_MS, HOUR_MS, LEASE, MINUTE_MS, SECOND_MS, task, task_id
from tests.service.stores.strategies import (
    MAX_REMEMBERED_LEASES,
    POLICIES,
    ResultDraft,
    TaskDraft,
    delays,
    filters,
    lanes,
    leases,
    maybe_lane,
    maybe_policy,
    maybe_reason,
    result_drafts,
    task_drafts,
    tenants,
)


class StoreMachine(RuleBasedStateMachine):
    """All that anybody does with a store; after every step the stores are compared in full."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = StoreComparison()
        self.last = 0
        self.jobs = 0
        self.held: list[list[Task]] = []
        """Leases, each as every store gave it out: versions are their own."""

    def teardown(self) -> None:
        """Close the stores."""
        self.fleet.close()

    def check_invariants(self, *args: Any, **kwargs: Any) -> None:
        """After every step, look that everything is the same."""
        super().check_invariants(*args, **kwargs)
        self.fleet.snapshot()

    @property
    def now(self) -> int:
        """The time on the stores' clock."""
        return self.fleet.clock.now

    def number(self) -> int:
        """The number of a new task."""
        self.last += 1
        return self.last

    def hold(self, answers: list[list[Task]]) -> None:
        """Remember leases, the same of each store."""
        self.held = [*self.held, *(list(same) for same in zip(*answers, strict=True))][
            -MAX_REMEMBERED_LEASES:
        ]

    @initialize(
        wanted=st.lists(task_drafts, min_size=6, max_size=12),
        batch=st.lists(result_drafts, max_size=8),
    )
    def begin(self, wanted: list[TaskDraft], batch: list[ResultDraft]) -> None:
        """Begin with tasks in all states."""
        self.add(wanted, LEASE, None)
        self.fleet.clock.advance(SECOND_MS)
        self.work(LEASE, 2, frozenset(), batch)

    # --- callers and workers ----------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 999, 1000, 2000, 30_000, MINUTE_MS, HOUR_MS]))
    def time_passes(self, ms: int) -> None:
        """Let the clock go on."""
        self.fleet.clock.advance(ms)

    @rule(
        wanted=st.lists(task_drafts, min_size=1, max_size=4),
        lease=st.one_of(st.none(), leases),
        quota=st.sampled_from([None, None, 3, 8]),
    )
    def add(self, wanted: list[TaskDraft], lease: Lease | None, quota: int | None) -> None:
        """Add tasks with new keys and old, some of them directly leased."""
        batch = [self._new(wish) for wish in wanted]
        answers = self.fleet.each(lambda _, store: store.add(batch, lease, quota=quota))
        views = [[_shown(added) for added in answer] for answer in answers]
        assert [views[0]] * len(views) == views
        self.hold([[added.task for added in answer if added.leased] for answer in answers])

    def _new(self, wish: TaskDraft) -> NewTask:
        number = self.number()
        key = f"key {number if wish.key is None else wish.key}"
        made = task(
            number,
            wish.host,
            wish.tenant,
            key=key,
            fingerprint=b"print %d" % (number % 2),
            policy_id=wish.policy_id,
            next_attempt_at=self.now - 500 + wish.at,
            body_ref=f"body {number}" if wish.body else None,
        )
        return NewTask(made, wish.delay, wish.direct)

    @rule(
        lease=leases,
        per_lane=st.sampled_from([1, 2, 1000]),
        skip=st.frozensets(lanes, max_size=1),
        late=st.sampled_from([0, 0, 1000, 30_000]),
    )
    def claim(self, lease: Lease, per_lane: int, skip: frozenset[str], late: int = 0) -> None:
        """Claim from all lanes: whose turn it is under a limit is the business of each engine."""
        self.fleet.clock.advance(late)
        before = self.fleet.snapshot()
        answers = self.fleet.each(
            lambda _, store: store.claim(lease, limit=1000, per_lane=per_lane, skip=skip)
        )
        after = self.fleet.snapshot()
        for answer in answers:
            check_claim(answer, before, after, lease, skip)
            answer.tasks.sort(key=lambda held: held.id)
        views = [
            (answer.now, [without_engine_details(held) for held in answer.tasks], answer.probing)
            for answer in answers
        ]
        assert [views[0]] * len(views) == views
        self.hold([answer.tasks for answer in answers])

    @rule(
        lease=leases,
        per_lane=st.sampled_from([2, 1000]),
        skip=st.just(frozenset()),
        batch=st.lists(result_drafts, min_size=1, max_size=6),
    )
    def work(
        self, lease: Lease, per_lane: int, skip: frozenset[str], batch: list[ResultDraft]
    ) -> None:
        """Claim, and end some of what is held."""
        self.claim(lease, per_lane, skip)
        if self.held:
            self.finish(batch, lease)

    @precondition(lambda self: self.held)
    @rule(batch=st.lists(result_drafts, min_size=1, max_size=4), lease=leases)
    def finish(self, batch: list[ResultDraft], lease: Lease) -> None:
        """End attempts: of leases that are held, were lost, or have been ended before."""
        callbacks = [self.number() for _ in batch]

        def results(index: int) -> list[TaskResult]:
            return [
                self._result(ending, index, lease, number)
                for ending, number in zip(batch, callbacks, strict=True)
            ]

        answers = self.fleet.each(lambda index, store: store.finish(results(index)))
        assert [answers[0]] * len(answers) == answers
        self._hold_again([self._pick(ending.pick)[0].id for ending in batch if ending.keep])

    def _pick(self, pick: int) -> list[Task]:
        return self.held[pick % len(self.held)]

    def _result(self, ending: ResultDraft, index: int, lease: Lease, number: int) -> TaskResult:
        held = self._pick(ending.pick)[index]
        attempt = AttemptRecord(
            number=held.attempts + 1,
            scheduled_at=held.next_attempt_at,
            started_at=self.now,
            outcome="success" if ending.status is Status.SUCCEEDED else "transient",
            worker=held.worker,
        )
        return TaskResult(
            task=held,
            attempt=attempt if ending.is_logged else None,
            status=ending.status,
            reason=ending.reason if ending.status is Status.EXHAUSTED else None,
            next_attempt_at=self.now + ending.delay,
            keep=lease if ending.keep else None,
            previous_delay=ending.delay / 7,
            restarted=ending.pick,
            last_kind="transient",
            callback=task(number, "b", held.tenant) if ending.callback else None,
        )

    def _hold_again(self, ids: list[str]) -> None:
        """Remember leases that were kept, as each store has them now."""
        for held_id in dict.fromkeys(ids):
            for tenant in TENANTS:
                self._hold_one(tenant, held_id)

    def _hold_one(self, tenant: str, held_id: str) -> None:
        found = self.fleet.each(lambda _, store: store.get_task(tenant, held_id))
        kept = [one for one in found if one and one.status is Status.IN_FLIGHT]
        if kept:
            self.hold([[one] for one in kept])

    @precondition(lambda self: self.held)
    @rule(
        picks=st.lists(st.integers(0, MAX_REMEMBERED_LEASES - 1), min_size=1, max_size=3),
        delay=delays,
    )
    def release(self, picks: list[int], delay: int) -> None:
        """Hand leases back, held or not."""
        at = self.now + delay if delay else None
        self.fleet.each(
            lambda index, store: store.release(
                [Release(self._pick(one)[index], at) for one in picks]
            )
        )

    @rule()
    def crash(self) -> None:
        """All stores start again over their data."""
        self.fleet.crash()

    # --- people -----------------------------------------------------------------------------------

    @rule(
        lane=lanes,
        how=st.sampled_from(["park", "pause", "resume", "unpark"]),
        delay=st.sampled_from([0, 1000, 5000]),
        probes=st.integers(1, 3),
        opened=st.integers(1, 3),
    )
    def shut_or_open(self, lane: str, how: str, delay: int, probes: int, opened: int) -> None:
        """A breaker opens or closes, or an operator's hand is on a lane."""
        until = self.now + delay
        if how == "park":
            self.fleet.agree(lambda store: store.park(lane, until, probes=probes, opened=opened))
        elif how == "pause":
            self.fleet.agree(lambda store: store.pause(lane))
        elif how == "resume":
            self.fleet.agree(lambda store: store.resume(lane))
        else:
            self.fleet.agree(lambda store: store.unpark(lane))

    @rule(tenant=tenants, pick=st.integers(0, 30), cancels=st.booleans())
    def cancel_or_retry(self, tenant: str, pick: int, cancels: bool) -> None:
        """Somebody cancels a task or retries it, perhaps one of another tenant."""
        some_id = task_id(pick % (self.last + 1))
        if cancels:
            self.fleet.agree(lambda store: store.cancel(tenant, some_id))
        else:
            self.fleet.agree(lambda store: store.retry_now(tenant, some_id))

    @rule(
        tenant=tenants,
        status=st.sampled_from([None, *Status]),
        policy_id=maybe_policy,
        lane=maybe_lane,
        reason=maybe_reason,
    )
    def look(self, tenant: str, **fields: Any) -> None:
        """Somebody lists tasks."""
        query = TaskFilter(**fields)

        async def found(store: Store) -> list[Task]:
            return [
                without_engine_details(one) for one in (await store.list_tasks(tenant, query)).items
            ]

        self.fleet.agree(found)

    # --- dead letters -----------------------------------------------------------------------------

    @rule(
        tenant=tenants,
        chosen=filters,
        rate=st.sampled_from([0.0, 0.0, 0.5, 3.0]),
        age=st.sampled_from([0, 0, 1000]),
        limit=st.integers(1, 4),
    )
    def replay(
        self, tenant: str, chosen: dict[str, Any], rate: float, age: int, limit: int
    ) -> None:
        """Somebody wants dead letters back, and the first step is made."""
        self.jobs += 1
        before = self.now - age if age else 0
        job = ReplayRecord(id=self.job_id(0), tenant=tenant, rate=rate, before=before, **chosen)
        matched = self.fleet.agree(lambda store: store.count_dead(job))
        assert matched == self.fleet.agree(lambda store: store.start_replay(job)).matched
        self.go_on_with_replay(0, limit, tenant, cancels=False)

    def job_id(self, age: int) -> str:
        """The id of the last job, or of one before it."""
        return task_id(1000 + max(self.jobs - age, 0))

    @precondition(lambda self: self.jobs)
    @rule(
        pick=st.integers(0, 2),
        limit=st.integers(1, 4),
        tenant=tenants,
        cancels=st.sampled_from([False, False, False, True]),
    )
    def go_on_with_replay(self, pick: int, limit: int, tenant: str, cancels: bool) -> None:
        """Maintenance brings letters back, or somebody ends the job."""
        job_id = self.job_id(pick)

        async def step(store: Store) -> ReplayRecord | None:
            job = await (
                store.cancel_replay(tenant, job_id) if cancels else store.replay_step(job_id, limit)
            )
            return job and replace(job, cursor=None)

        self.fleet.agree(step)

    @rule(tenant=tenants, chosen=filters, limit=st.integers(1, 3))
    def purge(self, tenant: str, chosen: dict[str, Any], limit: int) -> None:
        """Somebody removes dead letters."""
        self.fleet.agree(lambda store: store.purge(tenant, TaskFilter(**chosen), limit))

    # --- upkeep -----------------------------------------------------------------------------------

    @rule(limit=st.integers(1, 5), kept=st.sampled_from([0, SECOND_MS, HOUR_MS, DAY_MS]))
    def sweep(self, limit: int, kept: int) -> None:
        """Maintenance removes what is out of time, to the end, for the order is free."""

        async def swept(store: Store) -> int:
            removed = 0
            while True:
                step = await store.sweep(Retention(kept, 2 * kept), limit)
                assert step.tasks <= limit
                removed += step.tasks
                if not step.more:
                    return removed

        self.fleet.agree(swept)

    @rule(picks=st.lists(st.integers(0, 30), max_size=5))
    def bury(self, picks: list[int]) -> None:
        """Maintenance has deleted bodies."""
        self.fleet.agree(lambda store: store.forget_orphans([f"body {pick}" for pick in picks]))

    @rule(
        tenant=tenants,
        policy_id=st.sampled_from(POLICIES),
        document=st.sampled_from([b"{}", b'{"a":1}']),
        how=st.sampled_from(["write", "replace", "delete"]),
    )
    def policies(self, tenant: str, policy_id: str, document: bytes, how: str) -> None:
        """Somebody writes or deletes a policy."""
        policy = PolicyVersion(tenant=tenant, id=policy_id, version=0, document=document)
        if how == "delete":
            self.fleet.agree(lambda store: store.delete_policy(tenant, policy_id))
        else:
            self.fleet.agree(lambda store: store.put_policy(policy, replace=how == "replace"))

    @rule(tenant=tenants, pick=st.integers(0, 3), revoke=st.booleans())
    def keys(self, tenant: str, pick: int, revoke: bool) -> None:
        """Somebody makes or revokes a key."""
        key = ApiKey(id=f"key {pick}", tenant=tenant, digest=b"digest %d" % pick)
        if revoke:
            self.fleet.agree(lambda store: store.revoke_key(key.id))
        else:
            self.fleet.agree(lambda store: store.put_key(key))
        self.fleet.agree(lambda store: store.find_key(key.digest))


def _shown(added: AddResult) -> tuple[Any, ...]:
    return added.status, without_engine_details(added.task), added.leased
