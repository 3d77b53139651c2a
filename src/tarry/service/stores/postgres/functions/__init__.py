"""PL/pgSQL functions of the PostgreSQL store: each hot operation is one call, so one round trip.

Rules for all functions:

* They take arrays, so that a batch is a few statements, however many tasks it has.
* Rows are locked in a fixed order: tasks by `tenant, seq`, then lanes, tenants and policies by id,
  then versions of policies.
  Claims take task rows with SKIP LOCKED, so they never wait for a task. `apply_1` changes counters
  last, because other transactions wait for these rows until the commit.
* A statement sees what was committed before it started (READ COMMITTED). So a function that decides
  by the tasks of a lane locks the lane first, and reads in the next statement: a transaction that
  has changed tasks of the lane either has committed, and its changes are seen, or will still update
  the lane, and correct the decision.
* `p_now` is the time of a test's clock; NULL: the time of the server.
* The names of parameters begin with `p_`, those of variables with `v_`. Times are epoch ms.
* Table aliases: `i` is an input row (of the arguments or of a previous CTE) and `ord` its position;
  `s` is a task (a row of `live` or `finished`), `c` its content, `k` its key, `l` its lane, `t` a
  tenant (`n` in `TASK_JOINS`), `u` a policy, `g` a group of tasks whose changes are counted
  together, and `d` the sum of the changes (differences) of a row. In `transitions`, `l` is a row of
  `live`.
* `PLAN_SETTINGS` make every plan use indexes, also with outdated statistics. They apply inside the
  function only.
"""

from __future__ import annotations

from tarry.service.stores.postgres.functions.add import ADD_FUNCTIONS
from tarry.service.stores.postgres.functions.claim import CLAIM_FUNCTIONS
from tarry.service.stores.postgres.functions.common import COMMON_FUNCTIONS
from tarry.service.stores.postgres.functions.lanes import LANE_FUNCTIONS
from tarry.service.stores.postgres.functions.transitions import TRANSITION_FUNCTIONS

FUNCTIONS = (
    COMMON_FUNCTIONS + ADD_FUNCTIONS + TRANSITION_FUNCTIONS + CLAIM_FUNCTIONS + LANE_FUNCTIONS
)
"""The statements that create all functions."""
