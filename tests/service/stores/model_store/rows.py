"""What the store in memory is made of: a row for each task, a queue for each lane, a tenant."""

from __future__ import annotations

from collections import Counter, defaultdict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from tests.service.stores.model_store.alarms import STALE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.service.model import LaneRecord, PolicyVersion, Status, Task

Note = tuple[int, int, int]
"""When a task wants attention, its number, and the version for which that holds."""


class Row:
    """A task, its place in the order of adding, and its attempt log, packed so nobody shares it."""

    __slots__ = ("log", "number", "task")

    def __init__(self, number: int, task: Task) -> None:
        self.number: int = number
        self.task: Task = task
        self.log: list[bytes] = []

    @property
    def note(self) -> Note:
        """When it wants attention, as things stand."""
        return self.task.wake_at, self.number, self.task.version


class Notes:
    """A heap of notes about rows. One that is out of date lies in it until it comes to the top."""

    __slots__ = ("_heap", "_rows")

    def __init__(self, rows: Mapping[int, Row]) -> None:
        self._rows = rows
        self._heap: list[Note] = []

    def add(self, row: Row, live: int) -> None:
        """Note a row; `live` is how many of the notes may be valid."""
        heappush(self._heap, row.note)
        if len(self._heap) > 2 * live + STALE:
            self._heap = [note for note in self._heap if self._valid(note)]
            heapify(self._heap)

    def first(self) -> int | None:
        """Return the earliest time."""
        while self._heap and not self._valid(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, until: int) -> Row | None:
        """Take out the earliest row whose time has come by then."""
        first = self.first()
        if first is None or first > until:
            return None
        return self._rows[heappop(self._heap)[1]]

    def _valid(self, note: Note) -> bool:
        row = self._rows.get(note[1])
        return row is not None and row.task.version == note[2]


class Queue:
    """A lane and its live tasks."""

    __slots__ = ("lane", "lapsed", "leases", "ready", "turn", "waiting")

    def __init__(self, lane: LaneRecord, rows: Mapping[int, Row]) -> None:
        self.lane: LaneRecord = lane
        self.waiting: Notes = Notes(rows)
        """What can be claimed when its time comes: PENDING, or abandoned."""
        self.leases: Notes = Notes(rows)
        self.lapsed: set[int] = set()
        """The tasks whose lease has run out: in flight, but among those that wait."""
        self.ready: bool = False
        """Whether it is in line to be served, so that it needs no alarm."""
        self.turn: int = 0

    def lapse(self, now: int) -> None:
        """Put leases that have run out among what waits."""
        while row := self.leases.pop(now):
            self.lapsed.add(row.number)
            self.waiting.add(row, self.lane.pending + self.lane.in_flight)

    def is_shut(self, now: int) -> bool:
        """Whether it gives nothing now."""
        until = self.lane.parked_until
        return self.lane.paused or (until is not None and until > now)

    def room(self, limit: int) -> int:
        """Return how many of `limit` tasks an unshut lane may give: half-open, its free probes."""
        if self.lane.parked_until is None:
            return limit
        return min(limit, self.lane.probes - self.lane.in_flight + len(self.lapsed))


class Tenant:
    """What belongs to one tenant."""

    __slots__ = (
        "counts",
        "dead",
        "keys",
        "name",
        "numbers",
        "policies",
        "policy_use",
        "policy_versions",
        "ready",
        "series",
        "superseded",
        "turn",
    )

    def __init__(self, name: str) -> None:
        self.name: str = name
        self.keys: dict[str, int] = {}
        """The idempotency keys of its tasks."""
        self.numbers: list[int] = []
        """Its tasks in the order of adding, and some that are gone."""
        self.dead: set[int] = set()
        self.counts: Counter[Status] = Counter()
        self.superseded: int = 0
        self.series: dict[int, Counter[str]] = defaultdict(Counter)
        self.policies: dict[str, list[PolicyVersion]] = {}
        self.policy_use: Counter[str] = Counter()
        """How many live tasks name each policy."""
        self.policy_versions: Counter[str] = Counter()
        """The last version of each policy, those that were deleted included."""
        self.ready: list[tuple[int, str]] = []
        """Its lanes in line, least recently served first."""
        self.turn: int = 0
