"""Tuning: read an attempt log and propose a policy, with a reason for each value.

`propose(analyze_log(read_attempt_log(path)))` returns the proposal. `compare_policies` simulates
the current and the proposed `Defence`: a policy, or hedging, with breaker, budget and limiter.
"""

from tarry.tuning.attempt_log import AttemptLog, LoggedAttempt, read_attempt_log
from tarry.tuning.comparison import Comparison, compare_policies
from tarry.tuning.evidence import AttemptSuccessRate, Evidence, HedgeEstimate, Outage, analyze_log
from tarry.tuning.proposal import Proposal, propose
from tarry.tuning.rules import Suggestion

__all__ = [
    "AttemptLog", "AttemptSuccessRate", "Comparison", "Evidence", "HedgeEstimate", "LoggedAttempt",
    "Outage", "Proposal", "Suggestion", "analyze_log", "compare_policies", "propose",
    "read_attempt_log",
]  # fmt: skip
