"""A policy in words: its schedule, its worst case time and its worst case load."""

from __future__ import annotations

from typing import Protocol

_ROWS = 12
_LONGEST = 10_000
_ALMOST_ONE = 0.9995
"""From here on three digits of milliseconds would read 1e+03."""
_EDGE = 1.0 - 2.0**-53
"""The largest number below 1: as good as the worst draw."""
_THREE_DIGITS, _READABLE = 100, 1_000_000
"""Between them three digits or more are those of a whole number, which needs no exponent."""


class Explainable(Protocol):
    """The parts of a policy that are told."""

    @property
    def max_attempts(self) -> int:
        """Attempts in all."""
        ...

    @property
    def total_budget(self) -> float | None:
        """Seconds for the call."""
        ...

    @property
    def attempt_timeout(self) -> float | None:
        """Seconds for one attempt."""
        ...

    @property
    def backoff(self) -> object:
        """A name or a callable."""
        ...

    @property
    def jitter(self) -> object:
        """A name or a callable."""
        ...

    def ceiling(self, k: int, /) -> float:
        """Return the bound of the delay before retry k."""
        ...

    def delay(self, ceiling: float, previous: float | None, u: float, /) -> float:
        """Return the delay that jitter makes of a ceiling."""
        ...


def explain(policy: Explainable) -> str:
    """Describe a policy for a person who has to decide whether to use it."""
    ceilings, retries, worst = _schedule(policy)
    jitter = policy.jitter if isinstance(policy.jitter, str) else "custom"
    backoff = policy.backoff if isinstance(policy.backoff, str) else "custom"
    plural = "" if policy.max_attempts == 1 else "s"
    lines = [
        f"{policy.max_attempts} attempt{plural}, {backoff} backoff, {jitter} jitter",
        "",
        "retry   ceiling   delay from .. to",
    ]
    previous_low = previous_high = None
    for k, ceiling in enumerate(ceilings[:_ROWS], 1):
        low = previous_low = policy.delay(ceiling, previous_low, 0.0)
        high = previous_high = policy.delay(ceiling, previous_high, _EDGE)
        lines.append(
            f"{k:>5}  {format_duration(ceiling):>8}   "
            f"{format_duration(low):>10} .. {format_duration(high)}"
        )
    if retries > _ROWS:
        lines.append(f"  ...  {retries - _ROWS} more, the last {format_duration(ceilings[-1])}")
    lines.append("")
    if policy.attempt_timeout is None:
        lines.append(
            f"worst case time: {format_duration(worst)} of waiting, plus the attempts themselves"
        )
    else:
        longest = worst + policy.attempt_timeout * (retries + 1)
        if policy.total_budget is not None:
            longest = min(longest, policy.total_budget + policy.attempt_timeout)
        lines.append(f"worst case time: {format_duration(longest)}, attempts included")
    if policy.total_budget is not None:
        lines.append(
            f"total budget: {format_duration(policy.total_budget)}; no attempt starts beyond it"
        )
    # By how much a budget lowers it is for those to say who know the budget.
    unless = ", unless a retry budget bounds it" if retries else ""
    lines.append(f"worst case load: {retries + 1} x the calls while every attempt fails{unless}")
    return "\n".join(lines)


def format_duration(seconds: float) -> str:
    """Return seconds as a person would write them: 100 ms, 2.5 s, 3 min, 75 h."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{_digits(seconds / size)} {unit}"
    if seconds >= _ALMOST_ONE:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds * 1000)} ms"


def _digits(number: float) -> str:
    """Round to three digits, and keep all of those before the point."""
    return f"{number:.0f}" if _THREE_DIGITS <= number < _READABLE else f"{number:.3g}"


def _schedule(policy: Explainable) -> tuple[list[float], int, float]:
    """Return the first ceilings, how many retries can happen, and the longest they wait in all."""
    ceilings: list[float] = []
    worst = fastest = 0.0
    low = high = 0.0
    previous_low = previous_high = None
    retries = policy.max_attempts - 1
    for k in range(1, min(retries, _LONGEST) + 1):
        ceiling = policy.ceiling(k)
        low = previous_low = policy.delay(ceiling, previous_low, 0.0)
        high = previous_high = policy.delay(ceiling, previous_high, _EDGE)
        fastest += low
        if policy.total_budget is not None and fastest >= policy.total_budget:
            retries = k - 1
            break
        worst += high
        ceilings.append(ceiling)
    # By then no ceiling that we know still grows: the rest is more of the same.
    worst += max(0, retries - _LONGEST) * high
    if policy.total_budget is not None:
        worst = min(worst, policy.total_budget)
    return ceilings, retries, worst
