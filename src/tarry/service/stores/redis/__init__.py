"""The store in Redis or Valkey, on a single server or in a Cluster.

The data is divided into partitions, and each tenant is in one of them. All keys of a partition have
the same hash tag, so that one Lua script can change them at once, also in a Cluster.

What it is bad at (figures of docs/redis.md):

* Durability: replication is asynchronous, so a failover may lose the last acknowledged tasks. With
  `appendfsync everysec`, the failure of a machine loses the last one or two seconds.
* Large backlogs: all tasks are in memory, 550 to 1,200 bytes of each besides its content.
* Large tenants: a tenant is limited to one node, which runs one script at a time. The number of
  partitions is fixed when the store is created.
* Single tasks: adding one takes 200 to 300 us of the server, in a batch 50 us.
* Searches: a list with a filter reads at most 2,000 tasks for a page, which may be nearly empty.
* The death of a process: its tasks continue when their leases end, by default after 70 s.

    store         `RedisTaskStore`, which names all operations of `tarry.service.store.Store`
    partitions    which partition has a tenant; scripts on one or several partitions
    opening       creates a store or checks the stored one; `durability` checks the servers
    transitions   operations that change the status of tasks; `claim` leases tasks
    queries       tasks, attempts and counters; `task_lists` reads lists page by page
    lanes         state, limits and retry budgets of lanes
    retention     removal of old records
    cold_records  policies, replays and the leader
    records       records by owner, kind and key
    transfer      export and import of all records
    scripts, lua  the scripts, one for each operation; `lua/schema.lua` lists the keys
    codec         the stored form of tasks and lanes
    address       the URL of a store
    connection    runs scripts on servers; `server_client` has the connections to one of them
    cluster       which node of a Cluster has which partition
    failures      which error is raised for an error of the driver or of a script
    listener      notifications of other processes
"""

from tarry.service.stores.redis.store import RedisTaskStore

__all__ = ["RedisTaskStore"]
