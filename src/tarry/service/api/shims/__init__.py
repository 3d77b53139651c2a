"""Shims: the parts of other vendors' APIs that create tasks, so that their clients keep working.

A shim translates requests, responses and errors. Tasks are created by the code that also serves
`POST /retry-tasks`, so quotas, allowed targets and lanes apply in the same way.
"""

SHIM_NAMES = ("qstash", "cloud_tasks")
"""The values of the setting `compatibility`."""
