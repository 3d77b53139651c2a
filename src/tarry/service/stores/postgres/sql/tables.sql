-- The lower bits of `seq`; the upper ones are the day, see schema.py.
CREATE SEQUENCE tarry.task_number AS bigint MAXVALUE ${MAX_TASK_NUMBER} CYCLE CACHE 1;
CREATE SEQUENCE tarry.turn AS bigint;
CREATE TABLE tarry.meta (name text COLLATE "C" PRIMARY KEY, value bigint NOT NULL)
    WITH (fillfactor = 50, ${OFTEN_UPDATED});
-- The time of the last ping, and a number that grows when limits or pauses of lanes change.
INSERT INTO tarry.meta VALUES ('pinged', 0), ('limits_version', 0);

CREATE TABLE tarry.tenant (
    id integer NOT NULL GENERATED ALWAYS AS IDENTITY,
    name text COLLATE "C" NOT NULL,
    pending bigint NOT NULL DEFAULT 0,
    in_flight bigint NOT NULL DEFAULT 0,
    succeeded bigint NOT NULL DEFAULT 0,
    exhausted bigint NOT NULL DEFAULT 0,
    cancelled bigint NOT NULL DEFAULT 0,
    superseded bigint NOT NULL DEFAULT 0,
    lanes integer NOT NULL DEFAULT 0,
    last_turn bigint NOT NULL DEFAULT 0,
    due_check_at bigint, -- lower bound of the same column of its lanes that are asleep
    expiry_check_at bigint, -- likewise
    ready boolean NOT NULL DEFAULT FALSE, -- claims visit it in turn; FALSE: asleep, see schema.py
    updates bigint NOT NULL DEFAULT 0, -- number of updates that count towards `generation`
    generation bigint NOT NULL DEFAULT 0, -- updates / 32, see schema.py
    first_turn bigint -- lower bound of `last_turn` of its ready lanes
) WITH (fillfactor = 50, ${OFTEN_UPDATED});
CREATE INDEX tenant_by_name ON tarry.tenant (name);
CREATE INDEX tenant_newest ON tarry.tenant (id, generation);
CREATE INDEX tenant_due_check ON tarry.tenant (due_check_at, generation DESC)
    WHERE NOT ready AND due_check_at IS NOT NULL;
CREATE INDEX tenant_expiry_check ON tarry.tenant (expiry_check_at, generation DESC)
    WHERE NOT ready AND expiry_check_at IS NOT NULL;
CREATE INDEX tenant_rotation ON tarry.tenant (last_turn, id) WHERE ready;

-- The unique names of `tenant`, whose own indexes cannot be unique: see schema.py.
CREATE TABLE tarry.tenant_name (
    name text COLLATE "C" PRIMARY KEY,
    id integer NOT NULL UNIQUE
);
-- A row with a name that exists already is not inserted, as with ON CONFLICT DO NOTHING.
CREATE FUNCTION tarry.insert_tenant_name_1() RETURNS trigger ${PLPGSQL} AS $$
BEGIN
    INSERT INTO tarry.tenant_name (name, id) VALUES (NEW.name, NEW.id) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN NEW;
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION tarry.delete_tenant_name_1() RETURNS trigger ${PLPGSQL} AS $$
BEGIN
    DELETE FROM tarry.tenant_name WHERE id = OLD.id;
    RETURN NULL;
END $$;
CREATE TRIGGER insert_name BEFORE INSERT ON tarry.tenant
FOR EACH ROW EXECUTE FUNCTION tarry.insert_tenant_name_1();
CREATE TRIGGER delete_name AFTER DELETE ON tarry.tenant
FOR EACH ROW EXECUTE FUNCTION tarry.delete_tenant_name_1();

CREATE TABLE tarry.lane (
    id integer NOT NULL GENERATED ALWAYS AS IDENTITY,
    tenant integer NOT NULL,
    name text COLLATE "C" NOT NULL,
    parked_until bigint,
    probes integer NOT NULL DEFAULT 0,
    consecutive_opens integer NOT NULL DEFAULT 0,
    paused boolean NOT NULL DEFAULT FALSE,
    pending bigint NOT NULL DEFAULT 0,
    in_flight bigint NOT NULL DEFAULT 0,
    exhausted bigint NOT NULL DEFAULT 0,
    tasks bigint NOT NULL DEFAULT 0, -- in any status
    unused boolean NOT NULL DEFAULT TRUE, -- tasks = 0
    last_claim_at bigint,
    last_turn bigint NOT NULL DEFAULT 0, -- the greater, the more recently served
    last_probe bigint, -- seq of the task that was last leased as a probe
    due_at bigint, -- lower bound of the due times of pending tasks
    lease_end_at bigint, -- lower bound of the ends of leases
    due_check_at bigint, -- visit the lane one lease horizon before this time
    expiry_check_at bigint, -- visit the lane at this time (a lease or the parking ends)
    ready boolean NOT NULL DEFAULT FALSE, -- claims visit it in turn; FALSE: asleep, see schema.py
    rate double precision, -- see Store.record_lane_limits
    concurrency integer,
    limits text, -- the DownstreamLimits that an operator has set
    budget double precision NOT NULL DEFAULT 0, -- see Store.add_to_budgets
    budget_at bigint NOT NULL DEFAULT 0,
    updates bigint NOT NULL DEFAULT 0,
    generation bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50, ${OFTEN_UPDATED});
