"""The store in Redis or Valkey, on a single server or in a Cluster.

The data is divided into partitions, and each tenant is in one of them. All keys of a partition have
the same hash tag, so that one Lua script can change them at once, also in a Cluster.

    store         the methods of `tarry.service.store.Store`
    task_lists    lists and counts of tasks, page by page
    connection    connections, timeouts and errors
    cluster       which node of a Cluster has which partition
    codec         the stored form of tasks and lanes
    scripts, lua  the scripts, one for each operation; `lua/records.lua` explains the keys
    durability    checks of the server's configuration
"""

from tarry.service.stores.redis.store import RedisTaskStore

__all__ = ["RedisTaskStore"]
