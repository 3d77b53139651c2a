"""A Hypothesis state machine that makes the same random calls on all stores."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from tarry.service.delivery.targets import public_lane_name
from tarry.service.model import (
    ApiKeyRecord,
    AttemptRecord,
    BreakerChangeRecord,
    PolicyVersion,
    ReplayRecord,
    SigningSecretRecord,
    Status,
    Task,
    WorkerRecord,
)
from tarry.service.records.api_keys import find_api_key, put_api_key, revoke_api_key
from tarry.service.records.lane_activity import record_breaker_change, record_latencies
from tarry.service.records.series import SERIES_RETENTION_MS, SeriesPoint, record_series
from tarry.service.records.signing_secrets import delete_signing_secret, put_signing_secret
from tarry.service.records.workers import record_worker, remove_worker
from tarry.service.store import (
    AddResult,
    LeaseTerms,
    NewTask,
    Release,
    Retention,
    Store,
    StoredTaskFilter,
    TaskResult,
)
from tarry.service.task_search import build_column_filter, search_of_replay
from tarry.wire.tasks import DownstreamLimits, Search
from tests.service.stores.comparison import (
    TENANTS,
    StoreComparison,
    check_claim,
    comparable_task,
)
from tests.service.stores.harness import (
    DAY_MS,
    HOUR_MS,
    LEASE,
    MINUTE_MS,
    SECOND_MS,
    purge,
    step_replay,
    task,
    task_id,
)
from tests.service.stores.strategies import (
    MAX_KNOWN_LEASES,
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
    quotas,
    result_drafts,
    search_fields,
    task_drafts,
    tenants,
)


class StoreMachine(RuleBasedStateMachine):
    """Makes random calls on all stores, and compares their complete contents after each."""

    def __init__(self) -> None:
        super().__init__()
        self.comparison = StoreComparison()
        self.last_task_number = 0
        self.last_replay_number = 0
        self.known_leases: list[list[Task]] = []
        """Leased tasks, each as a list with one task per store, because versions may differ."""

    def teardown(self) -> None:
        """Close the stores."""
        self.comparison.close()

    def check_invariants(self, *args: Any, **kwargs: Any) -> None:
        """Compare the stores after every step."""
        super().check_invariants(*args, **kwargs)
        self.comparison.snapshot()

    @property
    def now(self) -> int:
        """The time on the stores' clock."""
        return self.comparison.clock.now

    def next_task_number(self) -> int:
        """Return the number of a new task."""
        self.last_task_number += 1
        return self.last_task_number

    def record_leases(self, results: list[list[Task]]) -> None:
        """Add leased tasks to `known_leases`; `results` has one list for each store."""
        self.known_leases = [
            *self.known_leases,
            *(list(lease) for lease in zip(*results, strict=True)),
        ][-MAX_KNOWN_LEASES:]

    @initialize(
        drafts=st.lists(task_drafts, min_size=6, max_size=12),
        batch=st.lists(result_drafts, max_size=8),
    )
    def add_initial_tasks(self, drafts: list[TaskDraft], batch: list[ResultDraft]) -> None:
        """Add tasks, and finish some of them."""
        self.add(drafts, LEASE, None, None)
        self.comparison.clock.advance(SECOND_MS)
        self.claim_and_finish(LEASE, 2, {}, batch)

    # --- tasks and attempts -----------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 999, 1000, 2000, 30_000, MINUTE_MS, HOUR_MS, 25 * HOUR_MS]))
    def advance_clock(self, ms: int) -> None:
        """Advance the clock."""
        self.comparison.clock.advance(ms)

    @rule(
        drafts=st.lists(task_drafts, min_size=1, max_size=4),
        lease=st.one_of(st.none(), leases),
        quota=quotas,
        lane_quota=st.sampled_from([None, None, 1, 2]),
    )
    def add(
        self,
        drafts: list[TaskDraft],
        lease: LeaseTerms | None,
        quota: int | None,
        lane_quota: int | None,
    ) -> None:
        """Add tasks with new and existing keys, some of them directly leased."""
        new_tasks = [self._new_task(draft) for draft in drafts]
        results = self.comparison.call_each(
            lambda _, store: store.add(new_tasks, lease, quota=quota, lane_quota=lane_quota)
        )
        comparable = [[_comparable_result(added) for added in result] for result in results]
        assert [comparable[0]] * len(comparable) == comparable
        self.record_leases([[added.task for added in result if added.leased] for result in results])

    def _new_task(self, draft: TaskDraft) -> NewTask:
        number = self.next_task_number()
        key = f"key {number if draft.key is None else draft.key}"
        policy = self.comparison.call_and_compare(
            lambda store: store.get_policy(draft.tenant, draft.policy_id, draft.policy_version)
        )
        new = task(
            number,
            draft.host,
            draft.tenant,
            key=key,
            fingerprint=b"fingerprint %d" % (number % 2),
            policy_id=draft.policy_id,
            policy_version=policy and draft.policy_version,  # the service checks that it exists
            next_attempt_at=self.now - 500 + draft.due_offset,
            owned_body_ref=f"body {number}" if draft.has_body else None,
        )
        return NewTask(new, draft.delay, draft.lease_on_add)

    @rule(
        lease=leases,
        per_lane=st.sampled_from([1, 2, 1000]),
        lane_limits=st.dictionaries(lanes, st.sampled_from([0, 1]), max_size=1)
        | st.dictionaries(tenants, st.just(0), max_size=1),
        advance_ms=st.sampled_from([0, 0, 1000, 30_000]),
    )
    def claim(
        self, lease: LeaseTerms, per_lane: int, lane_limits: dict[str, int], advance_ms: int = 0
    ) -> None:
        """Claim from all lanes: with a low limit, stores may choose different lanes."""
        self.comparison.clock.advance(advance_ms)
        before = self.comparison.snapshot()
        results = self.comparison.call_each(
            lambda _, store: store.claim(
                lease, limit=1000, per_lane=per_lane, lane_limits=lane_limits
            )
        )
        after = self.comparison.snapshot()
        for result in results:
            check_claim(result, before, after, lease, lane_limits)
            result.tasks.sort(key=lambda leased: leased.id)
        comparable = [
            (
                result.now,
                [comparable_task(leased) for leased in result.tasks],
                result.consecutive_opens_by_lane,
            )
            for result in results
        ]
        assert [comparable[0]] * len(comparable) == comparable
        self.record_leases([result.tasks for result in results])

    @rule(
        lease=leases,
        per_lane=st.sampled_from([2, 1000]),
        lane_limits=st.just({}),
        batch=st.lists(result_drafts, min_size=1, max_size=6),
    )
    def claim_and_finish(
        self,
        lease: LeaseTerms,
        per_lane: int,
        lane_limits: dict[str, int],
        batch: list[ResultDraft],
    ) -> None:
        """Claim, and finish some leased tasks."""
        self.claim(lease, per_lane, lane_limits)
        if self.known_leases:
            self.finish(batch, lease)

    @precondition(lambda self: self.known_leases)
    @rule(batch=st.lists(result_drafts, min_size=1, max_size=4), lease=leases)
    def finish(self, batch: list[ResultDraft], lease: LeaseTerms) -> None:
        """Write results for leases that are valid, expired or already finished."""
        callback_numbers = [self.next_task_number() for _ in batch]

        def build_results(index: int) -> list[TaskResult]:
            return [
                self._build_result(draft, index, lease, number)
                for draft, number in zip(batch, callback_numbers, strict=True)
            ]

        statuses = self.comparison.call_each(
            lambda index, store: store.finish(build_results(index))
        )
        assert [statuses[0]] * len(statuses) == statuses
        self._record_renewed_leases(
            [self._lease_at(draft.lease_index)[0].id for draft in batch if draft.renews_lease]
        )

    def _lease_at(self, index: int) -> list[Task]:
        return self.known_leases[index % len(self.known_leases)]

    def _build_result(
        self, draft: ResultDraft, index: int, lease: LeaseTerms, number: int
    ) -> TaskResult:
        leased = self._lease_at(draft.lease_index)[index]
        attempt = AttemptRecord(
            attempt_number=leased.attempts + 1,
            scheduled_at=leased.next_attempt_at,
            started_at=self.now,
            outcome="success" if draft.status is Status.SUCCEEDED else "transient",
            worker=leased.worker,
        )
        return TaskResult(
            task=leased,
            attempt=attempt if draft.is_logged else None,
            status=draft.status,
            reason=draft.reason if draft.status is Status.EXHAUSTED else None,
            next_attempt_at=self.now + draft.delay,
            renewed_lease=lease if draft.renews_lease else None,
            previous_delay=draft.delay / 7,
            backoff_offset=draft.lease_index,
            last_outcome_kind="transient",
            callback_task=task(number, "b", leased.tenant) if draft.has_callback else None,
        )

    def _record_renewed_leases(self, ids: list[str]) -> None:
        """Record renewed leases with the current version of each store."""
        for leased_id in dict.fromkeys(ids):
            for tenant in TENANTS:
                self._record_if_leased(tenant, leased_id)

    def _record_if_leased(self, tenant: str, leased_id: str) -> None:
        found = self.comparison.call_each(lambda _, store: store.get_task(tenant, leased_id))
        still_leased = [task for task in found if task and task.status is Status.IN_FLIGHT]
        if still_leased:
            self.record_leases([[task] for task in still_leased])

    @precondition(lambda self: self.known_leases)
    @rule(
        indexes=st.lists(st.integers(0, MAX_KNOWN_LEASES - 1), min_size=1, max_size=3),
        delay=delays,
    )
    def release(self, indexes: list[int], delay: int) -> None:
        """Release leases that are valid, expired or already released."""
        retry_at = self.now + delay if delay else None
        self.comparison.call_each(
            lambda index, store: store.release(
                [Release(self._lease_at(number)[index], retry_at) for number in indexes]
            )
        )

    @precondition(lambda self: self.known_leases)
    @rule(indexes=st.lists(st.integers(0, MAX_KNOWN_LEASES - 1), max_size=3))
    def release_unknown_leases(self, indexes: list[int]) -> None:
        """Release all leases of a worker except a few."""
        known_ids = [self._lease_at(number)[0].id for number in indexes]
        self.comparison.call_and_compare(
            lambda store: store.release_unknown_leases(LEASE, known_ids)
        )

    @rule()
    def crash(self) -> None:
        """Restart all stores over their data."""
        self.comparison.crash()

    @rule()
    def transfer(self) -> None:
        """Move the records of each store to a new store of another implementation."""
        self.comparison.transfer()
        self.known_leases = [[*tasks[-1:], *tasks[:-1]] for tasks in self.known_leases]

    # --- operators --------------------------------------------------------------------------------

    @rule(
        lane=lanes,
        action=st.sampled_from(["park", "pause", "resume", "unpark", "limit", "remove limits"]),
        delay=st.sampled_from([0, 1000, 5000]),
        probes=st.integers(1, 3),
        consecutive_opens=st.integers(1, 3),
        lane_quota=st.sampled_from([None, 2]),
    )
    def change_lane(
        self,
        lane: str,
        action: str,
        delay: int,
        probes: int,
        consecutive_opens: int,
        lane_quota: int | None,
    ) -> None:
        """Park, pause, resume, unpark or limit a lane."""
        until = self.now + delay
        if action == "park":
            self.comparison.call_and_compare(
                lambda store: store.park(
                    lane, until, probes=probes, consecutive_opens=consecutive_opens
                )
            )
        elif action == "pause":
            self.comparison.call_and_compare(lambda store: store.pause(lane, lane_quota=lane_quota))
        elif action in {"limit", "remove limits"}:
            limits = DownstreamLimits(concurrency=probes) if action == "limit" else None
            self.comparison.call_and_compare(
                lambda store: store.set_limits(lane, limits, max_limited=1, lane_quota=lane_quota)
            )
        elif action == "resume":
            self.comparison.call_and_compare(lambda store: store.resume(lane))
        else:
            self.comparison.call_and_compare(lambda store: store.unpark(lane))

    @rule(tenant=tenants, number=st.integers(0, 30), cancel=st.booleans(), quota=quotas)
    def cancel_or_retry(self, tenant: str, number: int, cancel: bool, quota: int | None) -> None:
        """Cancel a task or retry it now, perhaps with the wrong tenant."""
        chosen_id = task_id(number % (self.last_task_number + 1))
        if cancel:
            self.comparison.call_and_compare(lambda store: store.cancel(tenant, chosen_id))
        else:
            self.comparison.call_and_compare(
                lambda store: store.retry_now(tenant, chosen_id, quota=quota)
            )

    @rule(
        tenant=tenants,
        status=st.sampled_from([None, *Status]),
        policy_id=maybe_policy,
        lane=maybe_lane,
        reason=maybe_reason,
        more_fields=search_fields,
        limit=st.sampled_from([1, 3, 100]),
        oldest_first=st.booleans(),
    )
    def list_tasks(
        self,
        tenant: str,
        more_fields: dict[str, Any],
        limit: int,
        oldest_first: bool,
        **fields: Any,
    ) -> None:
        """List tasks with a filter, and read the last attempts."""
        query = StoredTaskFilter(**fields, **more_fields)

        async def list_comparable_tasks(store: Store) -> Any:
            page = await store.list_tasks(tenant, query, limit=limit, oldest_first=oldest_first)
            attempts = await store.last_attempts(tenant, [task.id for task in page.items])
            tasks = [comparable_task(task) for task in page.items]
            return tasks, page.cursor is None, attempts

        self.comparison.call_and_compare(list_comparable_tasks)
        self.comparison.call_and_compare(lambda store: store.count_tasks(tenant, query))

    # --- dead letters -----------------------------------------------------------------------------

    @rule(
        tenant=tenants,
        filter_fields=filters,
        rate=st.sampled_from([0.0, 0.0, 0.5, 3.0]),
        min_age_ms=st.sampled_from([0, 0, 1000]),
        limit=st.integers(1, 4),
    )
    def replay(
        self, tenant: str, filter_fields: dict[str, Any], rate: float, min_age_ms: int, limit: int
    ) -> None:
        """Start a replay and make its first step."""
        self.last_replay_number += 1
        before = self.now - min_age_ms if min_age_ms else 0
        if "lane" in filter_fields:
            filter_fields = {"lane": public_lane_name(filter_fields["lane"])}
        search = Search(status="EXHAUSTED", **filter_fields)
        record = ReplayRecord(
            id=self.replay_id(0), tenant=tenant, search=search, rate=rate, before=before
        )
        task_filter = build_column_filter(tenant, search_of_replay(record))
        record.matched = self.comparison.call_and_compare(
            lambda store: store.count_tasks(tenant, task_filter)
        )
        self.comparison.call_and_compare(lambda store: store.start_replay(record))
        self.continue_replay(0, limit, tenant, cancel=False, quota=None)

    def replay_id(self, age: int) -> str:
        """Return the id of the last replay, or of the replay `age` before it."""
        return task_id(1000 + max(self.last_replay_number - age, 0))

    @precondition(lambda self: self.last_replay_number)
    @rule(
        age=st.integers(0, 2),
        limit=st.integers(1, 4),
        tenant=tenants,
        cancel=st.sampled_from([False, False, False, True]),
        quota=quotas,
    )
    def continue_replay(
        self, age: int, limit: int, tenant: str, cancel: bool, quota: int | None
    ) -> None:
        """Make a step of a replay, or cancel it."""
        chosen_id = self.replay_id(age)

        async def step(store: Store) -> ReplayRecord | None:
            record = await (
                store.cancel_replay(tenant, chosen_id)
                if cancel
                else step_replay(store, chosen_id, limit, quota)
            )
            return record and replace(record, cursor=None, count_cursor=None)

        self.comparison.call_and_compare(step)

    @rule(tenant=tenants, filter_fields=filters, limit=st.integers(1, 3))
    def purge(self, tenant: str, filter_fields: dict[str, Any], limit: int) -> None:
        """Purge dead letters."""
        self.comparison.call_and_compare(
            lambda store: purge(store, tenant, StoredTaskFilter(**filter_fields), limit)
        )

    # --- maintenance ------------------------------------------------------------------------------

    @rule(limit=st.integers(1, 5), retention_ms=st.sampled_from([0, SECOND_MS, HOUR_MS, DAY_MS]))
    def sweep(self, limit: int, retention_ms: int) -> None:
        """Sweep until no expired task is left, because the order of deletion is not defined."""

        async def sweep_all(store: Store) -> int:
            removed = 0
            while True:
                step = await store.sweep(Retention(retention_ms, 2 * retention_ms), limit)
                assert step.removed_task_count <= limit
                removed += step.removed_task_count
                if not step.has_more:
                    return removed

        self.comparison.call_and_compare(sweep_all)

    @rule(numbers=st.lists(st.integers(0, 30), max_size=5))
    def forget_orphaned_bodies(self, numbers: list[int]) -> None:
        """Remove entries from the list of orphaned bodies."""
        self.comparison.call_and_compare(
            lambda store: store.forget_orphaned_bodies([f"body {number}" for number in numbers])
        )

    @rule(
        tenant=tenants,
        policy_id=st.sampled_from(POLICIES),
        document=st.sampled_from([b"{}", b'{"a":1}']),
        action=st.sampled_from(["write", "replace", "replace", "delete"]),
        quota=st.sampled_from([None, None, 2]),
    )
    def change_policy(
        self, tenant: str, policy_id: str, document: bytes, action: str, quota: int | None
    ) -> None:
        """Write or delete a policy."""
        policy = PolicyVersion(tenant=tenant, id=policy_id, version=0, document=document)
        if action == "delete":
            self.comparison.call_and_compare(lambda store: store.delete_policy(tenant, policy_id))
        else:
            self.comparison.call_and_compare(
                lambda store: store.put_policy(policy, replace=action == "replace", quota=quota)
            )

    @rule(number=st.integers(0, 3), remove=st.booleans(), role=st.sampled_from(["api", "worker"]))
    def change_worker(self, number: int, remove: bool, role: str) -> None:
        """Record or remove a process."""
        worker = WorkerRecord(name=f"worker {number}", host="host", pid=number, role=role)
        if remove:
            self.comparison.call_and_compare(lambda store: remove_worker(store, worker.name))
        else:
            self.comparison.call_and_compare(lambda store: record_worker(store, worker))

    @rule(
        step_ms=st.sampled_from(sorted(SERIES_RETENTION_MS)),
        age=st.integers(0, 3),
        sums=st.dictionaries(st.sampled_from("abc"), st.integers(0, 9), min_size=1),
    )
    def record_series(self, step_ms: int, age: int, sums: dict[str, int]) -> None:
        """Add sums to a point of a recent interval."""
        at = self.comparison.clock.now // step_ms * step_ms - age * step_ms
        points = [SeriesPoint(step_ms, at, sums)]
        self.comparison.call_and_compare(lambda store: record_series(store, points))

    @rule(
        lane=lanes,
        state=st.sampled_from(["closed", "open", "half-open"]),
        counts=st.dictionaries(st.sampled_from("abc"), st.integers(1, 9)),
    )
    def record_lane_activity(self, lane: str, state: str, counts: dict[str, int]) -> None:
        """Record a change of a breaker, and latencies."""
        change = BreakerChangeRecord(at=self.now, before="closed", after=state)
        self.comparison.call_and_compare(lambda store: record_breaker_change(store, lane, change))
        self.comparison.call_and_compare(lambda store: record_latencies(store, {lane: counts}))

    @rule(tenant=tenants, number=st.integers(0, 3), revoke=st.booleans())
    def change_api_key(self, tenant: str, number: int, revoke: bool) -> None:
        """Store or revoke an API key."""
        digest, role = b"digest %d" % number, ("admin", "write", "read")[number % 3]
        key = ApiKeyRecord(id=f"key {number}", tenant=tenant, digest=digest, role=role)
        if revoke:
            self.comparison.call_and_compare(lambda store: revoke_api_key(store, key.id))
        else:
            self.comparison.call_and_compare(lambda store: put_api_key(store, key))
        self.comparison.call_and_compare(lambda store: find_api_key(store, key.digest))

    @rule(
        tenant=tenants,
        number=st.integers(0, 5),
        lane=st.sampled_from([None, "acme/a"]),
        delete=st.booleans(),
        expire_previous_ms=st.integers(0, 5_000),
    )
    def change_signing_secret(
        self, tenant: str, number: int, lane: str | None, delete: bool, expire_previous_ms: int
    ) -> None:
        """Store or delete a signing secret."""
        id_ = f"secret {number}"
        secret = SigningSecretRecord(tenant=tenant, id=id_, lane=lane, secret=b"secret")
        if delete:
            self.comparison.call_and_compare(
                lambda store: delete_signing_secret(store, tenant, id_)
            )
        else:
            self.comparison.call_and_compare(
                lambda store: put_signing_secret(
                    store, secret, expire_previous_ms=expire_previous_ms
                )
            )


def _comparable_result(added: AddResult) -> tuple[Any, ...]:
    return added.status, comparable_task(added.task), added.leased
