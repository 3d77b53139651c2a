"""What dead workers held: their leases end at once, instead of at their time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.model import Status
from tarry.service.stores.sqlite.life import end_cancelled, hand_back

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.ledger import Ledger

_LOCKS = "SELECT lock FROM worker WHERE lock IS NOT NULL"
_HELD = """
SELECT seq, tenant, lane, policy, next_attempt_at, cancelling, attempts
FROM state INDEXED BY state_leased
WHERE status = 1 AND wake_at > ? AND worker IN (SELECT id FROM worker WHERE lock = ?) LIMIT ?
"""
_FORGET = """
DELETE FROM worker WHERE lock = ? AND id NOT IN (
    SELECT worker FROM state INDEXED BY state_leased WHERE status = 1 AND worker IS NOT NULL)
"""


def recover(ledger: Ledger, limit: int) -> bool:
    """End up to `limit` leases of workers that are dead; True: there may be more.

    An attempt that may have begun is abandoned now, and the next claim logs it as lost. A lease
    taken ahead of its time is handed back. A worker is forgotten with its last lease.
    """
    presence, room = ledger.presence, limit
    if presence is None:
        return False
    for lock in presence.gone({lock for (lock,) in ledger.execute(_LOCKS).fetchall()}):
        held = ledger.execute(_HELD, (ledger.now, lock, room)).fetchall()
        for seq, tenant, lane_id, policy, due, cancelling, attempts in held:
            if due <= ledger.now:
                ledger.execute("UPDATE state SET wake_at = ? WHERE seq = ?", (ledger.now, seq))
                lane = ledger.lane(lane_id)
                lane.leased(ledger.now)
                lane.settle()  # a probe that died makes room for another
            elif cancelling:
                old = int(Status.IN_FLIGHT)
                end_cancelled(ledger, seq, tenant, lane_id, policy, old, attempts)
            else:
                hand_back(ledger, seq, tenant, lane_id, policy, due)
        room -= len(held)
        if room <= 0:
            return True
        ledger.execute(_FORGET, (lock,))
    presence.tidy()
    return False
