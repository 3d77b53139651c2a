"""Hypothesis strategies for the store state machine: new tasks, results, filters, leases."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st

from tarry.service.model import Status
from tarry.service.store import LeaseTerms
from tests.service.stores.comparison import TENANTS
from tests.service.stores.harness import HOUR_MS, MINUTE_MS, START_MS

WORKERS = ("one", "two")
POLICIES = ("default", "webhook")
REASONS = ("attempts", "budget")
MAX_KNOWN_LEASES = 20
"""Leases that the state machine keeps for later results; some of them have expired."""

tenants = st.sampled_from(TENANTS)
hosts = st.sampled_from("ab")
lanes = st.builds("{}/https:{}.example:443".format, tenants, hosts)
delays = st.sampled_from([0, 0, 1, 500, 1000, 1001, 5000, HOUR_MS])
maybe_policy = st.sampled_from([None, *POLICIES])
maybe_reason = st.sampled_from([None, *REASONS])
maybe_lane = st.one_of(st.none(), lanes)
quotas = st.sampled_from([None, None, 3, 8])
filters: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"reason": st.sampled_from(REASONS)}),
    st.fixed_dictionaries({"policy_id": st.sampled_from(POLICIES)}),
    st.fixed_dictionaries({"lane": lanes}),
)
times = st.integers(0, 3).map(lambda minutes: START_MS + minutes * MINUTE_MS)
search_fields: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"key": st.integers(0, 9).map("key {}".format)}),
    st.fixed_dictionaries({"lane_prefix": st.sampled_from(["acme/https:a", "acme/", "beta/x"])}),
    st.fixed_dictionaries({"created_from": times, "created_until": times}),
    st.fixed_dictionaries({"is_live": st.just(value=True)}),
    st.fixed_dictionaries({"finished_from": times}),
    st.fixed_dictionaries({"finished_until": times}),
    st.just({"matches_attempt": lambda attempt: attempt.attempt_number == 1}),
)
leases = st.builds(
    LeaseTerms,
    st.sampled_from(WORKERS),
    st.sampled_from([2000, 30_000]),
    st.sampled_from([0, 1000]),
)


class TaskDraft(NamedTuple):
    """The drawn fields of a task to add."""

    tenant: str
    host: str
    key: int | None
    """The number of a key that may exist; None for a new key."""
    delay: int | None
    due_offset: int
    """Milliseconds from half a second ago until the task is due."""
    policy_id: str
    policy_version: int | None
    lease_on_add: bool
    has_body: bool


class ResultDraft(NamedTuple):
    """The drawn fields of a result; `lease_index` selects the lease."""

    lease_index: int
    status: Status
    delay: int
    renews_lease: bool
    is_logged: bool
    has_callback: bool
    reason: str


task_drafts = st.builds(
    TaskDraft,
    tenants,
    hosts,
    st.one_of(st.none(), st.integers(0, 9)),
    st.one_of(st.none(), delays),
    delays,
    st.sampled_from(POLICIES),
    st.sampled_from([None, None, 1, 2]),
    st.booleans(),
    st.booleans(),
)
result_drafts = st.builds(
    ResultDraft,
    st.integers(0, MAX_KNOWN_LEASES - 1),
    st.sampled_from([Status.EXHAUSTED, Status.PENDING, Status.PENDING, Status.SUCCEEDED]),
    delays,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(REASONS),
)
