"""`tarry workers`: list the processes of the service."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tarry.cli import output
from tarry.cli.options import DEFAULT_SERVER, ApiKeyOption, JsonOption, ServerOption
from tarry.cli.remote import connect
from tarry.core.text import format_duration
from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from tarry.wire.tasks import WorkerInfo

_HEADINGS = (
    *("name", "host", "pid", "role", "version"),
    *("uptime", "last seen", "running", "leased"),
)


def workers(
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the processes of the service that use its store.

    A process sends a heartbeat every five seconds, and is not listed any more after 30 seconds
    without one. With API keys, this needs a key of the tenant that the setting `operator` names.
    """
    with connect(server, api_key) as client:
        listed = client.workers()
    output.print_list(
        listed,
        _HEADINGS,
        partial(_worker_row, effects.unix_time() * 1000),
        as_json=as_json,
        cut_column="name",
    )


def _worker_row(now_ms: float, worker: WorkerInfo) -> tuple[object, ...]:
    uptime_s = max(0, now_ms - worker.started_at) // 1000
    silent_s = max(0, now_ms - worker.seen_at) // 1000
    return (
        worker.name,
        worker.host,
        worker.pid,
        worker.role,
        worker.version,
        format_duration(uptime_s) if uptime_s else "0 s",
        f"{format_duration(silent_s)} ago" if silent_s else "now",
        worker.running_attempts,
        worker.leased_tasks,
    )
