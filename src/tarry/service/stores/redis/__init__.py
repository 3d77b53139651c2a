"""The store in Redis or Valkey, on a single server or in a Cluster.

The data is divided into partitions, and each tenant is in one of them. All keys of a partition have
the same hash tag, so that one Lua script can change them at once, also in a Cluster.

    store         `RedisTaskStore`, which names all operations of `tarry.service.store.Store`
    partitions    which partition has a tenant; scripts on one or several partitions
    opening       creates a store or checks the stored one; `durability` checks the servers
    transitions   operations that change the status of tasks; `claim` leases tasks
    queries       tasks, attempts and counters; `task_lists` reads lists page by page
    lanes         state, limits and retry budgets of lanes
    retention     removal of old records
    cold_records  policies, keys, secrets, replays, processes and series
    transfer      export and import of all records
    scripts, lua  the scripts, one for each operation; `lua/records.lua` explains the keys
    codec         the stored form of tasks and lanes
    connection    connections, timeouts and errors; `cluster` knows which node has which partition
    listener      notifications of other processes
"""

from tarry.service.stores.redis.store import RedisTaskStore

__all__ = ["RedisTaskStore"]
