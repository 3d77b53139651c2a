"""Attempt logs in, a policy and its reasons out: `propose(gather(read_attempts(path)))`."""

from tarry.tuning.evidence import Evidence, Hedge, Odds, gather
from tarry.tuning.line import Line
from tarry.tuning.log import Attempt, AttemptLog, read_attempts
from tarry.tuning.outages import Outage
from tarry.tuning.proposal import Proposal, propose
from tarry.tuning.replay import Replay, replay

__all__ = [
    "Attempt",
    "AttemptLog",
    "Evidence",
    "Hedge",
    "Line",
    "Odds",
    "Outage",
    "Proposal",
    "Replay",
    "gather",
    "propose",
    "read_attempts",
    "replay",
]
