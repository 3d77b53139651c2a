"""Text for messages: durations (100 ms, 2.5 s), counts, and suggestions for misspelt names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MIN_PRINTED_IN_SECONDS = 0.9995
"""Shorter durations are printed in ms. Less than 1 s, because 999.5 ms would become "1000 ms"."""
_MIN_SUFFIX_CHARS = 3
"""A shorter word may be the end of a candidate by chance."""
_MIN_PRINTED_AS_INTEGER, _MAX_PRINTED_AS_INTEGER = 100, 1_000_000
"""Numbers in this range are printed as integers, because `.3g` prints 1234 as "1.23e+03"."""


def format_duration(seconds: float) -> str:
    """Return a duration with about three digits: 100 ms, 90 s (up to 2 min), 3 min, 75 h."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{_format_number(seconds / size)} {unit}"
    if seconds >= _MIN_PRINTED_IN_SECONDS:
        return f"{_format_number(seconds)} s"
    return f"{_format_number(seconds * 1000)} ms"


def _format_number(number: float) -> str:
    as_integer = _MIN_PRINTED_AS_INTEGER <= number < _MAX_PRINTED_AS_INTEGER
    return f"{number:.0f}" if as_integer else f"{number:.3g}"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 outage", "1,200 outages"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_ranges(numbers: Iterable[int]) -> str:
    """Return sorted whole numbers as text, three or more in a row as a range: "429, 502-504"."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))  # noqa: PLR2004 - as above
        for run in ranges
    )


def suggest(word: str, candidates: Iterable[str], *, similarity: float = 0.6) -> str | None:
    """Return the candidate that is most like `word`, or None when none is similar enough.

    `similarity` is the lowest ratio of `difflib.SequenceMatcher` that is accepted, from 0 to 1. A
    candidate that ends with `word` is similar, whatever its ratio: `url` suggests `targetUrl`.
    """
    from difflib import get_close_matches  # imported late: needed only for errors

    names = list(candidates)
    if close := get_close_matches(word, names, n=1, cutoff=similarity):
        return close[0]
    if len(word) < _MIN_SUFFIX_CHARS:
        return None
    return next((name for name in names if name.lower().endswith(word.lower())), None)


def did_you_mean(word: str, candidates: Iterable[str], *, otherwise: str = "it has") -> str:
    """Return "did you mean 'x'?" or else "it has a, b", to append to "a policy has no field z"."""
    names = list(candidates)
    close = suggest(word, names)
    return f"did you mean {close!r}?" if close else f"{otherwise} {', '.join(names)}"
