-- The tables and indexes of the SQLite store, see schema.py.
-- Statements are split at semicolons, so comments and strings must not contain one.

CREATE TABLE tenant (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    pending INTEGER NOT NULL DEFAULT 0,
    in_flight INTEGER NOT NULL DEFAULT 0,
    succeeded INTEGER NOT NULL DEFAULT 0,
    exhausted INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0,
    superseded INTEGER NOT NULL DEFAULT 0,
    last_turn INTEGER NOT NULL DEFAULT 0,
    due_check_at INTEGER,    -- lower bound of the same column of its lanes
    expiry_check_at INTEGER, -- likewise
    ready INTEGER NOT NULL DEFAULT 0, -- 1: in the rotation that claims walk through
    lanes INTEGER NOT NULL DEFAULT 0 -- number of its lanes
);
CREATE INDEX tenant_due_check ON tenant (due_check_at)
    WHERE ready = 0 AND due_check_at IS NOT NULL;
CREATE INDEX tenant_expiry_check ON tenant (expiry_check_at)
    WHERE ready = 0 AND expiry_check_at IS NOT NULL;
CREATE INDEX tenant_rotation ON tenant (last_turn) WHERE ready = 1;

CREATE TABLE lane ( -- columns as the fields of model.LaneRecord, unless described here
    id INTEGER PRIMARY KEY,
    tenant INTEGER NOT NULL,
    name TEXT NOT NULL UNIQUE,
    parked_until INTEGER,
    probes INTEGER NOT NULL DEFAULT 0,
    consecutive_opens INTEGER NOT NULL DEFAULT 0,
    paused INTEGER NOT NULL DEFAULT 0,
    pending INTEGER NOT NULL DEFAULT 0,
    in_flight INTEGER NOT NULL DEFAULT 0,
    exhausted INTEGER NOT NULL DEFAULT 0,
    last_claim_at INTEGER,
    last_turn INTEGER NOT NULL DEFAULT 0, -- number of the last claim turn, see claim
    due_at INTEGER,          -- lower bound of the due times of pending tasks, NULL without any
    lease_end_at INTEGER,    -- lower bound of the ends of leases, NULL without any
    due_check_at INTEGER,    -- make the lane ready one lease horizon before this time
    expiry_check_at INTEGER, -- make the lane ready at this time (a lease or the parking ends)
    ready INTEGER NOT NULL DEFAULT 0, -- 1: in the rotation that claims walk through
    last_probe INTEGER,      -- seq of the task that was last leased as a probe
    rate REAL,               -- attempts per second, NULL: not limited
    concurrency INTEGER,     -- attempts at a time
    limits TEXT,             -- the DownstreamLimits that an operator has set
    budget REAL NOT NULL DEFAULT 0, -- see Store.add_to_budgets
    budget_at INTEGER NOT NULL DEFAULT 0, -- time of the last change of the budget
    tasks INTEGER NOT NULL DEFAULT 0 -- tasks in any status
);
CREATE INDEX lane_by_tenant ON lane (tenant, name);
CREATE INDEX lane_due_check ON lane (tenant, due_check_at)
    WHERE ready = 0 AND due_check_at IS NOT NULL;
CREATE INDEX lane_expiry_check ON lane (tenant, expiry_check_at)
    WHERE ready = 0 AND expiry_check_at IS NOT NULL;
CREATE INDEX lane_rotation ON lane (tenant, last_turn) WHERE ready = 1;
CREATE INDEX lane_limited ON lane (name) WHERE rate IS NOT NULL;
CREATE INDEX lane_configured ON lane (tenant, name, limits) WHERE limits IS NOT NULL;
CREATE INDEX lane_unused ON lane (id) WHERE tasks = 0 AND paused = 0 AND limits IS NULL;
CREATE INDEX lane_paused ON lane (name) WHERE paused = 1;

CREATE TABLE worker (id INTEGER PRIMARY KEY, name TEXT NOT NULL, lock TEXT); -- see worker_locks
CREATE UNIQUE INDEX worker_by_name ON worker (name, ifnull(lock, ''));

CREATE TABLE task ( -- columns as the fields of model.Task, like those of state
    seq INTEGER PRIMARY KEY,
    id BLOB NOT NULL UNIQUE,
    tenant INTEGER NOT NULL,
    key TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    policy_version INTEGER,
    fingerprint BLOB NOT NULL,
    owned_body_ref TEXT,
    packed_content BLOB NOT NULL
);
CREATE UNIQUE INDEX task_by_key ON task (tenant, key);