CREATE INDEX lane_by_name ON tarry.lane (name);
CREATE INDEX lane_by_tenant ON tarry.lane (tenant, name);
CREATE INDEX lane_newest ON tarry.lane (id, generation);
CREATE INDEX lane_due_check ON tarry.lane (tenant, due_check_at, generation DESC)
    WHERE NOT ready AND due_check_at IS NOT NULL;
CREATE INDEX lane_expiry_check ON tarry.lane (tenant, expiry_check_at, generation DESC)
    WHERE NOT ready AND expiry_check_at IS NOT NULL;
CREATE INDEX lane_rotation ON tarry.lane (tenant, last_turn, id) WHERE ready;
CREATE INDEX lane_unused ON tarry.lane (id) WHERE unused AND NOT paused AND limits IS NULL;
CREATE INDEX lane_limited ON tarry.lane (id) WHERE rate IS NOT NULL;
CREATE INDEX lane_paused ON tarry.lane (id) WHERE paused;
CREATE INDEX lane_configured ON tarry.lane (tenant, name) WHERE limits IS NOT NULL;

-- The unique names of `lane`, whose own indexes cannot be unique: see schema.py.
CREATE TABLE tarry.lane_name (
    name text COLLATE "C" PRIMARY KEY,
    id integer NOT NULL UNIQUE
);
-- A row with a name that exists already is not inserted, as with ON CONFLICT DO NOTHING.
CREATE FUNCTION tarry.insert_lane_name_1() RETURNS trigger ${PLPGSQL} AS $$
BEGIN
    INSERT INTO tarry.lane_name (name, id) VALUES (NEW.name, NEW.id) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN NEW;
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION tarry.delete_lane_name_1() RETURNS trigger ${PLPGSQL} AS $$
BEGIN
    DELETE FROM tarry.lane_name WHERE id = OLD.id;
    RETURN NULL;
END $$;
CREATE TRIGGER insert_name BEFORE INSERT ON tarry.lane
FOR EACH ROW EXECUTE FUNCTION tarry.insert_lane_name_1();
CREATE TRIGGER delete_name AFTER DELETE ON tarry.lane
FOR EACH ROW EXECUTE FUNCTION tarry.delete_lane_name_1();

