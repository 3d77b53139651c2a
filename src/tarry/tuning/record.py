"""A proposal as JSON: the evidence in numbers, the lines, the policy and both runs."""

from __future__ import annotations

import json
from math import isfinite
from typing import TYPE_CHECKING, Any

from tarry.simulator.meter import quantile
from tarry.tuning.verdict import verdict

if TYPE_CHECKING:
    from tarry.simulator.summary import Summary
    from tarry.tuning.evidence import Evidence
    from tarry.tuning.proposal import Proposal
    from tarry.tuning.replay import Replay

_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.5": 0.995, "p99.9": 0.999}


def record(evidence: Evidence, proposal: Proposal, runs: Replay | None = None) -> str:
    """Write it all down. Times are seconds; what was never reached is null."""
    plain: dict[str, Any] = {
        "log": {
            "attempts": evidence.attempts,
            "calls": evidence.calls,
            "span": evidence.span,
            "success_rate": evidence.success_rate,
            "attempts_per_call": evidence.attempts_per_call,
            "healthy": _quantiles(evidence.healthy),
            "calls_that_succeeded": _quantiles(evidence.call_times),
            "failure_rate": evidence.fault_share,
            "retry_ratio": evidence.healthy_retry_ratio,
            "most_at_once": evidence.most_at_once,
            "odds": [one._asdict() for one in evidence.odds],
            "outages": [
                {"start": one.start, "end": one.end, "share": one.share} for one in evidence.outages
            ],
            "hedges": [one._asdict() for one in evidence.hedges],
        },
        "remarks": list(proposal.remarks),
        "lines": [line._asdict() for line in proposal.lines],
        "policy": proposal.defence.to_dict(),
    }
    if runs is not None:
        plain["simulated"] = {
            "duration": runs.duration,
            "rate": runs.rate,
            "outages": runs.outages,
            "concurrency": runs.concurrency,
            "old": _metrics(runs.old),
            "new": _metrics(runs.new),
            "verdict": verdict(runs.old, runs.new),
        }
    return json.dumps(plain, indent=2, allow_nan=False)


def _quantiles(ordered: Any) -> dict[str, Any]:
    values = {name: quantile(ordered, q) for name, q in _QUANTILES.items()} if ordered else {}
    return {"count": len(ordered), **values}


def _metrics(summary: Summary) -> dict[str, float | None]:
    return {name: one if isfinite(one) else None for name, one in summary.metrics().items()}
