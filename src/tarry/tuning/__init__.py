"""Attempt logs in, a policy and its reasons out: `propose(gather(read_attempts(path)))`."""

from tarry.tuning.attempt_log import Attempt, AttemptLog, read_attempts
from tarry.tuning.comparison import Replay, replay
from tarry.tuning.evidence import Evidence, Hedge, Odds, Outage, gather
from tarry.tuning.proposal import Proposal, propose
from tarry.tuning.rules import Line

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