CREATE TABLE state (
    seq INTEGER PRIMARY KEY,
    tenant INTEGER NOT NULL,
    lane INTEGER NOT NULL,
    policy INTEGER NOT NULL, -- id in policy_use
    status INTEGER NOT NULL,
    wake_at INTEGER NOT NULL,
    next_attempt_at INTEGER NOT NULL,
    first_due_at INTEGER NOT NULL,
    version INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    attempts_before_replay INTEGER NOT NULL DEFAULT 0,
    lost_attempts INTEGER NOT NULL DEFAULT 0,
    backoff_offset INTEGER NOT NULL DEFAULT 0,
    replays INTEGER NOT NULL DEFAULT 0,
    cancelling INTEGER NOT NULL DEFAULT 0,
    worker INTEGER,
    previous_delay REAL,
    last_outcome_kind TEXT,
    reason TEXT,
    finished_at INTEGER
);
CREATE INDEX state_first ON state (lane, wake_at)
    WHERE status = 0 AND last_outcome_kind IS NULL;
CREATE INDEX state_retry ON state (lane, wake_at)
    WHERE status = 0 AND last_outcome_kind IS NOT NULL;
CREATE INDEX state_leased ON state (lane, wake_at) WHERE status = 1;
CREATE INDEX state_live ON state (tenant) WHERE finished_at IS NULL;
CREATE INDEX state_ended ON state (tenant, status) WHERE finished_at IS NOT NULL;
CREATE INDEX state_swept ON state (status, finished_at) WHERE finished_at IS NOT NULL;

CREATE TABLE attempt (id INTEGER PRIMARY KEY, log BLOB NOT NULL);

CREATE TABLE policy_use ( -- a policy that tasks name, whether it is stored or not
    id INTEGER PRIMARY KEY,
    tenant INTEGER NOT NULL,
    policy TEXT NOT NULL,
    live_tasks INTEGER NOT NULL DEFAULT 0,
    deleted_version INTEGER NOT NULL DEFAULT 0, -- last version before the policy was deleted
    tasks INTEGER NOT NULL DEFAULT 0, -- tasks in any status
    UNIQUE (tenant, policy)
);
CREATE INDEX policy_use_deleted ON policy_use (id) WHERE tasks = 0 AND deleted_version > 0;
CREATE TABLE policy (
    tenant INTEGER NOT NULL,
    id TEXT NOT NULL,
    version INTEGER NOT NULL,
    document BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    tasks INTEGER NOT NULL DEFAULT 0, -- with this policy_version
    replaced_at INTEGER -- NULL: the newest version
);
CREATE UNIQUE INDEX policy_by_id ON policy (tenant, id, version DESC);
CREATE INDEX policy_unused ON policy (replaced_at)
    WHERE tasks = 0 AND replaced_at IS NOT NULL;

CREATE TABLE record ( -- see store.RecordStore
    owner TEXT NOT NULL, -- a tenant, a lane, or empty
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    written_at INTEGER NOT NULL,
    expires_at INTEGER,
    PRIMARY KEY (owner, kind, key)
) WITHOUT ROWID;
CREATE INDEX record_expiry ON record (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE replay (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    next_at INTEGER NOT NULL,
    running INTEGER NOT NULL, -- 1: replays dead letters, 2: only counts finished tasks
    job BLOB NOT NULL -- the ReplayRecord
);
CREATE INDEX replay_by_age ON replay (created_at, id);
CREATE INDEX replay_of_tenant ON replay (tenant, created_at, id);
CREATE INDEX replay_unfinished ON replay (next_at, id) WHERE running > 0;
CREATE TABLE replay_task ( -- a replayed task that has not finished yet
    replay TEXT NOT NULL,
    task BLOB NOT NULL,
    PRIMARY KEY (replay, task)
) WITHOUT ROWID;

CREATE TABLE series ( -- number of attempts in each minute
    tenant INTEGER NOT NULL, -- 0: sum over all tenants
    minute INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (tenant, minute, outcome)
) WITHOUT ROWID;
CREATE INDEX series_by_minute ON series (minute);

CREATE TABLE orphan (ref TEXT PRIMARY KEY) WITHOUT ROWID; -- bodies of deleted tasks
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
-- removals: see InternedNames
INSERT INTO meta VALUES ('turn', 0), ('pinged', 0), ('limits_version', 0), ('removals', 0);
