"""The PostgreSQL store: tasks in tables that the processes of several machines share.

What it is bad at (figures of docs/postgres.md and docs/scale.md):

* Processor time: the server takes 0.19 ms for a task, Redis 0.15 ms, and SQLite has no server.
* Long transactions of other clients, such as `pg_dump` of a large database: PostgreSQL removes no
  old row versions meanwhile. In the last million of ten million tasks, the hot tables grew from
  365 to 1,192 MiB, and a claim took up to 1.8 times as long.
* The death of a process: its tasks continue when their leases end, by default after 70 s. SQLite
  notices it within about a second.
* Poolers in transaction mode: each call takes one more round trip, if statements are not cached.
  No wake-ups are received, so tasks of other processes are found by polling.

`schema` explains the tables, `sql_files` the functions in `sql/`, which are the hot operations, and
`database` the connections.
"""

from tarry.service.stores.postgres.database import parse_url
from tarry.service.stores.postgres.store import PostgresTaskStore

__all__ = ["PostgresTaskStore", "parse_url"]
