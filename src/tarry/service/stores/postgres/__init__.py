"""The PostgreSQL store: tasks in tables that the processes of several machines share.

`schema` explains the tables, `sql_files` the functions in `sql/`, which are the hot operations, and
`database` the connections.
"""

from tarry.service.stores.postgres.database import parse_url
from tarry.service.stores.postgres.store import PostgresTaskStore

__all__ = ["PostgresTaskStore", "parse_url"]
