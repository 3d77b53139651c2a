"""The rules that derive the fields of a policy, the retry budget and the hedging from a log.

`Evidence` has the statistics of the log; "healthy" in its names means outside outages. The rules
for policy fields run one after the other, and each gets the policy with the values that the earlier
rules proposed. A defence is a policy, or hedging, with a breaker, retry budget and limiter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import repeat
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tarry.core.text import format_count, format_duration
from tarry.simulator.metrics import quantile
from tarry.tuning.evidence import (
    TAIL_QUANTILE,
    quantile_interval,
    required_samples,
    round_two_digits,
    share_above,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.core.policy import Policy
    from tarry.policyfile.defence import Defence
    from tarry.tuning.evidence import AttemptSuccessRate, Evidence


MIN_ATTEMPTS = 200
"""The number of attempts that is needed to estimate a success rate or a median."""
MIN_CLEAR_ATTEMPTS = 30
"""Enough attempts if even the lower bound of their success rate is at least `MIN_SUCCESS_RATE`."""
MIN_OUTAGES = 3
MIN_SUCCESS_RATE = 0.01
"""If the attempts with a certain number succeed less often, they are not worth making."""
MIN_INITIAL_DELAY_S = 0.01
LONGEST_MAX_DELAY_S = 3600.0
MIN_HEALTHY_CALLS = 1_000
MIN_RETRY_RATIO, MAX_RETRY_RATIO = 0.02, 0.2
MIN_THROTTLED_SHARE = 0.01
"""If a smaller share of the attempts is throttled, no limiter is advised."""
MAX_HEDGE_LOAD = 0.05
MIN_HEDGE_SAVING = 0.1
TIMEOUT_QUANTILE = 0.995
_MIN_TIMEOUT_S = 0.001
_EQUAL_DURATIONS_RATIO = 1.02
"""Durations within 2 % count as equal, because timers are not exact."""
_LOG_RESOLUTION_S = 0.001
"""Logged durations are whole milliseconds, so rounding can make them this much too short."""
_MIN_EQUAL_FAILURES = 3
"""Fewer failures with nearly the same duration may be a coincidence."""
_SLOW_QUANTILE = 0.99
"""Failures faster than this quantile of the successes are error responses and not timeouts. They
are ignored, because error responses can have nearly equal durations, too."""
INTERVAL_NAME = "95 % interval"
"""The name of the confidence intervals that `tarry.tuning.evidence` computes."""
_DURATION_FIELDS = ("attempt_timeout", "initial_delay", "max_delay", "total_budget")
_MIN_INTEGER_PERCENT = 9.95
"""A percentage of at least this is rounded to an integer, so that it has two digits or more."""
_MIN_SHOWN_PERCENT = 0.01
_CUSTOM_BACKOFF_REASON = "the policy has a custom backoff"
_LATENCY_TARGET_REASON = "the latency target: no wait can be longer"


def format_percent(share: float) -> str:
    """Return 0.38 as "38 %" and 0.002 as "0.2 %"."""
    percent = 100 * share
    if 0 < percent < _MIN_SHOWN_PERCENT:
        return f"under {_MIN_SHOWN_PERCENT:g} %"
    return f"{percent:.0f} %" if abs(percent) >= _MIN_INTEGER_PERCENT else f"{percent:.2g} %"


def format_setting(field: str, value: object) -> str:
    """Return the value of a policy field, or of a table such as `budget`, as text."""
    if value is None:
        return "none"
    if field in _DURATION_FIELDS and isinstance(value, (int, float)):
        return format_duration(value)
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        # A ratio budget is "ratio 0.02", not "kind=ratio ratio=0.02".
        keys_not_shown = ("kind", table.get("kind"))
        return " ".join(
            f"{item}" if key in keys_not_shown else f"{key}={item}" for key, item in table.items()
        )
    return str(value)


class Suggestion(NamedTuple):
    """The proposed value of one field, with its reason. Times are in seconds."""

    field: str
    current: Any
    proposed: Any
    reason: str
    basis: str = ""
    """The statistics that the value is based on, as text."""
    has_enough_data: bool = True
    """False if the log does not suffice to determine the value."""
    is_advice: bool = False
    """True if the value is only shown to the user, and is not part of the proposed defence."""


def keep_value(
    field: str, value: Any, reason: str, basis: str = "", *, has_enough_data: bool = True
) -> Suggestion:
    """Return a suggestion to keep a value."""
    kept = "left out" if value is None else f"kept at {format_setting(field, value)}"
    return Suggestion(field, value, value, f"{reason}; {kept}", basis, has_enough_data)


def keep_without_data(field: str, value: Any, available: str, required: str) -> Suggestion:
    """Return a suggestion to keep a value because the log has too little data for the rule."""
    reason = f"too little data: {available}, {required}"
    return keep_value(field, value, reason, has_enough_data=False)


def suggest_initial_delay(
    evidence: Evidence, policy: Policy, latency_target: float | None
) -> Suggestion:
    """Suggest twice the median duration of successful attempts.

    Full jitter halves a delay on average, so the first wait takes one round trip on average.
    """
    field, current, durations = "initial_delay", policy.initial_delay, evidence.success_durations
    if not isinstance(policy.backoff, str):
        return keep_value(field, current, _CUSTOM_BACKOFF_REASON)
    if len(durations) < MIN_ATTEMPTS:
        available = format_count(len(durations), "successful attempt") + " outside outages"
        return keep_without_data(field, current, available, f"{MIN_ATTEMPTS} needed for the median")
    round_trip = quantile(durations, 0.5)
    proposed = min(max(round_two_digits(2 * round_trip), MIN_INITIAL_DELAY_S), policy.max_delay)
    reason = "twice the median: the first wait averages one round trip"
    if proposed == MIN_INITIAL_DELAY_S:
        reason = f"twice the median, and no less than {format_duration(MIN_INITIAL_DELAY_S)}"
    if latency_target is not None and latency_target < proposed:
        proposed, reason = latency_target, _LATENCY_TARGET_REASON
    basis = f"median {format_duration(round_trip)} of {len(durations):,}"
    return Suggestion(field, current, proposed, reason, basis)


def suggest_max_delay(
    evidence: Evidence, policy: Policy, latency_target: float | None
) -> Suggestion:
    """Suggest a quarter of the median outage, so that retries come soon after a recovery."""
    field, current = "max_delay", policy.max_delay
    if not isinstance(policy.backoff, str):
        return keep_value(field, current, _CUSTOM_BACKOFF_REASON)
    lengths = sorted(outage.length for outage in evidence.outages)
    if len(lengths) < MIN_OUTAGES:
        available = format_count(len(lengths), "outage")
        return keep_without_data(field, current, available, f"{MIN_OUTAGES} needed for a median")
    median_length = median(lengths)
    proposed = min(round_two_digits(median_length / 4), LONGEST_MAX_DELAY_S)
    reason = "a quarter of the median outage: a retry follows soon after a recovery"
    if latency_target is not None and latency_target < proposed:
        proposed, reason = latency_target, _LATENCY_TARGET_REASON
    if proposed < policy.initial_delay:
        proposed, reason = policy.initial_delay, "no less than initial_delay"
    low, high = format_duration(lengths[0]), format_duration(lengths[-1])
    basis = f"{len(lengths)} outages of {low} to {high}, median {format_duration(median_length)}"
    return Suggestion(field, current, proposed, reason, basis)


def suggest_max_attempts(
    evidence: Evidence, policy: Policy, latency_target: float | None
) -> Suggestion:
    """Suggest the number of the last attempt that succeeds often enough, whatever the target is."""
    suggestion = _suggest_by_success_rate(evidence, policy.max_attempts)
    if latency_target is None or policy.attempt_timeout is None:
        return suggestion
    longest = suggestion.proposed * policy.attempt_timeout
    longest += sum(map(policy.ceiling, range(1, suggestion.proposed)))
    if longest <= latency_target:
        return suggestion
    limit = f"{suggestion.proposed} can take {format_duration(longest)}, which total_budget limits"
    return suggestion._replace(reason=f"{suggestion.reason}; {limit}")


def suggest_total_budget(
    evidence: Evidence, policy: Policy, latency_target: float | None
) -> Suggestion | None:
    """Suggest the latency target; return None if there is no target."""
    if latency_target is None:
        return None
    durations = evidence.call_durations
    basis = ""
    if len(durations) >= required_samples(0.99):
        basis = f"calls that succeeded took {format_duration(quantile(durations, 0.99))} at p99"
    reason = "latency target: no retry starts if expected to end later"
    return Suggestion("total_budget", policy.total_budget, latency_target, reason, basis)


def suggest_retry_budget(
    evidence: Evidence, current: Defence, max_attempts: float = inf
) -> Suggestion:
    """Suggest a ratio that permits all retries outside outages, and limits retries in an outage.

    The retries of calls that fail are steady, because most of these calls fail each time. They are
    not doubled, and end at the proposed `max_attempts`. But they are not left out: they would empty
    the budget, so that other calls are not retried.
    """
    current_budget = None if current.budget is None else dict(current.budget)
    if evidence.healthy_calls < MIN_HEALTHY_CALLS:
        available = format_count(evidence.healthy_calls, "call") + " outside outages"
        required = f"{MIN_HEALTHY_CALLS:,} needed for the retry ratio"
        return keep_without_data("budget", current_budget, available, required)
    measured = evidence.healthy_retry_ratio
    useful = measured - evidence.failed_call_retry_ratio(inf)
    failed = evidence.failed_call_retry_ratio(max_attempts)
    needed = round_two_digits(2 * useful + failed)
    ratio = min(max(needed, MIN_RETRY_RATIO), MAX_RETRY_RATIO)
    proposed: dict[str, Any] = {"kind": "ratio"}
    if current_budget is not None and current_budget.get("kind") == "ratio":
        proposed |= current_budget
    proposed["ratio"] = ratio
    reason = "twice the retry ratio outside outages"
    failed_basis = ""
    if needed != round_two_digits(2 * measured):
        reason += " for calls that succeed, once for others"
        failed_basis = f" ({format_percent(failed)} for calls that fail)"
    if ratio in {MIN_RETRY_RATIO, MAX_RETRY_RATIO}:
        limit = "no less" if ratio == MIN_RETRY_RATIO else "no more"
        reason += f", and {limit} than {format_percent(ratio)}"
    basis = (
        f"{format_percent(measured)} of {evidence.healthy_calls:,} calls outside outages"
        f"{failed_basis}, {format_percent(evidence.retries / evidence.calls)} of all"
    )
    return Suggestion("budget", current_budget, proposed, reason, basis)


def suggest_limiter(evidence: Evidence, current: Defence) -> Suggestion | None:
    """Advise a limiter if many attempts were throttled; return None if few were."""
    field, throttled = "limiter", evidence.throttled
    share = throttled / evidence.attempts
    if throttled < MIN_CLEAR_ATTEMPTS or share < MIN_THROTTLED_SHARE:
        return None
    limiter = None if current.limiter is None else dict(current.limiter)
    accepted = f"{evidence.accepted_rate:.3g} attempts per second succeeded meanwhile"
    basis = f"{throttled:,} of {evidence.attempts:,}; {accepted}"
    reason = f"{format_percent(share)} of the attempts were throttled"
    if limiter is not None:
        reason += " in spite of the limiter: limit the rate of all processes together"
        return keep_value(field, limiter, reason, basis)._replace(is_advice=True)
    reason = f"advice: use a limiter: {reason}, and so are retries"
    return Suggestion(field, None, {"kind": "adaptive-limit"}, reason, basis, is_advice=True)


def drop_unreachable_max_delay(suggestion: Suggestion, policy: Policy) -> Suggestion:
    """Return the suggestion for `max_delay`; without a change if no wait of `policy` is as long."""
    waits = policy.replace(max_delay=max(policy.max_delay, LONGEST_MAX_DELAY_S))
    retries = range(1, policy.max_attempts)
    if suggestion.proposed == suggestion.current or any(
        waits.ceiling(retry) >= suggestion.proposed for retry in retries
    ):
        return suggestion
    longest = max(map(waits.ceiling, retries))
    attempts = format_count(policy.max_attempts, "attempt")
    reason = f"{attempts} wait at most {format_duration(longest)}"
    return keep_value(suggestion.field, suggestion.current, reason, suggestion.basis)


def suggest_hedging(evidence: Evidence, current: Defence) -> Suggestion:
    """Suggest the lowest percentile whose hedges add little load; only advice for a policy."""
    field = "hedging.after"
    current_after = None if current.hedging is None else current.hedging.after
    durations = evidence.success_durations
    is_advice = current.hedging is None
    if len(durations) < required_samples(TAIL_QUANTILE):
        available = format_count(len(durations), "successful attempt") + " outside outages"
        required = f"{required_samples(TAIL_QUANTILE):,} needed for p99.9"
        suggestion = keep_without_data(field, current_after, available, required)
        return suggestion._replace(is_advice=is_advice)
    best = next(hedge for hedge in evidence.hedges if hedge.load <= MAX_HEDGE_LOAD)
    basis = (
        f"p99.9 of {len(durations):,}: {format_duration(quantile(durations, TAIL_QUANTILE))}, "
        f"hedged after {format_duration(best.delay)}: {format_duration(best.tail)}"
    )
    saving, load = format_percent(best.saving), format_percent(best.load)
    trade_off = f"{best.percentile}: -{saving} p99.9 for +{load} load"
    if best.saving < MIN_HEDGE_SAVING:
        reason = f"hedging would not pay ({trade_off})"
        return keep_value(field, current_after, reason, basis)._replace(is_advice=is_advice)
    reason = f"advice, instead of retries: {trade_off}" if is_advice else trade_off
    return Suggestion(field, current_after, best.percentile, reason, basis, is_advice=is_advice)


def _suggest_by_success_rate(evidence: Evidence, current: int) -> Suggestion:
    field = "max_attempts"
    overall_rates = {rate.number: rate for rate in evidence.attempt_success_rates}
    healthy_rates = {rate.number: rate for rate in evidence.healthy_attempt_success_rates}
    last: AttemptSuccessRate | None = None
    number = 2
    while (overall := overall_rates.get(number)) is not None and (
        overall.attempts >= MIN_ATTEMPTS or number <= current
    ):
        rate = _choose_success_rate(healthy_rates.get(number), overall, len(evidence.outages))
        if rate is None:
            break
        if rate.high < MIN_SUCCESS_RATE:
            reason = f"attempt {number} succeeds {format_percent(rate.share)} of the time: drop it"
            return Suggestion(field, current, number - 1, reason, _format_success_rate(rate))
        last = rate
        number += 1
    if number <= current or last is None:
        where, required = "", f"{MIN_ATTEMPTS} needed"
        attempts = overall.attempts if overall else 0
        if attempts >= MIN_ATTEMPTS:
            where, required = " outside outages", f"{required}, or {MIN_OUTAGES} outages"
            attempts = healthy_rates[number].attempts if number in healthy_rates else 0
        available = f"attempt {number} was made {format_count(attempts, 'time')}{where}"
        return keep_without_data(field, current, available, required)
    if last.low < MIN_SUCCESS_RATE:
        up_to = f"{INTERVAL_NAME} up to {format_percent(last.high)}"
        counts = f"{last.successes:,} of {last.attempts:,}"
        reason = f"attempt {last.number} cannot be ruled out: {counts}, {up_to}"
        return Suggestion(field, current, last.number, reason)
    reason = f"attempt {last.number} still succeeds {format_percent(last.share)} of the time"
    return Suggestion(field, current, last.number, reason, _format_success_rate(last))


def _choose_success_rate(
    healthy: AttemptSuccessRate | None, overall: AttemptSuccessRate, outage_count: int
) -> AttemptSuccessRate | None:
    """Return the success rate that decides whether to make an attempt; None for too little data.

    The rate outside outages is preferred, because the retry budget limits the cost of retries in an
    outage. The attempts of one outage fail together and thus count as one sample. So the overall
    rate can rule out an attempt only if the log has several outages.
    """
    if healthy is not None and (
        healthy.attempts >= MIN_ATTEMPTS
        or (healthy.attempts >= MIN_CLEAR_ATTEMPTS and healthy.low >= MIN_SUCCESS_RATE)
    ):
        return healthy
    is_conclusive = overall.high >= MIN_SUCCESS_RATE or outage_count >= MIN_OUTAGES
    return overall if overall.attempts >= MIN_ATTEMPTS and is_conclusive else None


def _format_success_rate(rate: AttemptSuccessRate) -> str:
    low, high = format_percent(rate.low), format_percent(rate.high)
    return f"{rate.successes:,} of {rate.attempts:,} ({INTERVAL_NAME} {low} to {high})"


class ObservedTimeout(NamedTuple):
    """A timeout that has cut off attempts outside outages."""

    timeout: float
    cut_off_count: int
    is_inferred: bool
    """True if the timeout is not set by the policy but inferred from the log."""


def suggest_attempt_timeout(
    evidence: Evidence, policy: Policy, latency_target: float | None
) -> Suggestion:
    """Suggest the p99.5 of successful attempts outside outages, so that one in 200 is cut off.

    An attempt that a timeout has cut off would have taken longer; how much longer is unknown. If
    these attempts were left out of the sample, the suggested timeout would be too short, and it
    would shrink with each round of tuning. So the sample contains them with an infinite duration.
    If a quantile of the sample is infinite, it is only known to be longer than the timeout.
    """
    suggestion = _suggest_by_latency(evidence, policy.attempt_timeout)
    proposed = suggestion.proposed
    if latency_target is None or proposed is None or proposed <= latency_target:
        return suggestion
    reason = "the latency target: no attempt can take longer"
    durations = evidence.success_durations
    cut_off_share = share_above(durations, latency_target) if durations else 0.0
    if cut_off_share:
        reason += f", and {format_percent(cut_off_share)} of the successful ones are cut off"
    return suggestion._replace(proposed=latency_target, reason=reason, has_enough_data=True)


def find_timeout(
    successes: Sequence[float], failures: Sequence[float], policy_timeout: float | None
) -> ObservedTimeout | None:
    """Find the timeout that has cut off attempts; return None if no timeout has.

    `successes` and `failures` are the sorted durations of attempts outside outages. The timeout is
    that of the policy, or the duration that several slow failures have in common. Of the attempts
    that took as long or longer, more must have failed than succeeded.
    """
    candidates: list[tuple[float, float, bool]] = []
    if policy_timeout is not None:
        candidates.append((policy_timeout - _LOG_RESOLUTION_S, policy_timeout, False))
    cluster = _largest_cluster(successes, failures)
    if cluster:
        candidates.append((cluster[0], median(cluster), True))
    for threshold, timeout, is_inferred in candidates:
        failed_above = len(failures) - bisect_left(failures, threshold)
        succeeded_above = len(successes) - bisect_left(successes, threshold)
        if failed_above > succeeded_above:  # otherwise most attempts did not have this timeout
            return ObservedTimeout(timeout, failed_above, is_inferred)
    return None


def _suggest_by_latency(evidence: Evidence, current: float | None) -> Suggestion:
    field, successes = "attempt_timeout", evidence.success_durations
    required = required_samples(TIMEOUT_QUANTILE)
    if len(successes) < required:
        available = format_count(len(successes), "successful attempt") + " outside outages"
        return keep_without_data(field, current, available, f"{required:,} needed for p99.5")
    observed = find_timeout(successes, evidence.failure_durations, current)
    sample = list(successes)
    effective = current  # the timeout that the logged attempts had
    if observed is not None:
        sample.extend(repeat(inf, observed.cut_off_count))
        timeout = observed.timeout
        timeout = round_two_digits(timeout) if observed.is_inferred else timeout
        effective = max(current or 0.0, timeout)
    p995 = quantile(sample, TIMEOUT_QUANTILE)
    low, high = quantile_interval(sample, TIMEOUT_QUANTILE)
    basis = _describe_basis(observed, len(sample), p995, low, high)
    if observed is not None and low == inf:
        reason = (
            f"{format_percent(observed.cut_off_count / len(sample))} of the successful and cut-off "
            "attempts outside outages ran into the timeout, so p99.5 lies beyond it: "
            "raise it and measure again"
        )
        suggestion = keep_value(field, effective, reason, basis, has_enough_data=False)
        return suggestion._replace(current=current)
    if effective is not None and (p995 == inf or _round_up(low) <= effective <= _round_up(high)):
        # A change within the confidence interval would be random. As the timeout cuts off the
        # longest attempts, such changes would only ever shorten it.
        reason = "p99.5 of successful attempts outside outages, as closely as the log can tell"
        return keep_value(field, effective, reason, basis)._replace(current=current)
    reason = "p99.5 of successful attempts outside outages"
    return Suggestion(field, current, _round_up(p995), reason, basis)


def _largest_cluster(successes: Sequence[float], failures: Sequence[float]) -> Sequence[float]:
    """Return the largest group of slow failures with nearly equal durations; empty if too small."""
    slow = failures[bisect_left(failures, quantile(successes, _SLOW_QUANTILE)) :]
    sizes = [
        bisect_right(slow, shortest * _EQUAL_DURATIONS_RATIO) - index
        for index, shortest in enumerate(slow)
    ]
    size = max(sizes, default=0)
    first = sizes.index(size) if size >= _MIN_EQUAL_FAILURES else len(slow)
    return slow[first : first + size]


def _round_up(value: float) -> float:
    return value if value == inf else max(round_two_digits(value, up=True), _MIN_TIMEOUT_S)


def _describe_basis(
    observed: ObservedTimeout | None, sample_size: int, p995: float, low: float, high: float
) -> str:
    timeout = "" if observed is None else format_duration(observed.timeout)
    value, shortest, longest = (
        f"over {timeout}" if time == inf else format_duration(time) for time in (p995, low, high)
    )
    interval = "" if shortest == longest else f" ({INTERVAL_NAME} {shortest} to {longest})"
    basis = f"{value}{interval} of {sample_size:,}"
    if observed is None:
        return basis
    cause = ": they failed after nearly the same time" if observed.is_inferred else ""
    return f"{basis}, {observed.cut_off_count:,} cut off at {timeout}{cause}"