CREATE TABLE tarry.task_key (
    seq bigint PRIMARY KEY,
    id uuid NOT NULL UNIQUE,
    tenant integer NOT NULL,
    key text COLLATE "C" NOT NULL,
    UNIQUE (tenant, key)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE tarry.live ( -- columns as the fields of model.Task, unless described here
    tenant integer NOT NULL,
    seq bigint NOT NULL,
    lane integer NOT NULL,
    policy integer NOT NULL, -- policy_use.id
    queue smallint NOT NULL, -- PENDING: 0 without, 1 with a failed attempt; IN_FLIGHT: 2
    wake_at bigint NOT NULL,
    next_attempt_at bigint NOT NULL,
    first_due_at bigint NOT NULL,
    created_at bigint NOT NULL,
    version integer NOT NULL DEFAULT 0, -- of the task, not of its policy
    attempts integer NOT NULL DEFAULT 0,
    attempts_before_replay integer NOT NULL DEFAULT 0,
    lost_attempts integer NOT NULL DEFAULT 0,
    backoff_offset integer NOT NULL DEFAULT 0,
    replays integer NOT NULL DEFAULT 0,
    cancelling boolean NOT NULL DEFAULT FALSE,
    previous_delay double precision,
    worker text COLLATE "C",
    last_outcome_kind text COLLATE "C",
    PRIMARY KEY (tenant, seq)
) WITH (fillfactor = 70, ${OFTEN_UPDATED});
CREATE INDEX live_queue ON tarry.live (lane, queue, wake_at, seq);

CREATE TABLE tarry.finished (
    tenant integer NOT NULL,
    status smallint NOT NULL,
    seq bigint NOT NULL,
    lane integer NOT NULL,
    policy integer NOT NULL,
    finished_at bigint NOT NULL,
    next_attempt_at bigint NOT NULL,
    first_due_at bigint NOT NULL,
    created_at bigint NOT NULL,
    version integer NOT NULL,
    attempts integer NOT NULL,
    attempts_before_replay integer NOT NULL,
    lost_attempts integer NOT NULL,
    backoff_offset integer NOT NULL,
    replays integer NOT NULL,
    previous_delay double precision,
    last_outcome_kind text COLLATE "C",
    reason text COLLATE "C",
    PRIMARY KEY (tenant, status, seq)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX finished_by_age ON tarry.finished (status, finished_at);

CREATE TABLE tarry.content (
    seq bigint PRIMARY KEY,
    id uuid NOT NULL,
    policy_version integer,
    key text COLLATE "C" NOT NULL,
    fingerprint bytea NOT NULL,
    body_ref text COLLATE "C",
    content bytea NOT NULL
) PARTITION BY RANGE (seq);
CREATE TABLE tarry.content_default PARTITION OF tarry.content DEFAULT;
CREATE TABLE tarry.attempt (
    seq bigint NOT NULL,
    number integer NOT NULL,
    due_at bigint, -- of a lost attempt
    worker text COLLATE "C", -- of a lost attempt
    log bytea, -- the AttemptRecord; NULL: the attempt was lost
    PRIMARY KEY (seq, number)
) PARTITION BY RANGE (seq);
CREATE TABLE tarry.attempt_default PARTITION OF tarry.attempt DEFAULT;

CREATE TABLE tarry.policy_use ( -- a policy that tasks name, whether it is stored or not
    id integer NOT NULL GENERATED ALWAYS AS IDENTITY,
    tenant integer NOT NULL,
    policy text COLLATE "C" NOT NULL,
    live_tasks bigint NOT NULL DEFAULT 0,
    tasks bigint NOT NULL DEFAULT 0, -- in any status
    deleted_version integer NOT NULL DEFAULT 0, -- last version before the policy was deleted
    updates bigint NOT NULL DEFAULT 0,
    generation bigint NOT NULL DEFAULT 0,
    UNIQUE (tenant, policy)
) WITH (fillfactor = 50, ${OFTEN_UPDATED});
CREATE INDEX policy_use_newest ON tarry.policy_use (id, generation);
CREATE INDEX policy_use_by_name ON tarry.policy_use (tenant, policy, generation);
CREATE INDEX policy_use_deleted ON tarry.policy_use (id) WHERE deleted_version > 0;
CREATE TABLE tarry.policy (
    tenant integer NOT NULL,
    id text COLLATE "C" NOT NULL,
    version integer NOT NULL,
    document bytea NOT NULL,
    created_at bigint NOT NULL,
    tasks bigint NOT NULL DEFAULT 0, -- with this policy_version
    replaced_at bigint, -- NULL: the newest version
    PRIMARY KEY (tenant, id, version)
);
CREATE INDEX policy_replaced ON tarry.policy (replaced_at) WHERE replaced_at IS NOT NULL;

CREATE TABLE tarry.record ( -- see store.RecordStore
    owner text COLLATE "C" NOT NULL, -- a tenant, a lane, or empty
    kind text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    written_at bigint NOT NULL,
    expires_at bigint,
    PRIMARY KEY (owner, kind, key)
) WITH (fillfactor = 50, ${OFTEN_UPDATED});
CREATE INDEX record_expiry ON tarry.record (expires_at) WHERE expires_at IS NOT NULL;
-- The delete of a lane waits for its row lock, which writers of its records hold. So no record is
-- added after this.
CREATE FUNCTION tarry.delete_lane_records_1() RETURNS trigger ${PLPGSQL} AS $$
BEGIN
    DELETE FROM tarry.record WHERE owner = OLD.name;
    RETURN NULL;
END $$;
CREATE TRIGGER delete_records AFTER DELETE ON tarry.lane_name
FOR EACH ROW EXECUTE FUNCTION tarry.delete_lane_records_1();

CREATE TABLE tarry.replay (
    id text COLLATE "C" PRIMARY KEY,
    tenant text COLLATE "C" NOT NULL,
    created_at bigint NOT NULL,
    next_at bigint NOT NULL, -- the time of its end if running = 0
    running smallint NOT NULL, -- 1: replays dead letters, 2: only counts finished tasks
    job bytea NOT NULL -- the encoded ReplayRecord
);
CREATE INDEX replay_by_age ON tarry.replay (created_at, id);
CREATE INDEX replay_of_tenant ON tarry.replay (tenant, created_at, id);
CREATE INDEX replay_unfinished ON tarry.replay (next_at, id) WHERE running > 0;
CREATE TABLE tarry.replay_task ( -- a replayed task that has not finished yet
    replay text COLLATE "C" NOT NULL,
    task uuid NOT NULL,
    PRIMARY KEY (replay, task)
);

CREATE TABLE tarry.series ( -- number of attempts in each minute
    tenant integer NOT NULL, -- 0: sum over all tenants
    minute bigint NOT NULL,
    outcome text COLLATE "C" NOT NULL,
    shard smallint NOT NULL, -- of the connection, so that processes do not wait for each other
    count bigint NOT NULL,
    PRIMARY KEY (tenant, minute, outcome, shard)
) WITH (fillfactor = 50, ${OFTEN_UPDATED});
CREATE INDEX series_by_minute ON tarry.series (minute);

CREATE TABLE tarry.orphan (ref text COLLATE "C" PRIMARY KEY); -- bodies of deleted tasks
CREATE TABLE tarry.leader (id integer PRIMARY KEY, token text NOT NULL, until bigint NOT NULL)
    WITH (fillfactor = 50, ${OFTEN_UPDATED});
