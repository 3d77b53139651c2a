"""The `.sql` files of the PostgreSQL store: its tables, and PL/pgSQL functions.

Each hot operation is one call of a function, so one round trip. A file names the constants of
`constants` as `${NAME}`. Rules for all functions:

* They take arrays, so that a batch is a few statements, however many tasks it has.
* Rows are locked in a fixed order: tasks by `tenant, seq`, then lanes, tenants and policies by id,
  then versions of policies.
  Claims take task rows with SKIP LOCKED, so they never wait for a task. `apply_1` changes counters
  last, because other transactions wait for these rows until the commit.
* A statement sees what was committed before it started (READ COMMITTED). So a function that decides
  by the tasks of a lane locks the lane first, and reads in the next statement: a transaction that
  has changed tasks of the lane either has committed, and its changes are seen, or will still update
  the lane, and correct the decision.
* The newest version of a row of `lane`, `tenant` or `policy_use` is found by `ORDER BY generation
  DESC LIMIT 1`, and each frequent update of such a row sets `updates` and `generation`; see
  `schema`.
* `p_now` is the time of a test's clock; NULL: the time of the server.
* The names of parameters begin with `p_`, those of variables with `v_`. Times are epoch ms.
* Table aliases: `i` is an input row (of the arguments or of a previous CTE) and `ord` its position;
  `s` is a task (a row of `live` or `finished`), `c` its content, `k` its key, `l` its lane, `t` a
  tenant (`n` in `TASK_JOINS`), `u` a policy, `g` a group of tasks whose changes are counted
  together, and `d` the sum of the changes (differences) of a row. In the functions that end
  leases, `l` is a row of `live`.
* `PLAN_SETTINGS` make every plan use indexes, also with outdated statistics. They apply inside the
  function only.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING

from tarry.service.stores.postgres import constants

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
_NAMES = (
    "tables",
    "types",
    "time",
    "names",
    "locks",
    "quotas",
    "counters",
    "delete",
    "add",
    "finish",
    "release",
    "cancel",
    "retry",
    "claim",
    "lanes",
)


def replace_placeholders(texts: Iterable[str], values: Mapping[str, object]) -> str:
    """Return the texts with each `${NAME}` replaced; raise unless exactly all values are used."""
    text = "\n".join(texts)
    names = set(_PLACEHOLDER.findall(text))
    if names != set(values):
        unknown, unused = sorted(names - values.keys()), sorted(values.keys() - names)
        msg = f"placeholders without a constant: {unknown}; constants that no file names: {unused}"
        raise ValueError(msg)
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), text)


def load_schema() -> str:
    """Return the statements that create the tables and functions."""
    values = {
        name: value
        for name, value in vars(constants).items()
        if name.isupper() and not name.startswith("_")
    }
    folder = files("tarry.service.stores.postgres") / "sql"
    texts = ((folder / f"{name}.sql").read_text("utf-8") for name in _NAMES)
    return replace_placeholders(texts, values)
