"""The filters of a search for tasks, with their names in the API, the client and the command line.

`tarry.wire.tasks.Search` has a field for each of them. Query parameters, request bodies, arguments
of the client, options of commands, and the names of fields in errors come from `SEARCH_FIELDS`.
This module does not need msgspec, because the command line loads it before a command is known.
"""

from __future__ import annotations

from typing import NamedTuple

_TIME_HELP = "Only tasks {} this time: 2h (ago), 7d or 2026-11-16T08:00."


class SearchField(NamedTuple):
    """The names of a filter."""

    api_name: str
    """The query parameter, and the field of a JSON body."""
    argument: str
    """The keyword argument of the client's methods."""
    option: str
    """The option of the commands. `--since` is a different filter for tasks and dead letters."""
    help: str
    """The help text of the option."""
    is_time: bool = False
    """Whether the value is a time: epoch milliseconds in the API, `Instant` in the client."""
    metavar: str | None = None
    """The value in the help of the option; None: its type."""


def _time(api_name: str, argument: str, option: str, relation: str) -> SearchField:
    return SearchField(
        api_name, argument, option, _TIME_HELP.format(relation), is_time=True, metavar="TIME"
    )


SEARCH_FIELDS: dict[str, SearchField] = {
    "policy_id": SearchField("policyId", "policy", "--policy", "Only tasks with this policy."),
    "lane": SearchField(
        "lane", "lane", "--lane", "Only tasks for this downstream; see `tarry downstreams`."
    ),
    "reason": SearchField(
        "reason", "reason", "--reason", "Only tasks that finished for this reason."
    ),
    "url_prefix": SearchField(
        "urlPrefix",
        "url_prefix",
        "--url",
        "Only tasks whose target URL starts with this URL.",
        metavar="URL",
    ),
    "idempotency_key": SearchField(
        "idempotencyKey", "key", "--idempotency-key", "Only the task with this key."
    ),
    "created_after": _time("createdAfter", "created_after", "--since", "created since"),
    "created_before": _time("createdBefore", "created_before", "--until", "created until"),
    "finished_after": _time("finishedAfter", "finished_after", "--since", "finished since"),
    "finished_before": _time("finishedBefore", "finished_before", "--until", "finished until"),
    "last_status": SearchField(
        "lastStatus",
        "last_status",
        "--last-status",
        "Only tasks whose last attempt got this status: 503, 5xx, UNAVAILABLE.",
    ),
    "error": SearchField(
        "error",
        "error",
        "--error",
        "Only tasks whose last attempt failed with this class or part of a message.",
    ),
    "status": SearchField("status", "status", "--status", "Only tasks with this status."),
}
"""The filters by the name of the field of `Search`."""

TIME_FIELDS: tuple[str, ...] = tuple(name for name, field in SEARCH_FIELDS.items() if field.is_time)
